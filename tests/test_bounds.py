"""Errors and bounds, each computed a second time with numpy or by hand."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from justgoal.evaluation.bounds import FLOOR, INFINITE, Errors, Policy, errors, worst
from justgoal.evaluation.draws import RANDOM, TIMED_CHECKED, Comparison, Draw, Draws, Problem, prepare
from justgoal.tasks import contract

OPERATORS = Path(__file__).parent / "operators"
EXACT = Errors(0.0, 0.0, 0.0)
NAN, INF = math.nan, math.inf


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def tensor(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def norm(values: np.ndarray) -> float:
    return float(np.sqrt((values**2).sum()))


def expected(value: np.ndarray, reference: np.ndarray, axes: Sequence[int]) -> tuple[float, float, float, int]:
    """The three figures and the axis, slice by slice, without the floor for nearly empty slices."""
    difference = value - reference
    slices = [
        (norm(np.take(difference, i, axis)) / norm(np.take(reference, i, axis)), axis)
        for axis in axes
        for i in range(reference.shape[axis])
    ]
    worst_slice, axis = max(slices, default=(0.0, -1))
    rms = math.sqrt((reference**2).mean())
    return norm(difference) / norm(reference), worst_slice, float(abs(difference).max()) / rms, axis


@pytest.mark.parametrize("axes", [(), (0,), (1,), (0, 1), (0, 1, 2)])
def test_figures(axes: tuple[int, ...]) -> None:
    reference = normal(5, 7, 3)
    value = reference + 1e-3 * normal(5, 7, 3, seed=1)
    value[2, 4] += 0.1
    found = errors(torch.from_numpy(value), torch.from_numpy(reference), axes)
    *figures, axis = expected(value, reference, axes)
    assert found.figures() == pytest.approx(tuple(figures))
    assert found.axis == axis


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_values_are_compared_in_float64(dtype: torch.dtype) -> None:
    reference = torch.from_numpy(normal(64, 32))
    value = reference.to(dtype)
    total, _, largest, _ = expected(value.double().numpy(), reference.numpy(), ())
    assert errors(value, reference).figures() == pytest.approx((total, 0.0, largest))


def test_large_values_do_not_overflow() -> None:
    reference = tensor(3e38, -3e38, dtype=torch.float32)
    assert errors(-reference, reference).figures() == pytest.approx((2.0, 0.0, 2.0))


@pytest.mark.parametrize(
    ("value", "reference", "found"),
    [
        ((1.0, NAN), (1.0, 2.0), INFINITE),
        ((1.0, INF), (1.0, 2.0), INFINITE),
        ((1.0, -INF), (1.0, 2.0), INFINITE),
        ((1.0, NAN), (1.0, NAN), EXACT),
        ((1.0, INF), (1.0, INF), EXACT),
        ((1.0, -INF), (1.0, INF), INFINITE),
        ((1.0, NAN), (1.0, INF), INFINITE),
        ((1.0, 7.0), (1.0, NAN), INFINITE),
        ((NAN, NAN), (NAN, NAN), EXACT),
        ((0.0, 0.0), (0.0, 0.0), EXACT),
        ((0.0, 1e-30), (0.0, 0.0), INFINITE),
        ((2.0, NAN), (1.0, NAN), Errors(1.0, 0.0, math.sqrt(2))),  # the NaN counts as a zero in the mean square
        ((), (), EXACT),
    ],
)
def test_not_finite(value: tuple[float, ...], reference: tuple[float, ...], found: Errors) -> None:
    assert errors(tensor(*value), tensor(*reference)).figures() == pytest.approx(found.figures())


def test_a_slice_that_is_all_infinite() -> None:
    reference = torch.ones(2, 3).double()
    reference[0] = INF
    value = reference.clone()
    value[1, 1] = 1.5
    found = errors(value, reference, (0, 1))
    assert found.figures() == pytest.approx((0.5 / math.sqrt(3), 0.5, 0.5 / math.sqrt(3 / 6)))
    assert found.axis == 1


def test_shapes_and_integers() -> None:
    assert errors(torch.zeros(2), torch.zeros(3)) == INFINITE
    assert errors(torch.zeros(1, 3), torch.zeros(3)) == INFINITE
    whole = torch.arange(5)
    assert errors(whole, whole) == EXACT
    assert errors(whole.int(), whole) == EXACT
    assert errors(whole.flip(0), whole) == INFINITE
    assert errors(torch.tensor([True]), torch.tensor([True])) == EXACT
    assert errors(torch.tensor([True]), torch.tensor([False])) == INFINITE


def test_nearly_empty_slice_is_measured_against_the_average() -> None:
    """Of 4 rows one is a millionth of the others: a hundredth of an average row's norm stands in for its own."""
    reference = np.ones((4, 100))
    reference[3] = 1e-6
    value = reference.copy()
    value[3] += 1e-6
    average = math.sqrt((reference**2).sum() / 4)
    found = errors(torch.from_numpy(value), torch.from_numpy(reference), (0,))
    assert found.worst_slice == pytest.approx(math.sqrt(100) * 1e-6 / (0.01 * average))


