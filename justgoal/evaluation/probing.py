"""Reads the noise of this machine, in the judge's process and with its means. What follows from it says noise.py."""

from collections.abc import Mapping, Sequence
from itertools import combinations, cycle, islice
from statistics import median

from justgoal.evaluation import improvement
from justgoal.evaluation.bench import EXPERT, Bench, Party
from justgoal.evaluation.draws import Draw

BATCHES = 2
FRESH = 4
"""Processes of a batch: each two of them are a pair. Starting one costs seconds, and timing it next to nothing."""
BLOCKS = 3
WARM = range(improvement.warm_calls(0.0))
DRAWS = 5
"""Of inputs, which come again: a probe is trusted, and a round of large ones would not fit into memory."""


def probe(bench: Bench, solution: int, spins: Mapping[float, int]) -> dict[str, list[float]]:
    """`null`: ratios of a solution to itself in fresh processes. `clock`: errors, in seconds, of calls of known length.

    `spins` are solutions that take so many seconds.
    """
    draws = [Draw("", bench.problem.inputs()) for _ in range(DRAWS)]
    with bench.parties([(EXPERT, tree) for tree in (solution, *spins.values())]) as [warm, *spinning]:
        bench.warm_up([warm, *spinning], draws, WARM)
        bench.phase("measuring the clock")
        clock = [error for _ in range(BLOCKS) for error in _block(bench, spinning, list(spins), draws)]
        [times] = bench.rounds([warm], draws)
        rounds = improvement.rounds(median(times))
        null = [ratio for _ in range(BATCHES) for ratio in _batch(bench, solution, warm, draws, rounds)]
    return {"null": null, "clock": clock}


def _block(bench: Bench, spinning: Sequence[Party], spins: Sequence[float], draws: Sequence[Draw]) -> list[float]:
    """The errors of one block of rounds for each length, with a blank of that length: how it repeats is in them too."""
    return [
        median(bench.rounds([party], _repeated(draws, improvement.rounds(seconds)))[0]) - seconds
        for party, seconds in zip(spinning, spins, strict=True)
    ]


def _batch(bench: Bench, solution: int, warm: Party, draws: Sequence[Draw], rounds: int) -> list[float]:
    """The pairs of some fresh processes of equal age. As beside every pair, somebody warm takes turns with them."""
    bench.phase("measuring the noise of this machine")
    with bench.parties([(EXPERT, solution)] * FRESH) as fresh:
        bench.warm_up(fresh, draws, WARM)
        times = bench.rounds([*fresh, warm], _repeated(draws, rounds))
    return [improvement.ratio(one, other) for one, other in combinations(times[:-1], 2)]


def _repeated(draws: Sequence[Draw], rounds: int) -> list[Draw]:
    return list(islice(cycle(draws), rounds))
