"""When is a solution faster? The unit of replication is a pair of fresh processes, not a round.

Rounds inside one pair share the placement of its pages and cannot average it away: with the same code in both, a
bootstrap over 50 rounds claimed an improvement in 28 % of comparisons (measured). So a solution improves on the
champion when *every* one of the rule's fresh pairs says so by more than its minimum gain, and the first that does
not ends the test.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from justgoal import figures

MEDIAN = 1.253
"""The standard error of a median over that of a mean, for normal data."""
STUDENT = (1.96, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31)
"""97.5 % quantiles of Student's distribution by degrees of freedom; the first is for a variance that is known."""


@dataclass(frozen=True)
class Rule:
    """How many pairs must say so, and by more than which gain; a run takes both from the certificate of its device."""

    pairs: int = 5
    minimum_gain: float = 0.005

    def affirmed(self, ratio: float) -> bool:
        return ratio > 1 + self.minimum_gain

    def terms(self) -> dict[str, str]:
        """As the model is told."""
        return {"pairs": str(self.pairs), "minimum_gain": figures.percent(self.minimum_gain)}


DEFAULT_RULE = Rule()


def rounds(latency: float) -> int:
    """How many rounds one pair takes for calls of about `latency` seconds: the long ones repeat better."""
    return 40 if latency <= 0.01 else 9 if latency <= 0.25 else 5


def warm_calls(latency: float) -> int:
    """How many calls a fresh process makes before it is timed.

    Memory that it gives back is not all found again by malloc at first: the first ten or so calls get new pages,
    which cost a call of 6 ms another 4 (measured). Long calls cannot wait for that, and feel it less.
    """
    return 12 if latency <= 0.01 else 3


@dataclass
class Rounds:
    """What one pair of processes measured: seconds by party, one entry for each round, the window's cost subtracted.

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


@dataclass(frozen=True)
class Ratchet:
    """What a new champion must reach over the expert, beside being faster than the old one in every pair.

    A solution that slows down with time would lose against its own copies for ever. So the gains that were claimed
    are held against the expert: `mark` is the least speedup that a champion of this run had, by the lower end of
    its interval, times all gains claimed since. Who falls short of it by more than its own resolution is refused:
    after gains of 5 % in all, for readings that are good to 2.5 %. One lucky reading does not raise it, since what it
    exceeds the truth by is in its interval.
    """

    mark: float = 0.0

    def demanded(self, gain: float) -> float:
        """The speedup that a gain of `gain` over the champion implies."""
        return self.mark * gain

    def allows(self, speedup: float, resolution: float, gain: float) -> bool:
        return speedup * (1 + resolution) >= self.demanded(gain)

    def after(self, speedup: float, resolution: float, gain: float) -> "Ratchet":
        return Ratchet(max(self.demanded(gain), speedup * (1 - resolution)))


def gain(ratios: Sequence[float]) -> float:
    """The gain that all pairs affirm; 1 where there was no champion, or none that could be compared with."""
    finite = [ratio for ratio in ratios if math.isfinite(ratio)]
    return min(finite, default=1.0)
