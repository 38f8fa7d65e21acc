"""What the agent is given about a task, and what it must never see."""

import ast
import builtins
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from justgoal import resources
from justgoal.tasks import contract, handout
from justgoal.tasks.contract import CATALOGUE, Task

OPERATORS = Path(__file__).parent / "operators"
FOLDERS = [*sorted(path.parent for path in CATALOGUE.glob("*/operator.toml")), *sorted(OPERATORS.glob("*/"))]
each_operator = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)

SOURCE = '''"""The docstring."""

import math
from functools import partial

import torch
from torch.nn import functional as F

LIMIT = 3  # a comment
SCALE: float = 2.0 * LIMIT
SECRET = 7
A, (B, C) = 1, (2, 3)
HIDDEN_A, HIDDEN_B = 4, 5


class Inputs:
    size = LIMIT


class Trap(Inputs):
    pass


@partial
def helper(x):
    return x + SCALE


def trap(x):
    return helper(x) * SECRET


# a comment about the hardest case
def reference(x):
    return helper(x) + B


def make_inputs(workload, generator, device):
    def inner():
        return Inputs()
    return inner()


def edge_cases(workload):
    return {"the hardest case": trap, "another": lambda g, d: Trap()}


print("loaded", HIDDEN_A)
'''

PUBLIC = '''"""The docstring."""

import math

from functools import partial

import torch

from torch.nn import functional as F

LIMIT = 3  # a comment

SCALE: float = 2.0 * LIMIT

A, (B, C) = 1, (2, 3)

class Inputs:
    size = LIMIT

@partial
def helper(x):
    return x + SCALE

def reference(x):
    return helper(x) + B

def make_inputs(workload, generator, device):
    def inner():
        return Inputs()
    return inner()
'''


TERMS = {"pairs": "6", "minimum_gain": "0.7 %"}


def loaded(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "reference"}
    exec(compile(source, "reference.py", "exec"), names)
    return names


def handed_out(task: Task, folder: Path, expert: str | None = None) -> Path:
    handout.write(
        task, "One.\nTwo.", expert or task.operator.experts[0].name, TERMS, resources.prompts(), folder / "task"
    )
    return folder / "task"


def everything(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.rglob("*")) if path.is_file())


def defined(source: str) -> set[str]:
    return {name for node in ast.parse(source).body for name in handout._defines(node)}


def test_public_source(tmp_path: Path) -> None:
    (tmp_path / "reference.py").write_text(SOURCE)
    assert handout.public_source(tmp_path / "reference.py") == PUBLIC


@pytest.mark.parametrize(
    ("statement", "used"),
    [
        ("SECRET = 1\nT = {}\nT['x'] = SECRET", "T"),
        ("if True:\n    SECRET = 1\nelse:\n    SECRET = 2", "SECRET"),
        ("try:\n    import numpy as SECRET\nexcept ImportError:\n    SECRET = None", "SECRET"),
        ("SECRET = 1\nSECRET += 1", "SECRET"),
        ("with torch.no_grad():\n    SECRET = 1", "SECRET"),
        ("for SECRET in range(3):\n    pass", "SECRET"),
        ("def SECRET(): return inner()\n\ndef inner(): return 1\n\ndef SECRET2(): return SECRET()", "SECRET2()"),
        ("class SECRET:\n    one = 1\n\ndef SECRET2(x: SECRET = SECRET.one): return x", "SECRET2()"),
        ("def f(): return 1\nSECRET = f()", "SECRET"),
        ("def base(): return 1\ndef SECRET(): return base()\n_old = SECRET\ndef SECRET(): return _old()", "SECRET()"),
    ],
)
def test_public_source_still_runs(tmp_path: Path, statement: str, used: str) -> None:
    """Whatever form a name is defined in: the public source gives what the whole one gives."""
    source = f"import torch\n\n{statement}\n\ndef reference():\n    return {used}\n\ndef edge_cases(workload): {{}}\n"
    (tmp_path / "reference.py").write_text(source)
    public = loaded(handout.public_source(tmp_path / "reference.py"))
    assert public["reference"]() == loaded(source)["reference"]()


@each_operator
def test_public_inputs_are_made_by_the_same_functions(folder: Path) -> None:
    """Statement by statement the public source is part of the whole, and it makes the same inputs."""
    source = (folder / "reference.py").read_text()
    public = handout.public_source(folder / "reference.py")
    assert [node for node in statements(public) if node not in statements(source)] == []
    workload = smallest(folder)
    made = [loaded(one)["make_inputs"](workload, torch.Generator().manual_seed(5), "cpu") for one in (public, source)]
    assert same(*made)


@pytest.mark.parametrize("name", ["scale_add", "largest"])
def test_public_reference_is_the_same_function(name: str) -> None:
    public, whole = (
        loaded(text)
        for text in (
            handout.public_source(OPERATORS / name / "reference.py"),
            (OPERATORS / name / "reference.py").read_text(),
        )
    )
    made = public["make_inputs"](smallest(OPERATORS / name), torch.Generator().manual_seed(5), "cpu")
    assert same(public["reference"](*made), whole["reference"](*made))


def statements(source: str) -> list[str]:
    return [ast.dump(node) for node in ast.parse(source).body]


def smallest(folder: Path) -> contract.Workload:
    return min(contract.load(str(folder)).workloads, key=lambda workload: sum(workload.axes.values()))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@each_operator
