"""When a solution is faster, on figures whose answers are known."""

import math
import statistics

import numpy as np
import pytest

from justgoal.evaluation.improvement import (
    DEFAULT_RULE,
    Ratchet,
    Rounds,
    Rule,
    gain,
    ratio,
    resolution,
    rounds,
    speedup,
    spread,
)


def pair(candidate: list[float], expert: list[float], champion: list[float] | None = None) -> Rounds:
    return Rounds(candidate, champion or [], expert)


@pytest.mark.parametrize(
    ("latency", "wanted"),
    [(1e-5, 40), (0.01, 40), (0.011, 9), (0.25, 9), (0.3, 5), (10.0, 5)],
)
def test_rounds(latency: float, wanted: int) -> None:
    assert rounds(latency) == wanted


def test_rule() -> None:
    """More than the minimum gain, and as the model is told."""
    rule = Rule(pairs=3, minimum_gain=0.25)
    assert [rule.affirmed(ratio) for ratio in (0.5, 1.25, 1.26, math.inf)] == [False, False, True, True]
    assert rule.terms() == {"pairs": "3", "minimum_gain": "25 %"}
    assert DEFAULT_RULE.terms() == {"pairs": "5", "minimum_gain": "0.5 %"}


@pytest.mark.parametrize(
    ("slower", "faster", "wanted"),
    [
        ([2.0, 2.0, 2.0], [1.0, 1.0, 1.0], 2.0),
        ([1.0, 3.0, 50.0], [1.0, 2.0, 1.0], 1.5),  # 1, 1.5, 50
        ([1.0, 1.0], [1.0, 2.0], 0.75),
        ([3.0], [4.0], 0.75),
    ],
)
def test_ratio_is_the_median_of_pairs(slower: list[float], faster: list[float], wanted: float) -> None:
    assert ratio(slower, faster) == wanted


def test_a_slow_spell_of_the_machine_does_not_change_the_ratio() -> None:
    mood = [1.0, 1.0, 4.0, 4.0, 1.0]
    assert ratio([2 * m for m in mood], mood) == 2.0


def test_ratio_needs_pairs() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0, 2.0], [1.0])


def test_spread_is_the_standard_error_of_a_median() -> None:
    """Of 4000 simulated pairs of 20 rounds, the medians scatter as each pair by itself says."""
    random = np.random.default_rng(1)
    slower = np.exp(0.01 * random.standard_normal((4000, 20)))
    ones = [1.0] * 20
    medians = [math.log(ratio(list(row), ones)) for row in slower]
    said = statistics.fmean(spread(list(row), ones) for row in slower)
    assert said == pytest.approx(statistics.stdev(medians), rel=0.06)


def test_spread_of_one_round_or_equal_ones() -> None:
    assert spread([1.0], [2.0]) == 0.0
    assert spread([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == pytest.approx(0.0, abs=1e-12)


def test_speedup_is_the_median_over_pairs() -> None:
    pairs = [pair([1.0, 1.0], [2.0, 2.0]), pair([1.0, 1.0], [3.0, 3.0]), pair([1.0, 1.0], [9.0, 9.0])]
    assert speedup(pairs) == 3.0
    assert speedup(pairs[:2]) == 2.5


FLAT = pair([1.0, 1.0], [2.0, 2.0])


def test_resolution_by_hand() -> None:
    """No scatter within a pair: what is left is the bias, log 1.02 at a time; Student's 4.30 for 2 of them."""
    bias = math.log(1.02) ** 2
    null = [1.02, 1 / 1.02]
    assert resolution([FLAT], null, fresh_expert=False) == pytest.approx(4.30 * math.sqrt(bias))
    assert resolution([FLAT] * 4, null, fresh_expert=True) == pytest.approx(4.30 * math.sqrt(bias / 4))
    assert resolution([FLAT] * 4, null, fresh_expert=False) == pytest.approx(4.30 * math.sqrt(bias / 2 + bias / 8))
    assert resolution([FLAT] * 4, null * 2, fresh_expert=True) == pytest.approx(2.78 * math.sqrt(bias / 4))
    assert resolution([FLAT] * 2, [], fresh_expert=False) == 0.0


def test_resolution_counts_the_scatter_between_pairs() -> None:
    pairs = [pair([1.0, 1.0], [e, e]) for e in (2.0, 2.2, 1.8, 2.0)]
    between = statistics.variance([math.log(e) for e in (2.0, 2.2, 1.8, 2.0)])
    assert resolution(pairs, [1.0], fresh_expert=True) == pytest.approx(3.18 * 1.253 * math.sqrt(between / 4))


def test_resolution_counts_the_scatter_within_a_pair() -> None:
    noisy = pair([1.0, 1.0, 1.0], [2.0, 2.2, 1.8])
    error = 1.253 * statistics.stdev([math.log(2.0), math.log(2.2), math.log(1.8)]) / math.sqrt(3)
    assert resolution([noisy], [], fresh_expert=True) == pytest.approx(1.96 * error)
    assert resolution([noisy] * 2, [1.0, 1.0, 1.0], fresh_expert=True) == pytest.approx(3.18 * error / math.sqrt(2))


@pytest.mark.parametrize("count", [2, 5, 7])
def test_resolution_covers_the_truth(count: int) -> None:
    """Simulated: every process has a bias of its own, the expert is fresh; 95 % of intervals should hold 1."""
    random = np.random.default_rng(count)
    held, trials, sigma = 0, 400, 0.01
    for _ in range(trials):
        null = np.exp(math.sqrt(2) * sigma * random.standard_normal(3))
        pairs = []
        for _ in range(count):
            own = np.exp(sigma * random.standard_normal(2))
            noise = np.exp(0.003 * random.standard_normal((2, 20)))
            pairs.append(pair(list(own[0] * noise[0]), list(own[1] * noise[1])))
        width = resolution(pairs, list(null), fresh_expert=True)
        held += abs(math.log(speedup(pairs))) <= width
    assert held / trials > 0.90


def test_ratchet_by_hand() -> None:
    """2x +- 10 %, then a gain of 1.2: 2 * 0.9 * 1.2 = 2.16 is demanded, which 1.97 * 1.1 = 2.167 just reaches."""
    first = Ratchet().after(2.0, 0.1, 1.0)
    assert first.mark == pytest.approx(1.8)
    assert first.allows(1.97, 0.1, 1.2) and not first.allows(1.96, 0.1, 1.2)
    assert first.after(1.97, 0.1, 1.2).mark == pytest.approx(2.16)
    assert first.after(3.0, 0.1, 1.2).mark == pytest.approx(2.7)


def test_copies_of_a_solution_that_slows_down_are_stopped() -> None:
    """Each beats the one before by 1 %, and none is faster over the expert: (1 + r) < (1 - r) 1.01^n ends it."""
    ratchet, crowned = Ratchet().after(2.0, 0.02, 1.0), 0
    while ratchet.allows(2.0, 0.02, 1.01):
        ratchet, crowned = ratchet.after(2.0, 0.02, 1.01), crowned + 1
    assert crowned == 4  # 1.01^4 = 1.0406 < 1.02 / 0.98 = 1.0408 < 1.01^5


def test_gain_is_what_every_pair_affirms() -> None:
    assert gain([1.3, 1.1, math.inf]) == 1.1
    assert gain([]) == gain([math.inf]) == 1.0
