"""`justgoal tasks list` and `justgoal tasks show OPERATOR`: what there is to work on, as text."""

from collections.abc import Iterable, Iterator, Sequence

from justgoal.tasks import contract
from justgoal.tasks.contract import Argument, Operator, Workload


def overview() -> Iterator[str]:
    """Every operator of the catalogue with its workloads, one a line."""
    for name in contract.names():
        operator = contract.load(name)
        yield f"{name}: {operator.title} ({', '.join(operator.devices)})"
        yield from columns(workload_rows(operator))


def operator(name_or_folder: str) -> Iterator[str]:
    """All that operator.toml and workloads.toml say."""
    found = contract.load(name_or_folder)
    yield f"{found.name}: {found.title} ({', '.join(found.devices)})"
    yield found.summary
    yield f"source: {found.source}"
    for title, rows in (
        ("arguments", [(a.name, shape(a)) for a in found.arguments]),
        ("outputs", [(a.name, shape(a)) for a in found.outputs]),
        ("axes", list(found.axes.items())),
        ("workloads", workload_rows(found)),
        ("sizes", [(w.name, sizes(w)) for w in found.workloads]),
        ("experts", [(e.name, e.title) for e in found.experts]),
    ):
        yield ""
        yield title
        yield from columns(rows)


def workload_rows(operator: Operator) -> list[tuple[str, str]]:
    """Names and titles; the first workload is the one that is taken when none is named."""
    marks = [" (default)", *[""] * len(operator.workloads)]
    return [(w.name, w.title + mark) for w, mark in zip(operator.workloads, marks, strict=False)]


def shape(argument: Argument) -> str:
    """`float32 [T, Hv, 128]`, or `float32` for a scalar."""
    if argument.scalar:
        return argument.dtype
    return f"{argument.dtype} [{', '.join(map(str, argument.axes))}]"


def sizes(workload: Workload) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in workload.axes.items())


def columns(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    listed = list(rows)
    widths = [max(map(len, column)) for column in zip(*listed, strict=True)]
    for row in listed:
        yield "".join(f"  {cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
