"""Is a task worth running? Judges what is known to be right and what is known to be wrong, in the judge's process.

Seeds are fixed, so that the same task is always judged alike. Which expert will be the fastest on a machine is not
known, so each is taken for the one that counts: what is wrong must be caught beside every one of them, and beside
every one another must be accepted.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from justgoal import figures
from justgoal.errors import UsageError
from justgoal.evaluation.bench import FIRST_CALL_LIMIT
from justgoal.evaluation.bounds import Errors
from justgoal.evaluation.clock import CallFailed
from justgoal.evaluation.draws import PUBLIC_SEED, RANDOM, Comparison, Draw, Problem, blamed
from justgoal.evaluation.mutants import Mutant, Place, mutants
from justgoal.evaluation.planting import places
from justgoal.evaluation.workers import BUILD_LIMIT, IMPORT_LIMIT, Worker, Workers
from justgoal.tasks.schema import describe

LOOSE = 1e-2
"""The tolerance, absolute and relative, of the check that most benchmarks make on one random input."""
VARIES = 0.01
"""By how much of its norm an output must differ under another seed, and from its mean along an axis."""


class Lineup:
    """One worker with many solutions in it, started anew when one of them has ended it."""

    def __init__(self, workers: Workers, tree: int) -> None:
        self._workers = workers
        self._tree = tree
        self._worker: Worker | None = None
        self._called = set[int]()
        self._ended = dict[int, str]()

    def call(self, number: int, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Raises CallFailed, from then on always when that has ended the process. A first call may compile."""
        if number in self._ended:
            raise CallFailed("crash", self._ended[number])
        if self._worker is None:
            [self._worker] = self._workers.start([self._tree], role="build")
            self._worker.imported(IMPORT_LIMIT)
        worker = self._worker
        worker.inputs.write([*inputs, number])
        worker.outputs.poison()
        limit = FIRST_CALL_LIMIT if number in self._called else BUILD_LIMIT
        self._called.add(number)
        try:
            worker.call(limit)
        except CallFailed as failure:
            if failure.detail and failure.kind != "timeout":
                raise
            self._ended[number] = failure.detail or worker.ending()
            self.close()
            raise CallFailed(failure.kind, self._ended[number]) from failure
        return worker.outputs.read()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


@dataclass
class Suspect:
    """A wrong solution: which call is its, the kinds of inputs that catch it, and whether a loose check passes it."""

    name: str
    lineup: Lineup
    number: int
    mutant: Mutant | None = None
    failing: list[int] = field(default_factory=list)
    loose: bool = False

    def to_json(self) -> dict[str, Any]:
        missing = self.mutant.missing if self.mutant else ""
        return {"name": self.name, "missing": missing, "failing": self.failing, "loose": self.loose}


