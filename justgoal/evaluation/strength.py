"""How strong a task is: which planted errors its judge catches. A task that lets one through does not run.

Checking takes a minute or so and needs no clock. What was found is kept by the hash of the task and of what judges it.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from justgoal.errors import UsageError
from justgoal.evaluation.evaluator import Evaluator
from justgoal.storage import cache_folder, write_json
from justgoal.tasks.contract import Task

JUDGING = ("bounds.py", "checking.py", "draws.py", "lineup.py", "mutants.py", "planting.py", "strength.py")
"""The files that decide what is found."""

CONSTANT = "constant"
"""The mutant that is always zero (mutants.py)."""


@dataclass(frozen=True)
class Planted:
    """A wrong solution, written by the task's author (a bug) or generated (a mutant).

    `missing` is the kind of case that is missing if it survives. `failing` has the indices of the kinds of inputs that
    catch it; `loose` says that allclose with a tolerance of 1e-2 passes it on one random input.
    """

    name: str
    bug: bool
    missing: str
    failing: tuple[int, ...]
    loose: bool

    @property
    def label(self) -> str:
        return f"{'bug' if self.bug else 'mutant'} '{self.name}'"


@dataclass(frozen=True)
class Strength:
    """`experts` has why each is not accepted, "" where it is; `doubts` is what is wrong besides surviving errors."""

    task: str
    kinds: tuple[str, ...]
    experts: dict[str, str]
    outputs: tuple[dict[str, Any], ...]
    planted: tuple[Planted, ...]
    doubts: tuple[str, ...]

    def trivial(self, one: Planted) -> bool:
        """Every look finds it: each kind of inputs that finds outputs of nothing but zeros, and allclose."""
        easy = next((mutant.failing for mutant in self.planted if mutant.name == CONSTANT and not mutant.bug), None)
        return not one.loose and set(range(len(self.kinds)) if easy is None else easy) <= set(one.failing)

    def like(self, one: Planted) -> Planted | None:
        """An earlier one that counts and that the same kinds of inputs catch."""
        before = [other for other in self.planted[: self.planted.index(one)] if not self.trivial(other)]
        return next((other for other in before if one.failing and other.failing == one.failing), None)

    @property
    def counted(self) -> list[Planted]:
        return [one for one in self.planted if not self.trivial(one) and not self.like(one)]

    @property
    def weaknesses(self) -> list[str]:
        survivors = [one for one in self.planted if not one.failing]
        return [f"{one.label} is not caught: a case is missing {one.missing}" for one in survivors] + [*self.doubts]

    def admit(self, task: str) -> None:
        """Raises UsageError for a task with a weakness; `task` is what the user calls it."""
        if self.weaknesses:
            more = f", and {len(self.weaknesses) - 1} more" if len(self.weaknesses) > 1 else ""
            raise UsageError(
                f"{self.task} is too weak to run: {self.weaknesses[0]}{more} (justgoal tasks check {task})"
            )

    def summary(self) -> dict[str, int]:
        """How many errors were planted, and how many of them were caught here and by allclose."""
        counted = self.counted
        return {
            "planted": len(counted),
            "caught": sum(bool(one.failing) for one in counted),
            "allclose": sum(not one.loose for one in counted),
        }

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Strength":
        planted = tuple(Planted(**{**one, "failing": tuple(one["failing"])}) for one in value["planted"])
        listed = {key: tuple(value[key]) for key in ("kinds", "outputs", "doubts")}
        return Strength(**{**value, **listed, "planted": planted})


def alike(found: list[Strength]) -> Iterator[str]:
    """Bugs that the same kinds of inputs catch on every workload of their operator: they test the same thing."""
    planted = [{one.name: one for one in strength.planted if one.bug} for strength in found]
    seen: dict[tuple[tuple[int, ...] | None, ...], str] = {}
    for name in dict.fromkeys(name for bugs in planted for name in bugs):
        telling = [s for s, bugs in zip(found, planted, strict=True) if name in bugs and not s.trivial(bugs[name])]
        caught = tuple(bugs[name].failing if name in bugs else None for bugs in planted)
        other = seen.setdefault(caught, name) if telling and any(caught) else name
        if other != name:
            yield f"bugs '{other}' and '{name}' are caught by the same kinds of inputs: keep one of them"


def current(task: Task, evaluator: Evaluator) -> Strength:
    """The one that holds, measured now unless there is one. The caller holds the device."""
    return stored(task) or measure(task, evaluator)


def measure(task: Task, evaluator: Evaluator) -> Strength:
    found = evaluator.check()
    bugs = {bug.name: bug for bug in task.bugs}
    planted = tuple(
        Planted(
            one["name"], not one["missing"], one["missing"] or f'in which this shows: "{about(bugs[one["name"]])}"',
            tuple(one["failing"]), one["loose"],
        )
        for one in found["planted"]
    )  # fmt: skip
    strength = Strength(
        task.name, tuple(found["kinds"]), found["experts"], tuple(found["outputs"]), planted, tuple(found["doubts"])
    )
    with suppress(OSError):  # a machine without such a folder measures each time
        file(task).parent.mkdir(parents=True, exist_ok=True)
        write_json(file(task), {**circumstances(), "strength": strength.to_json()})
    return strength


def about(bug: Path) -> str:
    """What a bug does: the first line of its source, a docstring or a comment."""
    text = (bug / "solution.py").read_text(encoding="utf-8", errors="replace")
    return text.partition("\n")[0].strip("\"'# ")


def file(task: Task) -> Path:
    return cache_folder() / "checks" / f"{task.sha256}.json"


def stored(task: Task) -> Strength | None:
    """What was found before, by the same judge."""
    try:
        kept = json.loads(file(task).read_text())
        strength = Strength.from_json(kept.pop("strength"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return strength if kept == circumstances() else None


def circumstances() -> dict[str, str]:
    """What must be the same for it to hold."""
    sources = b"".join(Path(__file__).with_name(name).read_bytes() for name in JUDGING)
    return {"judging": hashlib.sha256(sources).hexdigest(), "torch": version("torch")}
