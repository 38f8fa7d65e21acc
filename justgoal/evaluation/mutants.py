"""Wrong implementations that can be made of any right one, knowing only what its arguments and outputs are called.

They are called in a sandbox (lineup.py); the judge reads their names here. Imports torch and the standard library only.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Run = Callable[..., Sequence[torch.Tensor]]

TILE = 64
MANTISSA = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
"""Bits, without the implicit one."""
KEPT = {torch.float64: 23, torch.float32: 10, torch.float16: 3, torch.bfloat16: 3}
"""Of the next lower precision: float32, TF32, float8."""
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Place(NamedTuple):
    """An argument or an output of a task; `axes` and `slices` are in the operator's words, such as "head"."""

    name: str
    dtype: str
    shape: Sequence[int]
    axes: Sequence[str]
    slices: Sequence[str]
    scalar: bool


@dataclass(frozen=True)
class Mutant:
    """`missing` is the kind of case that a task lacks whose judge accepts what `make` makes of a right `run`.

    `argument` is the one that it is about, `mask` says that it moves what is masked there.
    """

    name: str
    missing: str
    make: Callable[[Run], Run]
    argument: str = ""
    mask: bool = False


def mutants(arguments: Sequence[Place], outputs: Sequence[Place]) -> list[Mutant]:
    """The same list wherever it is made: a mutant is known by its place in it."""
    return [
        Mutant("constant", "whose outputs are not all zero", changed(torch.zeros_like)),
        Mutant("mean", "whose outputs vary", changed(mean)),
        Mutant("copy of an input", "whose outputs differ from its inputs", copy_of(arguments, outputs)),
        *lower_precision(arguments, outputs),
        *exchanged(outputs),
        *dropped(outputs),
        *truncated(arguments),
        *(
            Mutant(f"{a.name} ignored", f"with another {a.name}", ignored(index), a.name)
            for index, a in enumerate(arguments)
        ),
        *(
            Mutant(f"{a.name} shifted", f"in which it matters where {a.name} begins", shifted(index), a.name, True)
            for index, a in enumerate(arguments)
            if not a.scalar
        ),
        Mutant("output of the previous call", "whose outputs differ from those of others", stale),
        Mutant("partial write", "in which the last quarter of the outputs differs from that of others", partial),
    ]


# -------------------------------------------------------------------- outputs that are made up, or put elsewhere


def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Run], Run]:
    return lambda run: lambda *inputs: [change(value) for value in run(*inputs)]


def mean(value: torch.Tensor) -> torch.Tensor:
    finite = value[torch.isfinite(value)].double()
    average = finite.mean() if finite.numel() else torch.zeros((), dtype=torch.float64)
    return (average if value.is_floating_point() else average.round()).to(value.dtype).expand(value.shape)


