"""Patience with all its corners, and budgets."""

import pytest

from justgoal.state import State
from justgoal.stopping import Budgets, Patience, Verdict, without_improvement


def verdicts(pattern: str) -> list[Verdict]:
    """A verdict a letter: wrong, correct without improvement, C improved, i infrastructure (not counted)."""
    kinds = {"w": ("wrong", False), "c": ("correct", False), "C": ("correct", True), "i": ("crash", False)}
    return [
        {"number": number, "kind": kinds[letter][0], "improved": kinds[letter][1], "counts": letter != "i"}
        for number, letter in enumerate(pattern, 1)
    ]


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("", 0),
        ("www", 3),
        ("C", 0),
        ("c", 0),  # the first correct one is champion whatever its speed
        ("wwc", 0),
        ("wwcc", 1),
        ("cwcw", 3),
        ("cwCw", 1),
        ("cwwCC", 0),
        ("wiw", 2),
        ("cii", 0),
        ("iiiiii", 0),
    ],
)
def test_what_counts_and_what_resets(pattern: str, count: int) -> None:
    assert without_improvement(verdicts(pattern)) == count
    assert Patience(5).left(verdicts(pattern)) == 5 - count


@pytest.mark.parametrize(
    ("pattern", "end"),
    [("cww", None), ("cwww", 4), ("cwwwCww", 4), ("wwcwwCwiww", 10), ("www", 3), ("wwi", None), ("", None)],
)
def test_where_patience_ends_a_run(pattern: str, end: int | None) -> None:
    patience = Patience(3)
    assert patience.ended_at(verdicts(pattern)) == end
    over = patience.exceeded(verdicts(pattern[: end or len(pattern)]))
    assert over == (("patience", "3 evaluations in a row without an improvement") if end else None)


def test_the_twentieth_in_a_row_ends_a_run_and_not_the_nineteenth() -> None:
    assert Patience(20).exceeded(verdicts("c" + "w" * 19)) is None
    assert Patience(20).exceeded(verdicts("c" + "w" * 20)) is not None
    assert Patience(20).left(verdicts("c" + "w" * 30)) == 0


@pytest.mark.parametrize(
    ("budgets", "state", "ending"),
    [
        (Budgets(), State(turns=10**6, active_seconds=1e9), None),
        (Budgets(max_turns=3), State(turns=2), None),
        (Budgets(max_turns=3), State(turns=3), ("max_turns", "3 turns used")),
        (Budgets(max_hours=1.5), State(active_seconds=5399.9), None),
        (Budgets(max_hours=1.5), State(active_seconds=5400.0), ("max_hours", "1.50 hours used")),
    ],
)
def test_budgets(budgets: Budgets, state: State, ending: tuple[str, str] | None) -> None:
    assert budgets.exceeded(state) == ending