def test_larger() -> None:
    assert Errors(1, 5, 3, 2).larger(Errors(4, 2, 6, 1)).figures() == (4, 5, 6)


@pytest.mark.parametrize(
    ("dtypes", "cap"),
    [
        (["float32"], 1e-5),
        (["float32", "int64", "float64"], 1e-5),
        (["float32", "bfloat16"], 3 * 1.66e-3),
        (["float16", "bfloat16"], 3 * 1.66e-3),
        (["float16"], 3 * 2.08e-4),
    ],
)
def test_policy(dtypes: list[str], cap: float) -> None:
    assert Policy.of(dtypes) == Policy(2.0, pytest.approx(cap))
    assert Policy.of(dtypes, slack=3.0, cap=0.5) == Policy(3.0, 0.5)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_floors_are_those_of_rounding(name: str) -> None:
    """One rounding of Gaussian data costs what FLOOR says."""
    values = torch.from_numpy(normal(1 << 20))
    assert errors(values.to(getattr(torch, name)), values).total == pytest.approx(FLOOR[name], rel=0.05)


REFERENCE = torch.tensor([3.0, -1.0, 1.0, 1.0], dtype=torch.float64)
PEAK = 3 / math.sqrt(12 / 4)


@pytest.mark.parametrize(
    ("experts", "bound"),
    [
        ([Errors(1e-6, 2e-6, 3e-6)], (2e-6, 4e-6, 6e-6)),
        ([Errors(1e-6, 2e-6, 3e-6), Errors(2e-6, 1e-6, 4e-6)], (4e-6, 4e-6, 8e-6)),
        ([EXACT], (2.5e-8, 2.5e-8, 2.5e-8 * PEAK)),
        ([Errors(1e-3, 1e-3, 1e-3)], (1e-5, 1e-5, 1e-5 * PEAK)),
        ([INFINITE], (1e-5, 1e-5, 1e-5 * PEAK)),
        ([INFINITE, Errors(1e-6, 1e-6, 1e-6)], (2e-6, 2e-6, 2e-6)),
        ([Errors(1e-6, INF, 1e-6)], (2e-6, 1e-5, 2e-6)),
    ],
)
def test_bound(experts: list[Errors], bound: tuple[float, float, float]) -> None:
    """Slack times the worst finite one, not below the floor of the dtype, not above the cap."""
    policy = Policy.of(["float32"])
    assert policy.bound(experts, REFERENCE, torch.float32).figures() == pytest.approx(bound)


