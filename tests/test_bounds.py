"""Errors and bounds, each computed a second time with numpy or by hand."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from justgoal.evaluation.bounds import FLOOR, INFINITE, Errors, Policy, errors, worst

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
    ("dtypes", "slack", "cap"),
    [
        (["float32"], 2.0, 1e-5),
        (["float32", "int64", "float64"], 2.0, 1e-5),
        (["float32", "bfloat16"], 1.02, 3 * 1.66e-3),
        (["float16", "bfloat16"], 1.02, 3 * 1.66e-3),
        (["float16"], 1.02, 3 * 2.08e-4),
    ],
)
def test_policy(dtypes: list[str], slack: float, cap: float) -> None:
    assert Policy.of(dtypes) == Policy(slack, pytest.approx(cap))
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
