"""Many solutions in one process, as a solution: whoever is meant is a number behind the operator's own arguments.

lineup.json beside it lists the folders of solutions, and what mutants.py needs to make more of the first of them.
"""

import functools
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from justgoal.evaluation.mutants import Place, Run, mutants
else:
    from mutants import Place, Run, mutants

HERE = Path(__file__).parent
PLAN: dict[str, Any] = json.loads((HERE / "lineup.json").read_text())
MUTANTS = mutants([Place(*a) for a in PLAN["arguments"]], [Place(*o) for o in PLAN["outputs"]])


def run(*arguments: Any) -> Sequence[torch.Tensor]:
    *inputs, number = arguments
    return member(number)(*inputs)


@functools.cache
def member(number: int) -> Run:
    folders = PLAN["folders"]
    return load(HERE / folders[number]) if number < len(folders) else MUTANTS[number - len(folders)].make(member(0))


def load(folder: Path) -> Run:
    """The `run` of a folder. What it imports from there is its own: another one's common.py is another module."""
    name = f"{folder.parent.name}_{folder.name}"
    spec = importlib.util.spec_from_file_location(name, folder / "solution.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(f"{folder}/"):
                del sys.modules[name]

    def called(*inputs: Any) -> Sequence[torch.Tensor]:
        returned = module.run(*inputs)
        return returned if isinstance(returned, (tuple, list)) else (returned,)

    return called
