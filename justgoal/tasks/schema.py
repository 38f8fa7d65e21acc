"""Reading what people write by hand: every mistake is one line that names the file and the field."""

import ast
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from justgoal.errors import UsageError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MISSING = object()


def describe(path: Path) -> str:
    """A file as messages name it: from its operator folder on."""
    for folder in path.parents:
        if (folder / "operator.toml").is_file():
            return str(path.relative_to(folder.parent))
    return f"{path.parent.name}/{path.name}"


def read(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UsageError(f"{describe(path)}: is no regular file")  # reading a FIFO would wait for ever
        return path.read_bytes()
    except FileNotFoundError as error:
        raise UsageError(f"{describe(path)} is missing") from error
    except OSError as error:
        raise UsageError(f"{describe(path)}: cannot be read: {error.strerror}") from error


class Table:
    """One table of a TOML file. Every field is taken once; `done` refuses those that nobody took."""

    def __init__(self, fields: Mapping[str, Any], file: str, prefix: str = "") -> None:
        self._fields = fields
        self._file = file
        self._prefix = prefix
        self._taken: list[str] = []

    @classmethod
    def from_file(cls, path: Path) -> "Table":
        try:
            fields = tomllib.loads(read(path).decode())
        except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
            raise UsageError(f"{describe(path)}: is not valid TOML: {error}") from error
        except RecursionError as error:
            raise UsageError(f"{describe(path)}: is not valid TOML: nested too deeply") from error
        return cls(fields, describe(path))

    def error(self, key: str, problem: str) -> UsageError:
        field = f"{self._prefix}.{key}" if self._prefix and key else self._prefix or key
        return UsageError(f"{self._file}: {field} {problem}")

    def done(self) -> None:
        for key in self._fields:
            if key not in self._taken:
                raise self.error(key, f"is not a known field: there are {', '.join(self._taken)}")

    def take(self, key: str, kind: type, wanted: str, default: Any = _MISSING) -> Any:
        """The field's value; `wanted` says in words what `kind` is. An integer will do for a float."""
        self._taken.append(key)
        value = self._fields.get(key, default)
        if value is _MISSING:
            raise self.error(key, f"is missing: it must be {wanted}")
        if kind is float and type(value) is int:
            value = float(value)
        if value is not default and type(value) is not kind:
            raise self.error(key, f"must be {wanted}, not {value!r}")
        return value

    def text(self, key: str, default: Any = _MISSING) -> str:
        value: str = self.take(key, str, "text", default)
        if value is not default and not value.strip():
            raise self.error(key, "is empty")
        return value

    def name(self, key: str) -> str:
        value = self.text(key)
        if not NAME.fullmatch(value):
            raise self.error(key, f"'{value}' must be letters, digits and underscores")
        return value

    def choice(self, key: str, options: Sequence[str]) -> str:
        value = self.text(key)
        if value not in options:
            raise self.error(key, f"'{value}' is not one of {', '.join(options)}")
        return value

    def flag(self, key: str) -> bool:
        return bool(self.take(key, bool, "true or false", False))

    def texts(self, key: str, options: Sequence[str] | None = None, default: Any = _MISSING) -> tuple[str, ...]:
        values = self.take(key, list, "a list of text", default)
        for index, value in enumerate(values):
            if not isinstance(value, str):
                raise self.error(f"{key}[{index}]", f"must be text, not {value!r}")
            if options is not None and value not in options:
                raise self.error(f"{key}[{index}]", f"'{value}' is not one of {', '.join(options)}")
        return tuple(values)

    def mapping(self, key: str) -> dict[str, Any]:
        return dict(self.take(key, dict, "a table", {}))

    def tables(self, key: str, default: Any = _MISSING) -> list["Table"]:
        """An array of tables, `[[key]]` in TOML; without a default there must be at least one."""
        values = self.take(key, list, f"one or more [[{key}]] tables", default)
        if not values and default is _MISSING:
            raise self.error(key, f"is empty: it must be one or more [[{key}]] tables")
        inner = f"{self._prefix}.{key}" if self._prefix else key
        for index, value in enumerate(values):
            if not isinstance(value, dict):
                raise self.error(f"{key}[{index}]", f"must be a table, not {value!r}")
        return [Table(value, self._file, f"{inner}[{index}]") for index, value in enumerate(values)]


def parse_python(path: Path) -> ast.Module:
    try:
        return ast.parse(read(path), filename=path.name)
    except (SyntaxError, ValueError) as error:
        line = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(f"{describe(path)}: is not valid Python: {line}{text}") from error
    except (RecursionError, MemoryError) as error:  # which is how the parser says it
        raise UsageError(f"{describe(path)}: is not valid Python: nested too deeply") from error


def check_functions(path: Path, wanted: Mapping[str, Sequence[str]], optional: Sequence[str] = ()) -> None:
    """The file must define these functions, each taking these arguments by position. Nothing is run."""
    defined = {node.name: node for node in parse_python(path).body if isinstance(node, ast.FunctionDef)}
    for name, arguments in wanted.items():
        if name not in defined:
            if name in optional:
                continue
            raise UsageError(f"{describe(path)}: defines no function {name}({', '.join(arguments)})")
        signature = defined[name].args
        positional = len(signature.posonlyargs) + len(signature.args)
        required = positional - len(signature.defaults)
        fits = required <= len(arguments) and (len(arguments) <= positional or signature.vararg is not None)
        if not fits or any(default is None for default in signature.kw_defaults):
            raise UsageError(f"{describe(path)}: {name} must take ({', '.join(arguments)}) by position")