class Check:
    def __init__(
        self, problem: Problem, lineups: Sequence[Lineup], experts: Sequence[str], bugs: Sequence[str],
        phase: Callable[[str], None],
    ) -> None:  # fmt: skip
        """The lineups of planting.py, and the names in them."""
        self._problem = problem
        self._phase = phase
        self._honest, planted = lineups
        made = mutants(*([Place(*one) for one in some] for some in places(problem.task)))
        self._suspects = [
            *(Suspect(name, planted, number) for number, name in enumerate(bugs)),
            *(Suspect(one.name, self._honest, len(experts) + index, one) for index, one in enumerate(made)),
        ]
        self._experts = list(experts)
        self._failed = dict[str, str]()
        self._beside = {pair: Comparison(problem) for pair in product(experts, repeat=2)}
        """How the second fares where the first counts."""
        self._first = dict[str, torch.Tensor]()
        self._varying, self._masked = set[str](), set[str]()

    def run(self) -> dict[str, Any]:
        kinds = ["random inputs", *self._problem.cases]
        random: list[Draw] = []
        for index, kind in enumerate(kinds):
            self._phase(f"checking: {kind}")
            for draw, calibrated in self._draws(kind if index else ""):
                if index == 0 and len(random) < 2:
                    random.append(draw)
                self._look_at(draw)
                self._judge(index, draw, calibrated, loose=draw is random[0])
        outputs, weak = spread(self._problem, *random)
        suspects = [one for one in self._suspects if one.mutant is None or self._applies(one.mutant)]
        return {
            "kinds": kinds, "experts": self._reasons(), "outputs": outputs, "doubts": [*self._doubts(), *weak],
            "planted": [one.to_json() for one in suspects],
        }  # fmt: skip

    def _draws(self, case: str) -> Iterator[tuple[Draw, dict[str, list[Errors]]]]:
        """Those that are judged, each with the experts' errors on another one of its kind, as at calibration."""
        count = 1 if case else RANDOM
        twin = drawn(self._problem, case, PUBLIC_SEED + count)
        calibrated = {name: self._problem.errors(twin, outputs) for name, outputs in self._answers(twin)}
        if not case:
            self._begin(twin)
        for seed in range(PUBLIC_SEED, PUBLIC_SEED + count):
            yield drawn(self._problem, case, seed), calibrated

    def _begin(self, draw: Draw) -> None:
        """The first call, which nobody judges: what lives on earlier calls is wrong from the second one on."""
        for suspect in filter(lambda one: one.mutant, self._suspects):
            with suppress(CallFailed):
                suspect.lineup.call(suspect.number, draw.inputs)

    def _answers(self, draw: Draw) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """The outputs of every expert that has not failed."""
        for number, name in enumerate(self._experts):
            if name in self._failed:
                continue
            try:
                outputs = self._honest.call(number, draw.inputs)
            except CallFailed as failure:
                self._failed[name] = f"it fails: {failure.detail}"
                continue
            error = max(one.total for one in self._problem.errors(draw, outputs))
            if not draw.case and error > self._problem.policy.cap:
                self._failed[name] = (
                    f"its error {figures.error(error)} is above {figures.error(self._problem.policy.cap)}"
                )
                continue
            yield name, outputs
        if len(self._failed) == len(self._experts):
            why = "; ".join(f"{name}: {reason}" for name, reason in self._failed.items())
            raise UsageError(f"{self._problem.task.operator.name}: no expert is right here: {why}")

    def _look_at(self, draw: Draw) -> None:
        """Which arguments are not the same in every draw, and where something is masked."""
        for shape, value in zip(self._problem.arguments, draw.inputs, strict=True):
            tensor = torch.as_tensor(value)
            if not torch.equal(self._first.setdefault(shape.name, tensor), tensor):
                self._varying.add(shape.name)
            if tensor.is_floating_point() and (tensor == -torch.inf).any():
                self._masked.add(shape.name)

    def _judge(self, kind: int, draw: Draw, calibrated: dict[str, list[Errors]], *, loose: bool) -> None:
        errors, bounds = {}, {}
        for name, outputs in self._answers(draw):
            errors[name] = self._problem.errors(draw, outputs)
            bounds[name] = self._problem.bounds(draw, outputs, calibrated.get(name, []))
        for one, other in product(errors, repeat=2):
            self._beside[one, other].note(errors[other], bounds[one])
        for suspect in self._suspects:
            if kind in suspect.failing:
                continue
            try:
                outputs = suspect.lineup.call(suspect.number, draw.inputs)
            except CallFailed:
                suspect.failing.append(kind)
                continue
            if loose:
                suspect.loose = loosely_right(self._problem, draw, outputs)
            found = self._problem.errors(draw, outputs)
            if all(self._caught(found, allowed) for allowed in bounds.values()):
                suspect.failing.append(kind)

    def _caught(self, found: Sequence[Errors], allowed: Sequence[Errors]) -> bool:
        comparison = Comparison(self._problem)
        comparison.note(found, allowed)
        return comparison.failed > 0

    def _applies(self, mutant: Mutant) -> bool:
        """Not where nothing is masked, and not to a size: what can only be the length of an axis cannot be ignored."""
        if not mutant.argument:
            return True
        first = self._first[mutant.argument]
        if mutant.mask:
            return not first.is_floating_point() or mutant.argument in self._masked
        sizes = {0, *self._problem.task.workload.axes.values()}
        a_size = not first.is_floating_point() and set(first.flatten().tolist()) <= sizes
        return mutant.argument in self._varying or not a_size

    def _reasons(self) -> dict[str, str]:
        """Why each expert is not accepted; "" where it is."""
        return {name: self._failed.get(name) or self._beside[name, name].reason() for name in self._experts}

    def _doubts(self) -> Iterator[str]:
        """What is wrong with the experts."""
        able = [name for name in self._experts if name not in self._failed]
        if len(able) < 2:
            failed = "".join(f"; {name}: {reason}" for name, reason in self._failed.items())
            yield f"a second honest implementation is missing beside expert {able[0]}{failed}"
        for name in able:
            if own := self._beside[name, name].reason():
                yield f"expert {name} is not accepted: {own}"
            others = {other: self._beside[name, other].reason() for other in able if other != name}
            if others and all(others.values()):
                why = "; ".join(f"{other}: {reason}" for other, reason in others.items())
                yield f"no other implementation is accepted where expert {name} counts: {why}"