def test_bound_of_other_dtypes() -> None:
    policy = Policy.of(["bfloat16"])
    assert policy.bound([EXACT], REFERENCE, torch.bfloat16).total == pytest.approx(1.66e-3)
    assert policy.bound([EXACT], REFERENCE, torch.float32).total == pytest.approx(2.5e-8)
    assert policy.bound([Errors(2e-3, 1, 1)], REFERENCE, torch.bfloat16).total == pytest.approx(1.02 * 2e-3)
    assert policy.bound([Errors(2e-7, 1, 1)], REFERENCE, torch.float32).total == pytest.approx(2 * 2e-7)
    assert policy.bound([Errors(1, 1, 1)], REFERENCE, torch.int64) == EXACT
    assert policy.bound([EXACT], torch.zeros(3), torch.float32).figures() == (2.5e-8, 2.5e-8, 2.5e-8)
    assert policy.bound([EXACT], torch.tensor([INF, 2.0]).double(), torch.float32).largest == pytest.approx(
        2.5e-8 * 2 / math.sqrt(4 / 2)
    )


@pytest.mark.parametrize(
    ("found", "allowed", "factor", "figure"),
    [
        (Errors(1, 1, 1), Errors(2, 4, 5), 0.5, 0),
        (Errors(1, 8, 1), Errors(2, 4, 5), 2.0, 1),
        (Errors(1, 1, 9), Errors(2, 4, 3), 3.0, 2),
        (EXACT, EXACT, 0.0, 0),
        (INFINITE, Errors(1, 1, 1), INF, 0),
        (Errors(0, 0, 1e-9), EXACT, INF, 2),
    ],
)
def test_worst(found: Errors, allowed: Errors, factor: float, figure: int) -> None:
    assert worst(found, allowed) == (factor, figure)


def test_a_value_at_its_bound_is_accepted() -> None:
    allowed = Policy.of(["float32"]).bound([EXACT], REFERENCE, torch.float32)
    assert worst(allowed, allowed)[0] == 1.0


# -------------------------------------------------------------------- draws of a task, and what is said about them


@pytest.fixture(scope="module")
def largest() -> Problem:
    return Problem(contract.task(str(OPERATORS / "largest")))


@pytest.fixture(scope="module")
def scale_add() -> Problem:
    return Problem(contract.task(str(OPERATORS / "scale_add")))


def honest(x: torch.Tensor, y: torch.Tensor, alpha: float) -> list[torch.Tensor]:
    out = alpha * x + y
    return [out, out.sum(1)]


def drawn(problem: Problem, expert: Sequence[torch.Tensor] | None = None, case: str = "") -> Draw:
    draw = problem.draw(case)
    outputs = honest(*draw.inputs) if expert is None else expert
    problem.set_bounds(draw, outputs, [])
    return draw


def test_operators_own_comparison(largest: Problem) -> None:
    """Of equal elements any index is right; one out of range is no index at all."""
    draw = largest.draw("many that are equal")
    [x] = draw.inputs
    first = x.argmax(1)
    last = x.shape[1] - 1 - x.flip(1).argmax(1)
    assert not torch.equal(first, last)
    largest.set_bounds(draw, [first], [])
    for index in (first, last):
        assert worst(largest.errors(draw, [index])[0], draw.bounds[0])[0] <= 1
    smallest = largest.errors(draw, [x.argmin(1)])[0]
    assert smallest.total == pytest.approx(2.0)  # -1 for 1 everywhere
    for index in (first - 600, first + 600, torch.full_like(first, -1)):
        assert largest.errors(draw, [index]) == [INFINITE]


def test_what_cannot_be_compared_is_infinitely_wrong(largest: Problem) -> None:
    draw = largest.draw()
    for outputs in ([torch.zeros(3, dtype=torch.int64)], [], [torch.zeros(64, 2, dtype=torch.int64)]):
        assert largest.errors(draw, outputs) == [INFINITE]


