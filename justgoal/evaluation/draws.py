"""Secret inputs and what is expected of them. Nothing here ever enters a sandbox but the bytes of the inputs.

Every evaluation has draws of its own under fresh secret seeds: each edge case once, some random ones, and the random
ones that the clock will see, of which a secret few have a reference too. Preparing goes in steps of one
draw, so that it can be done while nobody else needs the machine.
"""

import importlib.util
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from justgoal.errors import UsageError
from justgoal.evaluation.bounds import INFINITE, Errors, Policy, errors, worst
from justgoal.tasks.contract import Task, TensorShape, shapes
from justgoal.tasks.schema import describe

RANDOM = 4
TIMED_CHECKED = 5
PUBLIC_SEED = 0


@dataclass
class Draw:
    """One set of inputs. `reference` and `bounds` (one entry per output) are there when it is a checked one."""

    case: str
    inputs: Sequence[Any]
    reference: Sequence[torch.Tensor] = ()
    bounds: Sequence[Errors] = ()


@dataclass
class Draws:
    """Those of one evaluation: `checked` come first, then `timed`, a few of which are checked as well."""

    checked: list[Draw] = field(default_factory=list)
    timed: list[Draw] = field(default_factory=list)


class Problem:
    """The trusted side of a task: its module, its secret draws, and the comparison."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.module = _module(task.operator.folder / "reference.py")
        layout = shapes(task)
        count = len(task.operator.arguments)
        self.arguments: list[TensorShape] = layout[:count]
        self.outputs: list[TensorShape] = layout[count:]
        tolerance = task.tolerance
        self.policy = Policy.of(
            [shape.dtype for shape in layout],
            tolerance.slack if tolerance else None,
            tolerance.limit if tolerance else None,
        )
        comparable = hasattr(self.module, "comparable")
        self._slices = [
            () if comparable else tuple(output.axes.index(axis) for axis in output.slices)
            for output in task.operator.outputs
        ]
        with blamed(task, "edge_cases"):
            self.cases: dict[str, Callable[[torch.Generator, str], Sequence[Any]]] = dict(
                self.module.edge_cases(task.workload)
            )

    def inputs(self, case: str = "", seed: int | None = None) -> Sequence[Any]:
        """Inputs of an edge case, or random ones; under a fresh secret seed unless one is given."""
        generator = torch.Generator().manual_seed(secrets.randbits(63) if seed is None else seed)
        if case:
            return self.cases[case](generator, "cpu")
        made: Sequence[Any] = self.module.make_inputs(self.task.workload, generator, "cpu")
        return made

    def draw(self, case: str = "") -> Draw:
        """One with its reference; the bounds are set by whoever has the expert's outputs."""
        inputs = self.inputs(case)
        return Draw(case, inputs, self.comparable(inputs, self.expected(inputs)))

    def expected(self, inputs: Sequence[Any]) -> Sequence[torch.Tensor]:
        """What the reference makes of them."""
        return _tuple(self.module.reference(*inputs))

    def comparable(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What the error metric compares: the outputs themselves unless the operator says otherwise."""
        if not hasattr(self.module, "comparable"):
            return outputs
        return _tuple(self.module.comparable(inputs, outputs))

    def errors(self, draw: Draw, outputs: Sequence[torch.Tensor]) -> list[Errors]:
        """Those of a worker's outputs, which may hold anything: what cannot be compared is infinitely wrong."""
        try:
            values = self.comparable(draw.inputs, outputs)
        except (RuntimeError, IndexError, ValueError):
            return [INFINITE] * len(draw.reference)
        slices = self._slices if len(self._slices) == len(draw.reference) else [()] * len(draw.reference)
        return [errors(v, r, s) for v, r, s in zip(values, draw.reference, slices, strict=True)]

    def set_bounds(self, draw: Draw, expert: Sequence[torch.Tensor], calibrated: Sequence[Errors]) -> None:
        """From the expert's outputs on this very draw, and its errors on this kind of draw at calibration."""
        draw.bounds = self.bounds(draw, expert, calibrated)

    def bounds(self, draw: Draw, expert: Sequence[torch.Tensor], calibrated: Sequence[Errors]) -> list[Errors]:
        values = self.comparable(draw.inputs, expert)
        found = self.errors(draw, expert)
        earlier = [[one] for one in calibrated] or [[] for _ in found]
        return [
            self.policy.bound([here, *before], reference, value.dtype)
            for here, before, reference, value in zip(found, earlier, draw.reference, values, strict=True)
        ]

    def label(self, output: int) -> str:
        return f"output {output} ({self.outputs[output].name})"

    def figure(self, output: int, which: int, axis: int) -> str:
        """`worst head`: which of the three figures of `Errors` it is, in the operator's words."""
        if which == 1 and axis >= 0:
            name = str(self.task.operator.outputs[output].axes[axis])
            return f"worst {self.task.operator.axes.get(name, name)}"
        return ("relative error", "worst slice", "largest error")[which]


def prepare(
    problem: Problem,
    expert: Callable[[Sequence[Any]], list[torch.Tensor]],
    calibrated: dict[str, list[Errors]],
    rounds: int,
) -> Iterator[Draws | None]:
    """Yield None after each draw that was made, and at the end the complete set, with `rounds` of them to be timed."""
    draws = Draws()

    def checked(case: str = "") -> Draw:
        draw = problem.draw(case)
        problem.set_bounds(draw, expert(draw.inputs), calibrated.get(case, []))
        return draw

    for case in [*problem.cases, *[""] * RANDOM]:
        draws.checked.append(checked(case))
        yield None
    secret = set(random.SystemRandom().sample(range(rounds), min(TIMED_CHECKED, rounds)))
    for index in range(rounds):
        draws.timed.append(checked() if index in secret else Draw("", problem.inputs()))
        yield None
    yield draws


@dataclass
class Comparison:
    """What checking one solution's outputs on several draws came to, output by output."""

    problem: Problem
    drawn: int = 0
    failed: int = 0
    worst: dict[int, tuple[float, int, int]] = field(default_factory=dict)
    errors: dict[int, tuple[float, float]] = field(default_factory=dict)

    def add(self, draw: Draw, outputs: Sequence[torch.Tensor]) -> None:
        self.note(self.problem.errors(draw, outputs), draw.bounds)

    def note(self, errors: Sequence[Errors], bounds: Sequence[Errors]) -> None:
        """The errors of all outputs on one draw, and what was allowed there."""
        self.drawn += 1
        wrong = False
        for index, (found, allowed) in enumerate(zip(errors, bounds, strict=True)):
            factor, which = worst(found, allowed)
            wrong = wrong or factor > 1
            if factor > self.worst.get(index, (-1.0, 0, 0))[0]:
                self.worst[index] = factor, which, found.axis
                self.errors[index] = found.total, allowed.total
        self.failed += wrong

    def named(self) -> dict[str, tuple[float, float]]:
        """The worst (error, allowed) by name of the output, as relative L2."""
        return {self.problem.outputs[index].name: pair for index, pair in self.errors.items()}

    def reason(self) -> str:
        """Why the outputs are wrong, without a word about any hidden input; empty when they are not."""
        wrong = {index: entry for index, entry in self.worst.items() if entry[0] > 1}
        if not wrong:
            return ""
        index = max(wrong, key=lambda i: wrong[i][0])
        factor, which, axis = wrong[index]
        what = (
            f"{self.problem.figure(index, which, axis)} is {factor:.3g}x the allowed error"
            if factor != float("inf")
            else "it cannot be compared: values that are not finite, or that no right answer has"
        )
        others = [self.problem.label(i) for i in self.worst if i not in wrong]
        rest = [self.problem.label(i) for i in wrong if i != index]
        tail = f"; also wrong: {', '.join(rest)}" if rest else ("; all other outputs pass" if others else "")
        return f"{self.problem.label(index)}: {what}, on {self.failed} of {self.drawn} inputs{tail}"


@contextmanager
def blamed(task: Task, function: str) -> Iterator[None]:
    """What fails inside is a mistake of the task's author, whose file and function the message names."""
    try:
        yield
    except Exception as error:
        file = describe(task.operator.folder / "reference.py")
        raise UsageError(f"{file}: {function} fails: {type(error).__name__}: {error}") from error


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("operator_reference", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{describe(path)}: cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _tuple(value: Any) -> Sequence[torch.Tensor]:
    return value if isinstance(value, (tuple, list)) else (value,)
