"""What follows from the noise of a machine: the rule of improvement, and what it can tell apart. Figures only.

Null ratios are those of a solution to itself in fresh pairs of processes, by probe; what is certified holds for the
noisiest probe. Which of the two processes of a pair counts as the faster one is arbitrary, so a ratio and its inverse
are equally likely. Pairs are drawn from them with replacement, and then no simulation is needed: what one pair says
with probability p, all of k pairs say with probability p^k.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

from justgoal.evaluation.improvement import Rule

FALSE_RATE = 0.003
"""How often a solution may be taken for an improvement on itself."""
FOUND = 0.8
"""How often a gain that is called found is found."""
FEWEST_PAIRS, MOST_PAIRS = 2, 7

Null = Mapping[str, Sequence[float]]


def spread(null: Null) -> float:
    """By how much the two processes of a pair differ when there is no difference: the median, as a fraction."""
    return max(statistics.median(_sizes(ratios)) for ratios in null.values())


def bias(null: Null) -> float:
    """The same as a root mean square, which a few bad pairs decide; it is what the resolution of a speedup rests on."""
    return max(math.sqrt(statistics.fmean(size**2 for size in _sizes(ratios))) for ratios in null.values())


def false_rate(null: Null, rule: Rule) -> float:
    """How often `rule` takes a solution for an improvement on itself.

    With few pairs none of them may exceed the minimum gain by luck: one more is counted than was seen to.
    """
    return max(_exceeding(ratios, rule.minimum_gain) for ratios in null.values()) ** rule.pairs


def certified(null: Null, minimum_gain: float) -> Rule:
    """The fewest pairs whose false rate is low enough with this minimum gain; if none are, the least gain that will do.

    Raised, the gain is that of a pair that was seen: one that says exactly so much is not above it.
    """
    for pairs in range(FEWEST_PAIRS, MOST_PAIRS + 1):
        rule = Rule(pairs, minimum_gain)
        if false_rate(null, rule) <= FALSE_RATE:
            return rule
    seen = sorted(_gain(ratio) for ratios in null.values() for ratio in ratios)
    raised = (Rule(MOST_PAIRS, gain) for gain in seen if gain > minimum_gain)
    return next(rule for rule in raised if false_rate(null, rule) <= FALSE_RATE)


def smallest_gain(null: Null, rule: Rule) -> float:
    """The smallest true gain that `rule` finds often enough, as a fraction."""
    each = FOUND ** (1 / rule.pairs)
    return max(_needed(ratios, rule.minimum_gain, each) for ratios in null.values())


def shortest_latency(clock: Mapping[str, Sequence[float]], gain: float) -> float:
    """Seconds: the call for which the clock's worst error, of those seen beside any probe, is as large as `gain`."""
    return max(abs(error) for errors in clock.values() for error in errors) / gain


def _sizes(ratios: Sequence[float]) -> list[float]:
    return [abs(math.log(ratio)) for ratio in ratios]


def _gain(ratio: float) -> float:
    """What the pair says of whichever of its processes was the faster one."""
    return max(ratio, 1 / ratio) - 1


def _exceeding(ratios: Sequence[float], gain: float) -> float:
    """The probability that a pair with no difference says more than `gain`: half of those that say so either way."""
    seen = sum(_gain(ratio) > gain for ratio in ratios)
    return (seen + 1) / (2 * (len(ratios) + 1))


def _needed(ratios: Sequence[float], gain: float, probability: float) -> float:
    """The true gain with which a pair says more than `gain` with this probability."""
    signed = sorted(sign * size for size in _sizes(ratios) for sign in (-1, 1))
    spared = len(signed) - math.ceil(probability * len(signed))
    return math.expm1(math.log1p(gain) - signed[spared])
