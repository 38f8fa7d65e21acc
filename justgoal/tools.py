"""The model's two tools: `bash` and a file tool, with the names and fields that models know.

Whatever a model sends gets an answer: a call that makes no sense is answered by one line that says why.
All words come from prompts/.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from justgoal import resources
from justgoal.sandboxes.shell import FLOOD, CommandResult, Shell

TIMEOUT = 600.0  # s for a command, unless the model says otherwise
LONGEST = 3600.0  # s that it may say
_FILE_FIELDS = {
    "view": ((), ("view_range",)),
    "create": (("file_text",), ()),
    "str_replace": (("old_str",), ("new_str",)),
    "insert": (("insert_line", "insert_text"), ()),
}
Input = Mapping[str, Any]


@dataclass(frozen=True)
class ToolOutcome:
    """What goes back to the model; `content` is never empty."""

    content: str
    is_error: bool


class BadInputError(Exception):
    """A call that makes no sense; the text is for the model."""


class Tools:
    """See the module. Raises only what the shell raises: SandboxLost, StopRun."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._notices = resources.notices()
        self._definitions: list[dict[str, Any]] = json.loads(
            (resources.prompts() / "tools.json").read_text(encoding="utf-8")
        )
        self._tools: dict[str, Callable[[Input], ToolOutcome]] = {
            "bash": self._bash,
            "str_replace_based_edit_tool": self._file,
        }

    def definitions(self) -> list[dict[str, Any]]:
        """As a request to the model holds them: name, description, input_schema."""
        return self._definitions

    def execute(self, name: str, input: Input) -> ToolOutcome:
        outcome = self._execute(name, input)
        text = outcome.content.encode(errors="replace").decode()  # half a surrogate pair cannot be sent
        return ToolOutcome(text, outcome.is_error)

    def _execute(self, name: str, input: Input) -> ToolOutcome:
        try:
            if name not in self._tools:
                raise self._bad("unknown_tool", name=name, names=" and ".join(self._tools))
            if not isinstance(input, Mapping):
                raise self._bad("field_type", tool=name, field="input", expected="an object")
            return self._tools[name](input)
        except BadInputError as problem:
            return ToolOutcome(str(problem), True)

    def _bash(self, input: Input) -> ToolOutcome:
        check = _Fields("bash", input, self._bad)
        command, restart = check.text("command", False), check.flag("restart")
        timeout = check.seconds("timeout", TIMEOUT, LONGEST)
        if restart and command:
            raise self._bad("bash_both")
        if restart:
            self._shell.restart()
            return ToolOutcome(self._notices["restarted"], False)
        if command is None:
            raise self._bad("field_missing", tool="bash", field="command")
        result = self._shell.run(command, timeout)
        return ToolOutcome(self._describe(result, timeout), result.ended != "exit")

    def _describe(self, result: CommandResult, timeout: float) -> str:
        """The output, then one line for each thing that is not as usual."""
        limits = self._shell.sandbox.spec.limits
        values = {"code": result.exit_code, "seconds": f"{timeout:g}", "mebibytes": FLOOD >> 20,
                  "disk": (limits.disk or 0) >> 20}  # fmt: skip
        lines = [result.output.removesuffix("\n")] if result.output.strip() else []
        if result.ended == "exit" and result.exit_code:
            lines.append(self._notices["exit_code"].format(**values))
        elif result.ended != "exit":
            lines.append(self._notices[result.ended].format(**values))
        if result.restarted and result.ended != "shell_lost":
            lines.append(self._notices["shell_restarted"])
        if result.killed:
            lines.append(self._notices["memory"].format(count=result.killed, mebibytes=limits.memory >> 20))
        lines += [self._notices["full"].format(path=path) for path in result.full]
        return "\n".join(lines or [self._notices["no_output"]])

    def _file(self, input: Input) -> ToolOutcome:
        tool = "str_replace_based_edit_tool"
        check = _Fields(tool, input, self._bad)
        command, path = check.text("command"), check.text("path")
        if command not in _FILE_FIELDS:
            raise self._bad("command_unknown", tool=tool, command=command, commands=", ".join(_FILE_FIELDS))
        if not str(path).startswith("/"):
            raise self._bad("path_relative", tool=tool)
        required, optional = _FILE_FIELDS[str(command)]
        fields = {name: check.any(name, name in required) for name in (*required, *optional)}
        action = {"command": command, "path": path, **{k: v for k, v in fields.items() if v is not None}}
        result = self._shell.file(action)
        return ToolOutcome(result.text, not result.ok)

    def _bad(self, notice: str, **fields: object) -> BadInputError:
        return BadInputError(self._notices[notice].format(**fields))


class _Fields:
    """Typed access to what a model sent; null counts as not given, unknown fields are ignored."""

    def __init__(self, tool: str, input: Input, bad: Callable[..., BadInputError]) -> None:
        self._tool, self._input, self._bad = tool, input, bad

    def text(self, name: str, required: bool = True) -> str | None:
        value = self._get(name, required, lambda value: isinstance(value, str), "a string")
        if name in ("command", "path") and "\0" in (value or ""):
            raise self._bad("nul", tool=self._tool, field=name)
        return None if value is None else str(value)

    def flag(self, name: str) -> bool:
        return bool(self._get(name, False, lambda value: isinstance(value, bool), "true or false"))

    def seconds(self, name: str, default: float, most: float) -> float:
        def fits(value: object) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= most

        value = self._get(name, False, fits, f"a number of seconds from 1 to {most:g}")
        return default if value is None else float(value)

    def any(self, name: str, required: bool) -> Any:
        """A field of the file tool, by its name."""
        if name == "insert_line":
            return self._get(name, required, _is_int, "a line number")
        if name == "view_range":
            return self._get(name, required, _is_range, "two line numbers, such as [1, 40] or [100, -1]")
        value = self.text(name, required)
        if name == "old_str" and not value:
            raise self._bad("field_empty", tool=self._tool, field=name)
        return value

    def _get(self, name: str, required: bool, fits: Callable[[Any], bool], expected: str) -> Any:
        value = self._input.get(name)
        if value is None and required:
            raise self._bad("field_missing", tool=self._tool, field=name)
        if value is not None and not fits(value):
            raise self._bad("field_type", tool=self._tool, field=name, expected=expected)
        return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_range(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(map(_is_int, value))
        and value[0] >= 1
        and (value[1] == -1 or value[1] >= value[0])
    )
