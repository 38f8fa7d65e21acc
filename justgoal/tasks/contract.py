"""What an operator folder says: arguments, outputs, workloads, experts. Reads text, runs nothing of it.

operator.toml     title, summary, source, devices, [axes], [[arguments]], [[outputs]], [[experts]],
                  [[tolerances]]
workloads.toml    [[workloads]]: name, title, axes, values, dtypes; the first is the default
reference.py      reference(*arguments), make_inputs(workload, generator, device), edge_cases(workload),
                  optionally comparable(inputs, outputs)
experts/<name>/solution.py, bugs/<name>/solution.py    run(*arguments)
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from justgoal.errors import UsageError
from justgoal.tasks.schema import NAME, Table, check_functions, describe

CATALOGUE = Path(__file__).parent / "catalogue"
DEVICES = ("cpu", "cuda")
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
SCALARS = ("float32", "int64")
_SIZE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\s*\+\s*(\d+))?")


@dataclass(frozen=True)
class Argument:
    """An argument or an output. A scalar is a Python float or int.

    `slices`: the axes of an output along which the judge also looks for the worst slice.
    """

    name: str
    dtype: str
    axes: tuple[str | int, ...] = ()
    scalar: bool = False
    slices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Workload:
    """Named sizes, `values` (read by reference.py alone) and dtypes that differ from the operator's."""

    name: str
    title: str
    axes: Mapping[str, int]
    values: Mapping[str, Any] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Expert:
    """A human implementation. `packages`: distributions that it needs besides torch and numpy."""

    name: str
    folder: Path
    title: str
    packages: tuple[str, ...]


@dataclass(frozen=True)
class Tolerance:
    """Where the evaluation's own bounds do not fit: `slack` times the expert's error, never above `limit`.

    `slack` is for outputs of 32 bits and more. None means as usual; `why` says what makes it necessary; no workloads
    means all of them.
    """

    slack: float | None
    limit: float | None
    why: str
    workloads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Operator:
    """`axes` names what an axis counts ("head"), for messages about a slice."""

    name: str
    title: str
    summary: str
    source: str
    devices: tuple[str, ...]
    axes: Mapping[str, str]
    arguments: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    workloads: tuple[Workload, ...]
    experts: tuple[Expert, ...]
    tolerances: tuple[Tolerance, ...]
    folder: Path

    @property
    def bugs(self) -> tuple[Path, ...]:
        """Folders of planted wrong solutions, by name."""
        return tuple(sorted(path.parent for path in self.folder.glob("bugs/*/solution.py")))


@dataclass(frozen=True)
class Task:
    """One operator on one workload; `sha256` covers all files of the operator folder and the workload."""

    operator: Operator
    workload: Workload
    sha256: str

    @property
    def name(self) -> str:
        return f"{self.operator.name}/{self.workload.name}"

    @property
    def tolerance(self) -> Tolerance | None:
        """The first declared tolerance that names this workload, or that names none."""
        for tolerance in self.operator.tolerances:
            if not tolerance.workloads or self.workload.name in tolerance.workloads:
                return tolerance
        return None


class TensorShape(NamedTuple):
    """One argument or output of a task; a scalar's shape is ()."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def names() -> list[str]:
    """The operators of the catalogue."""
    return sorted(path.parent.name for path in CATALOGUE.glob("*/operator.toml"))


def load(name_or_path: str) -> Operator:
    """An operator of the catalogue by name, or a user's by its folder."""
    folder, rest = _split(name_or_path)
    if rest:
        raise UsageError(f"'{name_or_path}' names a workload: an operator is wanted, such as {folder.name}")
    return _load(folder)


def task(text: str) -> Task:
    """`OPERATOR` (its first workload) or `OPERATOR/WORKLOAD`; OPERATOR is a name or a folder."""
    folder, wanted = _split(text)
    operator = _load(folder)
    found = {workload.name: workload for workload in operator.workloads}
    if wanted and wanted not in found:
        called = text.removesuffix(f"/{wanted}")
        raise UsageError(
            f"operator {operator.name} has no workload '{wanted}': there are {', '.join(found)} "
            f"(justgoal tasks show {called})"
        )
    workload = found[wanted] if wanted else operator.workloads[0]
    return Task(operator, workload, _hash(folder, workload.name))


