"""What a task's check sends to its workers: all solutions of one kind in one folder (lineup.py). Imports no torch."""

import json
from pathlib import Path
from typing import Any

from justgoal.evaluation.collect import Solution, collect
from justgoal.tasks.contract import Task, shapes

HERE = Path(__file__).parent
COMMON = "common.py"
"""Beside the folders of bugs: what they share, given to each as its own."""


def lineups(task: Task) -> tuple[Solution, Solution]:
    """The experts, the first of which the mutants are made of, and the bugs."""
    bugs = {f"bugs/{folder.name}": collect(folder).contents for folder in task.bugs}
    shared = task.operator.folder / "bugs" / COMMON
    if shared.is_file():
        bugs = {name: {COMMON: shared.read_bytes(), **contents} for name, contents in bugs.items()}
    experts = {f"experts/{expert.name}": collect(expert.folder).contents for expert in task.operator.experts}
    return _lineup(task, experts), _lineup(task, bugs)


def places(task: Task) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Arguments and outputs in the form of mutants.Place."""
    labels = task.operator.axes
    both = (*task.operator.arguments, *task.operator.outputs)
    found = [
        (
            a.name, shape.dtype, shape.shape, [labels.get(str(axis), str(axis)) for axis in a.axes],
            [labels.get(axis, axis) for axis in a.slices], a.scalar,
        )
        for a, shape in zip(both, shapes(task), strict=True)
    ]  # fmt: skip
    count = len(task.operator.arguments)
    return found[:count], found[count:]


def _lineup(task: Task, folders: dict[str, dict[str, bytes]]) -> Solution:
    arguments, outputs = places(task)
    plan = {"folders": list(folders), "arguments": arguments, "outputs": outputs}
    return Solution(
        {
            "solution.py": (HERE / "lineup.py").read_bytes(),
            "mutants.py": (HERE / "mutants.py").read_bytes(),
            "lineup.json": json.dumps(plan).encode(),
            **{f"{name}/{path}": data for name, contents in folders.items() for path, data in contents.items()},
        }
    )