def test_no_edge_case_is_handed_out(folder: Path, tmp_path: Path) -> None:
    """Neither their names nor anything that only they use, in any file."""
    source = (folder / "reference.py").read_text()
    task = contract.task(str(folder))
    text = everything(handed_out(task, tmp_path))
    cases = loaded(source)["edge_cases"](task.workload)
    assert [case for case in cases if f'"{case}"' in text or f"'{case}'" in text] == []
    secret = defined(source) - defined(handout.public_source(folder / "reference.py"))
    assert "edge_cases" in secret
    assert [name for name in secret if name in text] == []


@each_operator
def test_task_folder(folder: Path, tmp_path: Path) -> None:
    task = contract.task(f"{folder}/{contract.load(str(folder)).workloads[-1].name}")
    [*_, expert] = task.operator.experts
    target = handed_out(task, tmp_path, expert.name)
    sources = {path.relative_to(expert.folder).as_posix() for path in expert.folder.rglob("*") if path.is_file()}
    files = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert files == {
        "README.md", "goal.txt", "inputs.py", "operator.toml", "reference.py", "workload.json",
        *(f"expert/{path}" for path in sources if "__pycache__" not in path),
    }  # fmt: skip
    assert (target / "goal.txt").read_text() == "One.\nTwo.\n"
    told = " ".join((target / "README.md").read_text().split())
    assert "more than 0.7 % faster than the last improvement (the champion) in each of 6 pairs of fresh" in told
    assert (target / "expert" / "solution.py").read_bytes() == (expert.folder / "solution.py").read_bytes()
    workload = task.workload
    assert json.loads((target / "workload.json").read_text()) == {
        "name": workload.name, "axes": workload.axes, "values": workload.values, "dtypes": workload.dtypes,
    }  # fmt: skip


@pytest.mark.parametrize(
    "folder",
    [pytest.param(one, marks=() if one.name == "scale_add" else pytest.mark.slow) for one in FOLDERS],
    ids=lambda folder: folder.name,
)
def test_inputs_are_made_as_the_judge_makes_them(folder: Path, tmp_path: Path) -> None:
    workload = smallest(folder)
    target = handed_out(contract.task(f"{folder}/{workload.name}"), tmp_path)
    program = """if True:
        import runpy, torch
        main = runpy.run_path("inputs.py", run_name="__main__")
        torch.save(tuple(main["inputs"](3)), "made")
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=target, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == len(contract.load(str(folder)).arguments)
    made = torch.load(target / "made")
    make_inputs = loaded((folder / "reference.py").read_text())["make_inputs"]
    assert same(made, tuple(make_inputs(workload, torch.Generator().manual_seed(3), "cpu")))


@pytest.fixture
def two_experts(tmp_path: Path) -> Path:
    """An operator with a second expert, a tolerance and a planted bug."""
    folder = tmp_path / "doubled"
    original = OPERATORS / "largest"
    for path in original.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            target = folder / path.relative_to(original)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    with (folder / "operator.toml").open("a") as file:
        file.write('\n[[experts]]\nname = "sorted"\ntitle = "by sorting every row"\n')
        file.write('\n[[tolerances]]\nslack = 1.375\nwhy = "sums of signs"\n')
        file.write('\n[[harmless]]\nbug = "off_by_one"\nworkloads = []\nwhy = "none so far"\n')
    for name, text in (("experts/sorted", "argsort"), ("bugs/off_by_one", "argmax_plus_one")):
        (folder / name / "__pycache__").mkdir(parents=True)
        (folder / name / "__pycache__" / "solution.pyc").write_bytes(b"")
        (folder / name / "solution.py").write_text(f"def run(x):\n    return x.{text}(1)\n")
    return folder


@pytest.mark.parametrize(("expert", "other"), [("eager", "sort"), ("sorted", "x.argmax(1)")])
def test_bounds_and_other_experts_stay_behind(two_experts: Path, tmp_path: Path, expert: str, other: str) -> None:
    target = handed_out(contract.task(str(two_experts)), tmp_path, expert)
    said = tomllib.loads((target / "operator.toml").read_text())
    assert set(said) == {"title", "summary", "source", "devices", "axes", "arguments", "outputs"}
    text = everything(target).replace((target / "reference.py").read_text(), "")
    for secret in (other, "1.375", "sums of signs", "none so far", "off_by_one", "argmax_plus_one"):
        assert secret not in text
    assert not list(target.rglob("__pycache__"))


def test_the_rest_of_operator_toml_is_there(two_experts: Path, tmp_path: Path) -> None:
    target = handed_out(contract.task(str(two_experts)), tmp_path, "sorted")
    whole = tomllib.loads((two_experts / "operator.toml").read_text())
    said = tomllib.loads((target / "operator.toml").read_text())
    kept = ("title", "summary", "source", "devices", "axes", "arguments", "outputs")
    assert {key: said[key] for key in kept} == {key: whole[key] for key in kept}


def test_public_source_imports_nothing_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read, not run: the reference may be anything."""
    (tmp_path / "reference.py").write_text("import nowhere\n\n\ndef reference(x):\n    return nowhere.f(x)\n")
    monkeypatch.setattr(builtins, "exec", None)
    assert handout.public_source(tmp_path / "reference.py").startswith("import nowhere\n")
