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
    """Standard error of `ratio` within one pair, as a fraction (1.253 is that of a median of normal data)."""
    logs = [math.log(a / b) for a, b in zip(slower, faster, strict=True)]
    return 1.253 * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0


def resolution(pairs: Sequence[Rounds], null: Sequence[float], *, fresh_expert: bool) -> float:
    """Half-width of the 95 % interval of the speedup over the expert, as a fraction.

    `null` are ratios of the expert to itself in fresh pairs: their size is the bias of a pair, half of whose variance
    each process brings. An expert that stays warm is one draw of it, which more pairs do not average.
    """
    bias = statistics.fmean(math.log(n) ** 2 for n in null) if null else 0.0
    within = statistics.fmean(spread(p.expert, p.candidate) ** 2 for p in pairs)
    shared = 0.0 if fresh_expert else bias / 2
    own = bias if fresh_expert else bias / 2
    expected = shared + (own + within) / len(pairs)
    if len(pairs) < 3:
        return 1.96 * math.sqrt(expected)
    between = statistics.variance([math.log(ratio(p.expert, p.candidate)) for p in pairs])
    return 1.96 * math.sqrt(max(expected, shared + between / len(pairs)))


def speedup(pairs: Sequence[Rounds]) -> float:
    """Over the expert: the median over pairs of the paired ratio."""
    return statistics.median(ratio(p.expert, p.candidate) for p in pairs)