def test_slices_are_those_of_the_operator(scale_add: Problem) -> None:
    draw = drawn(scale_add)
    out, total = honest(*draw.inputs)
    out[7] *= 1.001
    found, other = scale_add.errors(draw, [out, total])
    assert (found.worst_slice, found.axis) == (pytest.approx(1e-3, rel=0.01), 0)
    assert (other.worst_slice, other.axis) == (0.0, -1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda out, total: (out, total), ""),
        (lambda out, total: (out, 1.01 * total),
         r"output 1 \(total\): (relative|largest) error is \d\S+x the allowed error, on 1 of 1 inputs; "
         "all other outputs pass"),
        (lambda out, total: (1.01 * out, total),
         r"output 0 \(out\): (relative error|worst row|largest error) is \d\S+x the allowed error, on 1 of 1 inputs; "
         "all other outputs pass"),
        (lambda out, total: (out * math.nan, 1.01 * total),
         r"output 0 \(out\): it cannot be compared: values that are not finite, or that no right answer has, "
         r"on 1 of 1 inputs; also wrong: output 1 \(total\)"),
        (lambda out, total: (torch.cat((out[:-1], out[-1:] * 1.0001)), total),
         r"output 0 \(out\): worst row is \d\S+x the allowed error, on 1 of 1 inputs; all other outputs pass"),
    ],
)  # fmt: skip
def test_reason(scale_add: Problem, change: Callable[..., tuple[torch.Tensor, torch.Tensor]], reason: str) -> None:
    draw = drawn(scale_add)
    comparison = Comparison(scale_add)
    comparison.add(draw, change(*honest(*draw.inputs)))
    assert re.fullmatch(reason, comparison.reason())


def test_factor_is_error_over_bound(scale_add: Problem) -> None:
    draw = drawn(scale_add)
    outputs = honest(*draw.inputs)
    wide = [x.double().numpy() for x in draw.inputs[:2]]
    truth = (draw.inputs[2] * wide[0] + wide[1]).sum(1)
    expert, wrong = outputs[1].double().numpy(), outputs[1].double().numpy() * 1.01
    allowed = 2 * norm(expert - truth) / norm(truth)
    comparison = Comparison(scale_add)
    comparison.add(draw, [outputs[0], outputs[1] * 1.01])
    assert comparison.named()["total"] == pytest.approx((norm(wrong - truth) / norm(truth), allowed), rel=1e-3)


def test_counts_over_several_draws(scale_add: Problem) -> None:
    comparison = Comparison(scale_add)
    for factor in (1.0, 1.5, 1.0, 3.0, 2.0):
        draw = drawn(scale_add)
        out, total = honest(*draw.inputs)
        comparison.add(draw, [out, factor * total])
    assert (comparison.drawn, comparison.failed) == (5, 3)
    assert comparison.named()["total"][0] == pytest.approx(2.0, rel=1e-4)
    assert "on 3 of 5 inputs" in comparison.reason()


@pytest.mark.parametrize("timed", [20, 9, 5, 3])
def test_draws_of_an_evaluation(largest: Problem, timed: int) -> None:
    """All edge cases, some random ones, and of the timed ones a secret few; every step makes one of them."""

    def made() -> Draws:
        steps = list(prepare(largest, lambda inputs: [inputs[0].argmax(1)], {}, timed))
        assert steps[:-1] == [None] * (1 + RANDOM + timed)
        assert steps[-1] is not None
        return steps[-1]

    draws, others = made(), made()
    assert [draw.case for draw in draws.checked] == ["many that are equal", *[""] * RANDOM]
    assert all(draw.reference and draw.bounds for draw in draws.checked)
    assert [len(one.timed) for one in (draws, others)] == [timed, timed]
    secret = [sum(1 for draw in one.timed if draw.reference) for one in (draws, others)]
    assert secret == [min(TIMED_CHECKED, timed)] * 2
    first = [float(draw.inputs[0][5, 5]) for one in (draws, others) for draw in (*one.checked[1:], *one.timed)]
    assert len(set(first)) == len(first) == 2 * (RANDOM + timed)


def test_calibrated_errors_are_allowed_too(scale_add: Problem) -> None:
    """The expert was once worse on this kind of input: so may a solution be."""
    earlier = [Errors(1e-6, 2e-6, 3e-6), Errors(4e-6, 0.0, 4e-6)]
    draw = scale_add.draw()
    scale_add.set_bounds(draw, honest(*draw.inputs), earlier)
    assert draw.bounds[0].figures() == pytest.approx((2e-6, 4e-6, 6e-6))
    assert draw.bounds[1].total == pytest.approx(8e-6)