def shapes(task: Task) -> list[TensorShape]:
    """All arguments in order, then all outputs, with this workload's dtypes and sizes."""
    both = (*task.operator.arguments, *task.operator.outputs)
    dtypes = task.workload.dtypes
    return [TensorShape(a.name, dtypes.get(a.name, a.dtype), _shape(a, task.workload.axes)) for a in both]


def _split(text: str) -> tuple[Path, str]:
    """The operator's folder and the workload's name, "" for none. The catalogue's names come first."""
    name, _, rest = text.partition("/")
    known = names()
    if name in known:
        return CATALOGUE / name, rest
    path = Path(text).expanduser()
    like_a_path = "/" in text or text.startswith((".", "~"))
    if path.is_dir() and (like_a_path or (path / "operator.toml").is_file()):
        return path.resolve(), ""
    if like_a_path and (path.parent / "operator.toml").is_file():
        return path.parent.resolve(), path.name
    if text.startswith((".", "~", "/")):
        raise UsageError(f"no operator folder '{text}': a folder with operator.toml in it is wanted")
    raise UsageError(f"no operator '{name}': there are {', '.join(known)} (justgoal tasks list)")


def _load(folder: Path) -> Operator:
    if not NAME.fullmatch(folder.name):
        raise UsageError(f"operator folder '{folder.name}' must be letters, digits and underscores")
    table = Table.from_file(folder / "operator.toml")
    title, summary, source = table.text("title"), table.text("summary"), table.text("source")
    devices = table.texts("devices", DEVICES)
    axes = table.mapping("axes")
    for axis, label in axes.items():
        if not isinstance(label, str):
            raise table.error(f"axes.{axis}", f"must be text, not {label!r}")
    arguments = [_argument(inner, output=False) for inner in table.tables("arguments")]
    outputs = [_argument(inner, output=True) for inner in table.tables("outputs")]
    _distinct(table, "arguments and outputs", [one.name for one in (*arguments, *outputs)])
    experts = [_expert(inner, folder) for inner in table.tables("experts")]
    _distinct(table, "experts", [one.name for one in experts])
    tolerances = [_tolerance(inner) for inner in table.tables("tolerances", [])]
    table.done()
    workloads = _workloads(folder, (*arguments, *outputs))
    for index, tolerance in enumerate(tolerances):
        for name in tolerance.workloads:
            if name not in [workload.name for workload in workloads]:
                raise table.error(f"tolerances[{index}].workloads", f"names '{name}', which is no workload")
    _check_sources(folder, [one.name for one in arguments], experts)
    return Operator(
        name=folder.name,
        title=title,
        summary=summary,
        source=source,
        devices=devices,
        axes=axes,
        arguments=tuple(arguments),
        outputs=tuple(outputs),
        workloads=tuple(workloads),
        experts=tuple(experts),
        tolerances=tuple(tolerances),
        folder=folder,
    )


def _argument(table: Table, output: bool) -> Argument:
    name = table.name("name")
    scalar = False if output else table.flag("scalar")
    dtype = table.choice("dtype", SCALARS if scalar else DTYPES)
    if scalar:
        table.done()
        return Argument(name, dtype, scalar=True)
    axes = tuple(table.take("axes", list, "a list of axis names and sizes"))
    for index, axis in enumerate(axes):
        wrong = not _SIZE.fullmatch(axis) if isinstance(axis, str) else type(axis) is not int or axis < 0
        if wrong:
            raise table.error(f"axes[{index}]", f"{axis!r} must be an axis, such as N or N+1, or a size")
    named = [axis for axis in axes if isinstance(axis, str)]
    slices = table.texts("slices", named, ()) if output else ()
    table.done()
    return Argument(name, dtype, axes, slices=slices)


def _expert(table: Table, folder: Path) -> Expert:
    name = table.name("name")
    expert = Expert(name, folder / "experts" / name, table.text("title"), table.texts("packages", default=()))
    table.done()
    return expert


