"""What ends a run: patience, the rule of the game, and budgets, the user's own limits beside it.

Every verdict about a solution counts (its member `counts`), failures of the infrastructure do not. The first
correct solution resets the count whatever its speed, and so does every improvement.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from justgoal.state import State

Verdict = Mapping[str, Any]
Ending = tuple[str, str]
"""A status of state.EXIT_CODES, and one line that says why."""


@dataclass(frozen=True)
class Patience:
    """The run ends after `limit` evaluations in a row without an improvement."""

    limit: int

    def left(self, verdicts: Sequence[Verdict]) -> int:
        """How many more evaluations without an improvement the run may take."""
        return max(0, self.limit - without_improvement(verdicts))

    def exceeded(self, verdicts: Sequence[Verdict]) -> Ending | None:
        if self.left(verdicts):
            return None
        return "patience", f"{self.limit} evaluations in a row without an improvement"

    def ended_at(self, verdicts: Sequence[Verdict]) -> int | None:
        """The number of the evaluation at which this rule would have ended a run with these verdicts."""
        counted = zip(verdicts, _counts(verdicts), strict=True)
        return next((int(verdict["number"]) for verdict, count in counted if count >= self.limit), None)


def without_improvement(verdicts: Sequence[Verdict]) -> int:
    """How many verdicts came since the last improvement, or since the start of the run."""
    return [0, *_counts(verdicts)][-1]


def _counts(verdicts: Iterable[Verdict]) -> Iterator[int]:
    count, champion = 0, False
    for verdict in verdicts:
        if verdict["counts"]:
            first = verdict["kind"] == "correct" and not champion
            champion = champion or first
            count = 0 if first or verdict["improved"] else count + 1
        yield count


@dataclass(frozen=True)
class Budgets:
    """The user's limits: hours of work (waiting for a failing API is none) and turns of the model."""

    max_hours: float | None = None
    max_turns: int | None = None

    def exceeded(self, state: "State") -> Ending | None:
        if self.max_turns is not None and state.turns >= self.max_turns:
            return "max_turns", f"{state.turns} turns used"
        if self.max_hours is not None and state.active_seconds >= self.max_hours * 3600:
            return "max_hours", f"{state.active_seconds / 3600:.2f} hours used"
        return None
