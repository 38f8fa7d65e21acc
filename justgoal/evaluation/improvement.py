"""When is a solution faster? The unit of replication is a pair of fresh processes, not a round.

Rounds inside one pair share the placement of its pages and cannot average it away: with the same code in both, a
bootstrap over 50 rounds claimed an improvement in 28 % of comparisons (measured). So a solution improves on the
champion when *every* one of up to `PAIRS` fresh pairs says so by more than the minimum gain, and the first that
does not ends the test.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PAIRS = 5
MINIMUM_GAIN = 0.005
MEDIAN = 1.253
"""The standard error of a median over that of a mean, for normal data."""
STUDENT = (1.96, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31)
"""97.5 % quantiles of Student's distribution by degrees of freedom; the first is for a variance that is known."""


def rounds(latency: float) -> int:
    """How many rounds one pair takes for calls of about `latency` seconds: the long ones repeat better."""
    return 20 if latency <= 0.005 else 9 if latency <= 0.25 else 5


@dataclass
class Rounds:
    """What one pair of processes measured: seconds by party, one entry for each round, the no-op subtracted.

    `champion` is empty where there is none; `lost` says that there was one and that it failed a call.
    """

    candidate: list[float]
    champion: list[float]
    expert: list[float]
    lost: bool = False


def ratio(slower: Sequence[float], faster: Sequence[float]) -> float:
    """Median of the paired ratios: neighbours in time share the machine's moods."""
    return statistics.median(a / b for a, b in zip(slower, faster, strict=True))


def spread(slower: Sequence[float], faster: Sequence[float]) -> float:
    """Standard error of `ratio` within one pair, as a fraction (see MEDIAN)."""
    logs = [math.log(a / b) for a, b in zip(slower, faster, strict=True)]
    return MEDIAN * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0


def resolution(pairs: Sequence[Rounds], null: Sequence[float], *, fresh_expert: bool) -> float:
    """Half-width of the 95 % interval of the speedup over the expert, as a fraction.

    `null` are ratios of the expert to itself in fresh pairs: their size is the bias of a pair, half of whose variance
    each process brings. An expert that stays warm is one draw of it, which more pairs do not average. Where three
    pairs or more differ by more than that, their own spread counts. Quantiles are Student's, since both are few.
    """
    bias = statistics.fmean(math.log(n) ** 2 for n in null) if null else 0.0
    within = statistics.fmean(spread(p.expert, p.candidate) ** 2 for p in pairs)
    shared = 0.0 if fresh_expert else bias / 2
    own = bias if fresh_expert else bias / 2
    expected = STUDENT[len(null)] * math.sqrt(shared + (own + within) / len(pairs))
    if len(pairs) < 3:
        return expected
    between = statistics.variance([math.log(ratio(p.expert, p.candidate)) for p in pairs])
    return max(expected, STUDENT[len(pairs) - 1] * MEDIAN * math.sqrt(between / len(pairs)))


def speedup(pairs: Sequence[Rounds]) -> float:
    """Over the expert: the median over pairs of the paired ratio."""
    return statistics.median(ratio(p.expert, p.candidate) for p in pairs)