def _tolerance(table: Table) -> Tolerance:
    slack = table.take("slack", float, "a number", None)
    limit = table.take("limit", float, "a number", None)
    for key, value, least in (("slack", slack, 1.0), ("limit", limit, 0.0)):
        if value is not None and not least <= value < float("inf"):
            raise table.error(key, f"must be at least {least:g} and finite, not {value!r}")
    tolerance = Tolerance(slack, limit, table.text("why"), table.texts("workloads", default=()))
    table.done()
    return tolerance


def _workloads(folder: Path, arguments: Sequence[Argument]) -> list[Workload]:
    file = Table.from_file(folder / "workloads.toml")
    workloads = [_workload(table, arguments) for table in file.tables("workloads")]
    file.done()
    _distinct(file, "workloads", [workload.name for workload in workloads])
    return workloads


def _workload(table: Table, arguments: Sequence[Argument]) -> Workload:
    name, title = table.name("name"), table.text("title")
    axes, values, dtypes = table.mapping("axes"), table.mapping("values"), table.mapping("dtypes")
    table.done()
    for axis, size in axes.items():
        if type(size) is not int or size < 0:
            raise table.error(f"axes.{axis}", f"must be a size, not {size!r}")
    for argument in arguments:
        for expression in argument.axes:
            axis = _axis(expression)
            if axis and axis not in axes:
                raise table.error(f"axes.{axis}", f"is missing: {argument.name} has that axis")
    known = {argument.name: SCALARS if argument.scalar else DTYPES for argument in arguments}
    for key, dtype in dtypes.items():
        if key not in known:
            raise table.error(f"dtypes.{key}", "is neither an argument nor an output")
        if dtype not in known[key]:
            raise table.error(f"dtypes.{key}", f"{dtype!r} is not one of {', '.join(known[key])}")
    return Workload(name, title, axes, values, dtypes)


def _axis(expression: str | int) -> str:
    """The axis that a size is made of: N of "N+1", "" of a plain number."""
    return "" if isinstance(expression, int) else expression.partition("+")[0].strip()


def _shape(argument: Argument, axes: Mapping[str, int]) -> tuple[int, ...]:
    def size(expression: str | int) -> int:
        if isinstance(expression, int):
            return expression
        return axes[_axis(expression)] + int(expression.partition("+")[2] or 0)

    return tuple(size(expression) for expression in argument.axes)


def _distinct(table: Table, what: str, found: Sequence[str]) -> None:
    for name in found:
        if found.count(name) > 1:
            raise table.error(what, f"name '{name}' twice")


def _check_sources(folder: Path, arguments: Sequence[str], experts: Sequence[Expert]) -> None:
    wanted = {
        "reference": arguments,
        "make_inputs": ("workload", "generator", "device"),
        "edge_cases": ("workload",),
        "comparable": ("inputs", "outputs"),
    }
    check_functions(folder / "reference.py", wanted, optional=("comparable",))
    for expert in experts:
        check_functions(expert.folder / "solution.py", {"run": arguments})
    listed = [expert.name for expert in experts]
    for path in sorted((folder / "experts").iterdir()):
        if path.is_dir() and path.name != "__pycache__" and path.name not in listed:
            file = describe(folder / "operator.toml")
            raise UsageError(f"{file}: experts lacks '{path.name}', which has a folder")
    for path in sorted(folder.glob("bugs/*/")):
        if path.is_dir() and path.name != "__pycache__":
            check_functions(path / "solution.py", {"run": arguments})


def _hash(folder: Path, workload: str) -> str:
    """Over the workload and the sorted paths and contents of all files except caches and hidden ones."""
    digest = hashlib.sha256(workload.encode() + b"\0")
    paths = [path.relative_to(folder) for path in folder.rglob("*")]
    kept = [p for p in paths if not any(part == "__pycache__" or part.startswith(".") for part in p.parts)]
    for path in sorted(kept, key=lambda one: one.as_posix()):
        if (folder / path).is_file():
            content = (folder / path).read_bytes()
            digest.update(f"{path.as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