def copy_of(arguments: Sequence[Place], outputs: Sequence[Place]) -> Callable[[Run], Run]:
    """Every output is the argument of its shape, or the first one, repeated."""
    tensors = [index for index, a in enumerate(arguments) if not a.scalar]

    def source(output: Place) -> int | None:
        return next((i for i in tensors if tuple(arguments[i].shape) == tuple(output.shape)), next(iter(tensors), None))

    sources = [source(output) for output in outputs]

    def one(value: torch.Tensor, taken: torch.Tensor | None) -> torch.Tensor:
        if taken is None or not taken.numel():
            return torch.zeros_like(value)
        flat = taken.flatten().to(value.dtype)
        return flat.repeat(-(-value.numel() // flat.numel()))[: value.numel()].view(value.shape)

    return lambda run: (
        lambda *inputs: [
            one(value, None if index is None else inputs[index])
            for value, index in zip(run(*inputs), sources, strict=True)
        ]
    )


def exchanged(outputs: Sequence[Place]) -> Iterator[Mutant]:
    """The first and the last one along an axis of which the judge looks for the worst slice."""

    def exchange(axis: str) -> Callable[[Run], Run]:
        def one(value: torch.Tensor, output: Place) -> torch.Tensor:
            if axis not in output.axes:
                return value
            order = torch.arange(value.shape[output.axes.index(axis)])
            order[0], order[-1] = order[-1].item(), order[0].item()
            return value.index_select(output.axes.index(axis), order)

        return by_output(one, outputs)

    for axis in dict.fromkeys(axis for output in outputs for axis in output.slices):
        if size(outputs, axis) > 1:
            yield Mutant(
                f"first and last {axis} exchanged", f"in which the first and the last {axis} differ", exchange(axis)
            )


def dropped(outputs: Sequence[Place]) -> Iterator[Mutant]:
    def drop(axis: str) -> Callable[[Run], Run]:
        return by_output(lambda value, output: without_tail(value, output, axis), outputs)

    for axis in dict.fromkeys(axis for output in outputs for axis in output.axes):
        if size(outputs, axis) > 1:
            yield Mutant(f"last {axis} tile dropped", f"in which the last {axis} counts", drop(axis))


def by_output(change: Callable[[torch.Tensor, Place], torch.Tensor], outputs: Sequence[Place]) -> Callable[[Run], Run]:
    return lambda run: lambda *inputs: [change(value, o) for value, o in zip(run(*inputs), outputs, strict=True)]


def size(places: Sequence[Place], axis: str) -> int:
    return next(place.shape[place.axes.index(axis)] for place in places if axis in place.axes)


def without_tail(value: torch.Tensor, place: Place, axis: str) -> torch.Tensor:
    """Zero where a loop over whole tiles would not come; where all are whole, in the last one."""
    if axis not in place.axes:
        return value
    dimension = place.axes.index(axis)
    length = value.shape[dimension]
    tile = min(TILE, 1 << (max(length, 2) // 2).bit_length() - 1)
    tail = min(length % tile or tile, length)
    value = value.clone()
    value.narrow(dimension, length - tail, tail).zero_()
    return value


# -------------------------------------------------------------------- inputs that are lost, rounded or moved


def with_inputs(change: Callable[[int, Any], Any]) -> Callable[[Run], Run]:
    return lambda run: lambda *inputs: run(*[change(index, value) for index, value in enumerate(inputs)])


def truncated(arguments: Sequence[Place]) -> Iterator[Mutant]:
    """What a sum over whole tiles of an axis leaves out."""
    floats = [a for a in arguments if not a.scalar and getattr(torch, a.dtype).is_floating_point]

    def truncate(axis: str) -> Callable[[Run], Run]:
        def one(index: int, value: Any) -> Any:
            return without_tail(value, arguments[index], axis) if arguments[index] in floats else value

        return with_inputs(one)

    for axis in dict.fromkeys(axis for a in floats for axis in a.axes):
        if size(floats, axis) > 1:
            yield Mutant(f"sum over {axis} truncated", f"in which the last {axis} of the inputs counts", truncate(axis))


def ignored(argument: int) -> Callable[[Run], Run]:
    """The argument as it was in the first call."""

    def make(run: Run) -> Run:
        first: list[Any] = []

        def mutant(*inputs: Any) -> Sequence[torch.Tensor]:
            if not first:
                first.append(kept(inputs[argument]))
            return run(*inputs[:argument], first[0], *inputs[argument + 1 :])

        return mutant

    return make


def shifted(argument: int) -> Callable[[Run], Run]:
    """Indices and boundaries one further, at most the largest; what is masked by -inf or False one place further."""

    def one(index: int, value: Any) -> Any:
        if index != argument or not value.numel():
            return value
        if value.dtype is torch.bool:
            return value.roll(1, -1)
        if not value.is_floating_point():
            return (value + 1).clamp(max=value.max())
        masked = value == -torch.inf
        return value.masked_fill(masked, 0.0).masked_fill(masked.roll(1, -1), -torch.inf)

    return with_inputs(one)


def lower_precision(arguments: Sequence[Place], outputs: Sequence[Place]) -> Iterator[Mutant]:
    floats = [getattr(torch, place.dtype) for place in (*arguments, *outputs) if not place.scalar]
    floats = [dtype for dtype in floats if dtype in MANTISSA]
    if not floats:
        return
    bits = min(KEPT[dtype] for dtype in floats)

    def one(_: int, value: Any) -> Any:
        return rounded(value, bits) if isinstance(value, torch.Tensor) else value

    def accumulation(run: Run) -> Run:
        def mutant(*inputs: Any) -> Sequence[torch.Tensor]:
            with Lower(bits):
                return run(*[kept(value) for value in inputs])

        return mutant

    yield Mutant("inputs in lower precision", "whose inputs need their precision", with_inputs(one))
    yield Mutant("accumulation in lower precision", "whose intermediate results need their precision", accumulation)


def rounded(value: torch.Tensor, bits: int) -> torch.Tensor:
    """To that many bits of mantissa, where there are more; infinities and NaN stay."""
    surplus = MANTISSA.get(value.dtype, 0) - bits
    if surplus <= 0:
        return value
    whole = value.view(BITS[value.itemsize])
    half = (1 << surplus - 1) - 1 + (whole >> surplus & 1)  # to even
    return (whole + half & -(1 << surplus)).view(value.dtype).where(~value.isnan(), value)


class Lower(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds the result of every operator of torch."""

    def __init__(self, bits: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bits = bits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aliases = [returned.alias_info for returned in func._schema.returns]
        if isinstance(result, (tuple, list)):
            aliases = aliases if len(aliases) == len(result) else aliases * len(result)
            return type(result)(self._lower(*pair) for pair in zip(result, aliases, strict=True))
        return self._lower(result, aliases[0]) if aliases else result

    def _lower(self, value: Any, alias: Any) -> Any:
        """A view is left alone; what was written in place is rounded in place."""
        if not isinstance(value, torch.Tensor) or value.dtype not in MANTISSA:
            return value
        if alias is None:
            return rounded(value, self._bits)
        return value.copy_(rounded(value, self._bits)) if alias.is_write else value


# -------------------------------------------------------------------- calls that live on those before them


def stale(run: Run) -> Run:
    before: list[Sequence[torch.Tensor]] = []

    def mutant(*inputs: Any) -> Sequence[torch.Tensor]:
        before.append([value.clone() for value in run(*inputs)])
        return before.pop(0) if len(before) > 1 else before[0]

    return mutant


def partial(run: Run) -> Run:
    """Three quarters of every output are written; the rest is what was written first."""
    first: list[torch.Tensor] = []

    def mutant(*inputs: Any) -> Sequence[torch.Tensor]:
        values = [value.clone() for value in run(*inputs)]
        if not first:
            first.extend(value.clone() for value in values)
        for value, old in zip(values, first, strict=True):
            part = value.numel() * 3 // 4
            value.view(-1)[part:] = old.view(-1)[part:]
        return values

    return mutant


def kept(value: Any) -> Any:
    """A copy that the next call's inputs do not overwrite."""
    return value.clone() if isinstance(value, torch.Tensor) else value