def drawn(problem: Problem, case: str, seed: int) -> Draw:
    """One with its reference; raises UsageError when what the task's author wrote does not fit what it declares."""
    task = problem.task
    maker = f"edge case '{case}'" if case else "make_inputs"
    with blamed(task, maker):
        inputs = problem.inputs(case, seed)
        again = problem.inputs(case, seed)
    file = describe(task.operator.folder / "reference.py")
    if len(inputs) != len(problem.arguments):
        raise UsageError(f"{file}: {maker} returns {len(inputs)} values for {len(problem.arguments)} arguments")
    for value, same, argument, shape in zip(inputs, again, task.operator.arguments, problem.arguments, strict=True):
        if argument.scalar:
            wanted: type = int if argument.dtype == "int64" else float
            wrong = "" if type(value) is wanted else f"a {type(value).__name__} instead of a Python {wanted.__name__}"
        else:
            wrong = mismatch(value, shape.dtype, shape.shape)
        if wrong:
            raise UsageError(f"{file}: {maker} returns {shape.name} as {wrong}")
        if not torch.equal(torch.as_tensor(value).nan_to_num(), torch.as_tensor(same).nan_to_num()):
            raise UsageError(f"{file}: {maker} returns another {shape.name} for the same seed: use the generator")
    with blamed(task, "reference"):
        expected = problem.expected(inputs)
    if len(expected) != len(problem.outputs):
        raise UsageError(f"{file}: reference returns {len(expected)} values for {len(problem.outputs)} outputs")
    for value, shape in zip(expected, problem.outputs, strict=True):
        if wrong := mismatch(value, "", shape.shape):
            raise UsageError(f"{file}: reference returns {shape.name} as {wrong}")
    with blamed(task, "comparable"):
        return Draw(case, inputs, problem.comparable(inputs, expected))


def mismatch(value: Any, dtype: str, shape: tuple[int, ...]) -> str:
    """How a value differs from the tensor that is declared; any dtype will do where none is given."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} instead of a tensor"
    found = str(value.dtype).removeprefix("torch.")
    if dtype and found != dtype:
        return f"{found} instead of {dtype}"
    return "" if tuple(value.shape) == shape else f"shape {tuple(value.shape)} instead of {shape}"


def loosely_right(problem: Problem, draw: Draw, outputs: Sequence[torch.Tensor]) -> bool:
    """What allclose would say."""
    try:
        values = problem.comparable(draw.inputs, outputs)
        pairs = zip(values, draw.reference, strict=True)
        return all(torch.allclose(v.double(), r.double(), LOOSE, LOOSE, equal_nan=True) for v, r in pairs)
    except (RuntimeError, IndexError, ValueError):
        return False


def spread(problem: Problem, one: Draw, other: Draw) -> tuple[list[dict[str, Any]], list[str]]:
    """The range of every output on random inputs and how much it differs under another seed; and what is too even."""
    found, weak = [], []
    for index, (value, another) in enumerate(zip(one.reference, other.reference, strict=True)):
        value, another = value.double(), another.double()
        label = problem.label(index) if index < len(problem.outputs) else f"value {index} of comparable"
        finite = value[torch.isfinite(value)]
        if 2 * finite.numel() < value.numel():
            weak.append(f"{label} is not finite in most places, on random inputs")
            continue
        value, another = value.nan_to_num(0.0, 0.0, 0.0), another.nan_to_num(0.0, 0.0, 0.0)
        norm = float(value.norm())
        if norm == 0:
            weak.append(f"{label} is zero everywhere, on random inputs")
            continue
        differs = float((value - another).norm()) / norm
        found.append({"name": label, "low": float(finite.min()), "high": float(finite.max()), "differs": differs})
        if differs < VARIES:
            weak.append(f"{label} differs by {figures.percent(differs)} only under another seed, on random inputs")
        for axis in range(value.dim()):
            varies = float((value - value.mean(axis, keepdim=True)).norm()) / norm
            if value.shape[axis] > 1 and varies < VARIES:
                name = problem.figure(index, 1, axis).removeprefix("worst ") if index < len(problem.outputs) else axis
                weak.append(f"{label} varies by {figures.percent(varies)} only from {name} to {name}, on random inputs")
    return found, weak
