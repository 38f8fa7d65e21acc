"""Generated wrong implementations do what their names say, on operators small enough to follow by hand."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from justgoal.evaluation.mutants import Lower, Mutant, Place, mutants, rounded, without_tail

ROWS = Place("x", "float32", (4, 6), ("row", "column"), (), False)
STARTS = Place("starts", "int64", (3,), ("start",), (), False)
SCALE = Place("scale", "float32", (), (), (), True)
SUMS = Place("y", "float32", (4,), ("row",), ("row",), False)


def weighted(x: torch.Tensor, starts: torch.Tensor, scale: float) -> Sequence[torch.Tensor]:
    """Sums of the rows from the column that `starts` ends with."""
    return [scale * x[:, int(starts[-1]) :].sum(1)]


def mutant(name: str) -> Callable[..., Sequence[torch.Tensor]]:
    [found] = [one for one in mutants([ROWS, STARTS, SCALE], [SUMS]) if one.name == name]
    return found.make(weighted)


X = torch.arange(24.0).reshape(4, 6)
OTHER = 100 - X
AT = torch.tensor([0, 2, 3])


def test_names() -> None:
    made = mutants([ROWS, STARTS, SCALE], [SUMS])
    assert [one.name for one in made] == [
        "constant", "mean", "copy of an input", "inputs in lower precision", "accumulation in lower precision",
        "first and last row exchanged", "last row tile dropped", "sum over row truncated",
        "sum over column truncated", "x ignored", "starts ignored", "scale ignored", "x shifted", "starts shifted",
        "output of the previous call", "partial write",
    ]  # fmt: skip
    assert all(one.missing for one in made)


@pytest.mark.parametrize(
    ("name", "expected"),
    [  # rows sum to 12, 30, 48, 66 from column 3 on, times 2
        ("constant", [0, 0, 0, 0]),
        ("mean", [78, 78, 78, 78]),
        ("copy of an input", [0, 1, 2, 3]),
        ("inputs in lower precision", [24, 60, 96, 132]),
        ("first and last row exchanged", [132, 60, 96, 24]),
        ("last row tile dropped", [24, 60, 0, 0]),
        ("sum over row truncated", [24, 60, 0, 0]),
        ("sum over column truncated", [2 * 3, 2 * 9, 2 * 15, 2 * 21]),
        ("starts shifted", [24, 60, 96, 132]),
    ],
)
def test_one_call(name: str, expected: list[float]) -> None:
    assert mutant(name)(X, AT, 2.0)[0].tolist() == expected


def test_calls_that_live_on_earlier_ones() -> None:
    later = [2 * (300 - row) for row in (12, 30, 48, 66)]
    assert weighted(OTHER, AT, 2.0)[0].tolist() == later
    for name, expected in {
        "x ignored": [24, 60, 96, 132],
        "scale ignored": later,
        "output of the previous call": [24, 60, 96, 132],
        "partial write": [*later[:3], 132],
    }.items():
        run = mutant(name)
        scale = 5.0 if name == "scale ignored" else 2.0
        assert run(X, AT, 2.0)[0].tolist() == [24, 60, 96, 132], name
        assert run(OTHER, AT, scale)[0].tolist() == expected, name


def test_what_is_masked_is_shifted() -> None:
    masked = torch.tensor([[1.0, -math.inf, 2.0, 3.0]])
    place = Place("x", "float32", (1, 4), ("row", "column"), (), False)
    [shift] = [one for one in mutants([place], [place]) if one.name == "x shifted"]
    assert shift.mask and shift.make(lambda x: [x])(masked)[0].tolist() == [[1.0, 0.0, -math.inf, 3.0]]
    flags = torch.tensor([True, False, False])
    place = Place("x", "bool", (3,), ("column",), (), False)
    [shift] = [one for one in mutants([place], [place]) if one.name == "x shifted"]
    assert shift.make(lambda x: [x])(flags)[0].tolist() == [False, True, False]


def test_integers_have_no_lower_precision() -> None:
    names = [one.name for one in mutants([STARTS], [STARTS])]
    assert not [name for name in names if "precision" in name or "truncated" in name]


@pytest.mark.parametrize(("bits", "dtype"), [(10, torch.float16), (7, torch.bfloat16)])
def test_rounding_is_that_of_a_narrower_type(bits: int, dtype: torch.dtype) -> None:
    values = 100 * torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    values = values[values.abs() > 1e-3]
    assert torch.equal(rounded(values, bits), values.to(dtype).float())
    assert torch.equal(rounded(values.double(), 23), values.double())


def test_rounding_keeps_what_is_special() -> None:
    special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    assert rounded(special, 3).tolist()[:2] == [math.inf, -math.inf]
    assert rounded(torch.tensor([-1], dtype=torch.int32).view(torch.float32), 3).isnan()  # as outputs are poisoned
    assert math.isnan(rounded(special, 3)[2]) and math.copysign(1, rounded(special, 3)[4].item()) == -1
    assert rounded(torch.tensor([3]), 3).tolist() == [3]


def test_every_intermediate_result_is_rounded() -> None:
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.rand(50, generator=generator) for _ in range(2))
    with Lower(10):
        total = (x * y).sum()
        placed = torch.zeros(50)
        placed[10:].add_(x[10:])
        copied = x.view(5, 10)[1]
        product = x[:3] * 1.0
        parts = x.split(10)
        largest = (3 * x).sort()
    assert total == (x * y).half().float().sum().half().float()
    assert torch.equal(placed[10:], x[10:].half().float()) and not placed[:10].any()
    assert torch.equal(copied, x[10:20])
    assert torch.equal(product, x[:3].half().float())
    assert len(parts) == 5 and torch.equal(parts[4], x[40:])
    assert torch.equal(largest.values, (3 * x).half().float().sort().values) and largest.indices.dtype is torch.int64


@pytest.mark.parametrize(("length", "left"), [(895, 832), (128, 64), (100003, 99968), (8, 4), (5, 4), (3, 2), (2, 1)])
def test_the_tail_is_what_whole_tiles_leave(length: int, left: int) -> None:
    place = Place("x", "float32", (2, length), ("row", "column"), (), False)
    kept = without_tail(torch.ones(2, length), place, "column")
    assert kept.sum(1).tolist() == [left, left] and kept[:, :left].all()


def test_the_list_is_the_same_wherever_it_is_made() -> None:
    def told(one: Mutant) -> tuple[str, str, str]:
        return one.name, one.missing, one.argument

    places = [ROWS, STARTS, SCALE], [SUMS]
    assert list(map(told, mutants(*places))) == list(map(told, mutants(*places)))
