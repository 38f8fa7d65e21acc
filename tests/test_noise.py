"""What is certified of a machine, on null ratios whose answers were worked out by hand or by simulation."""

import math
import random

import pytest

from justgoal.evaluation.improvement import Rule
from justgoal.evaluation.noise import (
    bias,
    certified,
    false_rate,
    shortest_latency,
    smallest_gain,
    spread,
)

QUIET = [1.001, 0.999, 1.002, 0.998, 1.001, 0.999, 1.003, 0.997, 1.001]
"""Nine pairs, none off by 0.5 %."""
NOISY = [1.04, 1.01, 0.98, 1.02, 0.97, 1.03, 0.99, 1.01, 1.02]
"""Nine pairs, all off by 0.5 %; five by more than 1.5 %."""


def test_spread_and_bias_by_hand() -> None:
    """e^0.01, e^-0.02 and e^0.04 differ by 1, 2 and 4 %: the root of (1 + 4 + 16) / 3 is 2.65."""
    null = {"one": [math.exp(0.01), math.exp(-0.02), math.exp(0.04)]}
    assert spread(null) == pytest.approx(0.02)
    assert bias(null) == pytest.approx(0.0264575)


def test_the_noisiest_probe_counts() -> None:
    both = {"quiet": QUIET, "noisy": NOISY}
    rule = Rule(3, 0.01)
    for figure in (spread, bias):
        assert figure(both) == figure({"noisy": NOISY}) > figure({"quiet": QUIET})
    assert false_rate(both, rule) == false_rate({"noisy": NOISY}, rule) > false_rate({"quiet": QUIET}, rule)
    assert smallest_gain(both, rule) == smallest_gain({"noisy": NOISY}, rule) > smallest_gain({"quiet": QUIET}, rule)


@pytest.mark.parametrize(
    ("null", "rule", "wanted"),
    [
        (QUIET, Rule(1, 0.005), 1 / 20),  # none of 9, and one more, of 10: half of them to this side
        (QUIET, Rule(2, 0.005), 1 / 400),
        (NOISY, Rule(1, 0.005), 10 / 20),
        (NOISY, Rule(7, 0.005), 1 / 128),
        (NOISY, Rule(5, 0.015), (7 / 20) ** 5),  # 1.04, 0.98, 1.02, 0.97, 1.03, 1.02 exceed it
        ([1.25, 0.8], Rule(1, 0.25), 1 / 6),  # both are off by exactly 25 %, which is not more
    ],
)
def test_false_rate_by_hand(null: list[float], rule: Rule, wanted: float) -> None:
    assert false_rate({"probe": null}, rule) == pytest.approx(wanted)


def test_false_rate_is_what_resampling_says() -> None:
    """Pairs drawn with replacement, each turned over by a coin; with many pairs the one that is added is nothing."""
    generator = random.Random(1)
    null = [math.exp(0.02 * generator.gauss(0, 1)) for _ in range(4000)]
    rule = Rule(3, 0.005)
    trials = 40_000
    held = sum(
        all(generator.choice(null) ** generator.choice((-1, 1)) > 1.005 for _ in range(3)) for _ in range(trials)
    )
    assert false_rate({"probe": null}, rule) == pytest.approx(held / trials, rel=0.1)


@pytest.mark.parametrize(
    ("off", "pairs"),
    [
        (0, 2),  # 1/22: 0.0021
        (1, 3),  # 2/22: 0.0083, 0.00075
        (3, 4),  # 4/22: 0.033, 0.0060, 0.0011
        (5, 5),  # 6/22: 0.074, 0.020, 0.0055, 0.0015
        (6, 6),  # 7/22: ... 0.0033, 0.0010
        (8, 7),  # 9/22: ... 0.0047, 0.0019
    ],
)
def test_as_many_pairs_as_it_takes(off: int, pairs: int) -> None:
    """Of 10 null pairs `off` differ by 2 %; the powers for 2, 3, ... pairs stand beside each case."""
    assert certified({"probe": [1.02] * off + [1.0] * (10 - off)}, 0.005) == Rule(pairs, 0.005)


def test_the_minimum_gain_is_raised_where_seven_pairs_do_not_do() -> None:
    """All of 9 exceed 0.5 %, and (10/20)^7 is 0.0078. 1.01 and 1.01 do not exceed 1 %: (8/20)^7 is 0.0016."""
    assert certified({"probe": [1.04, 1.01, 1 / 1.02, 1.02, 1.03, 1.03, 1.015, 1.01, 1.02]}, 0.005) == Rule(
        7,
        pytest.approx(0.01),  # type: ignore[arg-type]
    )


def test_no_noise_leaves_no_doubt() -> None:
    """Equal ratios: two pairs do, and what exceeds the minimum gain is found."""
    null = {"probe": [1.0] * 12}
    assert certified(null, 0.005) == Rule(2, 0.005)
    assert smallest_gain(null, Rule(2, 0.005)) == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("pairs", "worst"),
    [
        (2, -3),  # 0.8^(1/2) = 0.894: 18 of 20 signed ratios, so all but the two worst, which are -5 and -4
        (7, -5),  # 0.8^(1/7) = 0.969: all of them
    ],
)
def test_smallest_gain_by_hand(pairs: int, worst: int) -> None:
    """Ten pairs off by 0.2 to 5 %: whoever is faster by the worst of them and the minimum gain is above that gain."""
    null = [math.exp(size / 100) for size in (0.2, 0.4, 0.6, 0.8, 1, 1.5, 2, 3, 4, 5)]
    wanted = 1.005 * math.exp(-worst / 100) - 1
    assert smallest_gain({"probe": null}, Rule(pairs, 0.005)) == pytest.approx(wanted)


def test_smallest_gain_is_found_as_often_as_promised() -> None:
    """Simulated on pairs with a true gain of so much: found in 80 %, by every one of five pairs."""
    generator = random.Random(2)
    null = [math.exp(0.01 * generator.gauss(0, 1)) for _ in range(4000)]
    rule = Rule(5, 0.005)
    truth = 1 + smallest_gain({"probe": null}, rule)
    trials = 10_000
    found = sum(
        all(rule.affirmed(truth * generator.choice(null) ** generator.choice((-1, 1))) for _ in range(5))
        for _ in range(trials)
    )
    assert found / trials == pytest.approx(0.8, abs=0.02)


def test_shortest_latency_by_hand() -> None:
    """An error of 20 us is 4 % of 0.5 ms, in either direction."""
    assert shortest_latency({"one": [3e-6, -20e-6], "other": [8e-6]}, 0.04) == pytest.approx(0.0005)
