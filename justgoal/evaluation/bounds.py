"""How far outputs lie from the reference, and how far they may lie.

Three figures per output: relative L2 error over all of it, the same over its worst slice along the axes that the
operator names, and the largest absolute error over the root mean square. A bound is the expert's own figure on these
very inputs (or, if that is more, on this kind of inputs at the start of the run) times a slack, kept between two
limits: the rounding floor of the output's dtype, and a cap that keeps a poor expert from excusing a poor solution.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Relative L2 error of rounding Gaussian data once to the dtype (bf16 measured, the others by their bits of mantissa).
FLOOR = {"float64": 4.7e-17, "float32": 2.5e-8, "float16": 2.08e-4, "bfloat16": 1.66e-3}
NARROW = ("float16", "bfloat16")
CAP_FP32 = 1e-5
CAP_NARROW = 3.0
SLACK_FP32 = 2.0
SLACK_NARROW = 1.02
# A slice whose norm is below this share of the average slice is measured against that share: a nearly
# empty slice has no meaningful relative error of its own.
SLICE_FLOOR = 0.01


@dataclass(frozen=True)
class Errors:
    """Of one output: the three figures, and the axis along which the worst slice was found (-1: none)."""

    total: float
    worst_slice: float
    largest: float
    axis: int = -1

    def figures(self) -> tuple[float, float, float]:
        return self.total, self.worst_slice, self.largest

    def larger(self, other: "Errors") -> "Errors":
        """The larger of each figure."""
        return Errors(
            max(self.total, other.total), max(self.worst_slice, other.worst_slice), max(self.largest, other.largest)
        )


INFINITE = Errors(math.inf, math.inf, math.inf)


def errors(value: torch.Tensor, reference: torch.Tensor, slices: Sequence[int] = ()) -> Errors:
    """Errors of `value` against `reference` of the same shape; integers and booleans must be equal.

    `slices` are the axes along which the worst slice is sought.

    Where the reference is not finite the value must be the same (NaN for NaN), and those places count as zero;
    a value that is not finite elsewhere makes all figures infinite.
    """
    if value.shape != reference.shape:
        return INFINITE
    if not (value.is_floating_point() and reference.is_floating_point()):
        return Errors(0.0, 0.0, 0.0) if torch.equal(value.to(reference.dtype), reference) else INFINITE
    wide, wanted = value.double(), reference.double()
    special = ~torch.isfinite(wanted)
    if special.any():
        same = (wide == wanted) | (wide.isnan() & wanted.isnan())
        if not same[special].all():
            return INFINITE
        wide, wanted = wide.masked_fill(special, 0.0), wanted.masked_fill(special, 0.0)
    difference = wide - wanted
    total = _ratio(float(difference.norm()), float(wanted.norm()))
    if not math.isfinite(total):
        return INFINITE
    squared, squared_error = wanted.square(), difference.square_()
    worst, axis = _worst_slice(squared_error, squared, slices)
    empty = wanted.numel() == 0
    rms = 0.0 if empty else math.sqrt(float(squared.mean()))
    largest = _ratio(0.0 if empty else math.sqrt(float(squared_error.max())), rms)
    return Errors(total, worst, largest, axis)


def _ratio(error: float, scale: float) -> float:
    """Their quotient, 0 for 0/0; a NaN error counts as infinite."""
    if math.isnan(error):
        return math.inf
    return error / scale if scale > 0 else (0.0 if error == 0 else math.inf)


def _worst_slice(squared_error: torch.Tensor, squared: torch.Tensor, slices: Sequence[int]) -> tuple[float, int]:
    worst, where = 0.0, -1
    average = float(squared.sum())
    for axis in slices:
        others = [a for a in range(squared.dim()) if a != axis]
        error = squared_error.sum(others) if others else squared_error
        scale = squared.sum(others) if others else squared
        floor = SLICE_FLOOR**2 * average / max(scale.numel(), 1)
        ratio = math.sqrt(float((error / scale.clamp_min(max(floor, 1e-300))).max()))
        if ratio > worst:
            worst, where = ratio, axis
    return worst, where


@dataclass(frozen=True)
class Policy:
    """Slack and cap for the outputs of one workload. `slack` is that of outputs of 32 bits and more: what 16 bits
    round is the same for all, and beside it the order of a sum does not show.
    """

    slack: float
    cap: float

    @staticmethod
    def of(dtypes: Sequence[str], slack: float | None = None, cap: float | None = None) -> "Policy":
        """The rule where all tensors have these dtypes; an operator may declare another slack or cap (operator.toml
        says why).
        """
        narrow = [FLOOR[dtype] for dtype in dtypes if dtype in NARROW]
        return Policy(slack or SLACK_FP32, cap or (CAP_NARROW * max(narrow) if narrow else CAP_FP32))

    def bound(self, experts: Sequence[Errors], reference: torch.Tensor, dtype: torch.dtype) -> Errors:
        """What is allowed for one output of `dtype`, given the expert's errors here and at calibration."""
        if not dtype.is_floating_point:
            return Errors(0.0, 0.0, 0.0)
        scaled = _peak(reference)
        name = str(dtype).removeprefix("torch.")
        floor, slack = FLOOR[name], SLACK_NARROW if name in NARROW else self.slack
        limits = []
        for figure in range(3):
            scale = scaled if figure == 2 else 1.0
            finite = [e.figures()[figure] for e in experts if math.isfinite(e.figures()[figure])]
            allowed = slack * max(finite) if finite else math.inf
            limits.append(min(max(allowed, floor * scale), self.cap * scale))
        return Errors(limits[0], limits[1], limits[2])


def _peak(reference: torch.Tensor) -> float:
    """Largest magnitude over the root mean square: what one rounding of the largest element does to `largest`."""
    finite = reference.double().nan_to_num(0.0, 0.0, 0.0)
    rms = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
    return float(finite.abs().max()) / rms if rms > 0 else 1.0


def worst(found: Errors, allowed: Errors) -> tuple[float, int]:
    """By what factor the worst of the three figures exceeds what is allowed (at most 1: accepted), and which it is."""
    factors = [_ratio(f, a) for f, a in zip(found.figures(), allowed.figures(), strict=True)]
    index = max(range(3), key=lambda i: factors[i])
    return factors[index], index
