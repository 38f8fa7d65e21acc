"""The model's tools: definitions, calls that make no sense, and the file tool in a real sandbox."""

import re
import time
from typing import Any

import pytest

from justgoal import resources
from justgoal.sandboxes import Engine
from justgoal.sandboxes.shell import Shell
from justgoal.tools import ToolOutcome, Tools

FILE_TOOL = "str_replace_based_edit_tool"


@pytest.fixture(scope="module")
def tools(shell: Shell) -> Tools:
    return Tools(shell)


def bash(tools: Tools, **input: Any) -> ToolOutcome:
    return tools.execute("bash", input)


def edit(tools: Tools, command: str, path: str, **input: Any) -> ToolOutcome:
    return tools.execute(FILE_TOOL, {"command": command, "path": path, **input})


def ok(text: str) -> ToolOutcome:
    return ToolOutcome(text, False)


def bad(text: str) -> ToolOutcome:
    return ToolOutcome(text, True)


def test_definitions(tools: Tools) -> None:
    assert [sorted(tool) for tool in tools.definitions()] == [["description", "input_schema", "name"]] * 2
    assert [tool["name"] for tool in tools.definitions()] == ["bash", FILE_TOOL]
    fields = {name for tool in tools.definitions() for name in tool["input_schema"]["properties"]}
    assert fields == {
        "command",
        "timeout",
        "restart",
        "path",
        "view_range",
        "file_text",
        "old_str",
        "new_str",
        "insert_line",
        "insert_text",
    }


def test_notices_are_one_line_each() -> None:
    assert all(text and "\n" not in text for text in resources.notices().values())


@pytest.mark.parametrize(
    ("name", "input", "text"),
    [
        ("python", {}, f"there is no tool 'python'; there are bash and {FILE_TOOL}"),
        ("bash", {}, "bash: command is missing"),
        ("bash", [], "bash: input must be an object"),
        ("bash", {"command": 3}, "bash: command must be a string"),
        ("bash", {"command": "a\0b"}, "bash: command contains a NUL character"),
        ("bash", {"command": "a", "timeout": "3"}, "bash: timeout must be a number of seconds from 1 to 3600"),
        ("bash", {"command": "a", "timeout": 4000}, "bash: timeout must be a number of seconds from 1 to 3600"),
        ("bash", {"command": "a", "timeout": float("nan")}, "bash: timeout must be a number of seconds from 1 to 3600"),
        ("bash", {"restart": "yes"}, "bash: restart must be true or false"),
        ("bash", {"restart": True, "command": "a"}, "bash: give either command or restart"),
        (FILE_TOOL, {"path": "/x"}, f"{FILE_TOOL}: command is missing"),
        (FILE_TOOL, {"command": "view"}, f"{FILE_TOOL}: path is missing"),
        (
            FILE_TOOL,
            {"command": "undo", "path": "/x"},
            f"{FILE_TOOL}: there is no command 'undo'; there are view, create, str_replace, insert",
        ),
        (
            FILE_TOOL,
            {"command": "view", "path": "x"},
            f"{FILE_TOOL}: path must be absolute, such as /workspace/solution/solution.py",
        ),
        (
            FILE_TOOL,
            {"command": "view", "path": "/x", "view_range": [3]},
            f"{FILE_TOOL}: view_range must be two line numbers, such as [1, 40] or [100, -1]",
        ),
        (FILE_TOOL, {"command": "create", "path": "/x"}, f"{FILE_TOOL}: file_text is missing"),
        (FILE_TOOL, {"command": "str_replace", "path": "/x", "old_str": ""}, f"{FILE_TOOL}: old_str must not be empty"),
        (
            FILE_TOOL,
            {"command": "insert", "path": "/x", "insert_line": True, "insert_text": ""},
            f"{FILE_TOOL}: insert_line must be a line number",
        ),
    ],
)
def test_bad_calls(tools: Tools, name: str, input: Any, text: str) -> None:
    assert tools.execute(name, input) == bad(text)


def test_bash(tools: Tools) -> None:
    assert bash(tools, command="echo hi") == ok("hi")
    assert bash(tools, command="true", restart=False, timeout=None, extra=1) == ok("[no output]")
    assert bash(tools, command="echo hi; exit_code() { return 3; }; exit_code") == ok("hi\n[exit code 3]")
    assert bash(tools, command="exit 4") == bad("[the shell ended with status 4; a new one was started in /workspace]")
    assert bash(tools, command="echo a; sleep 100", timeout=0.2) == bad(
        "a\n[stopped after 0.2 seconds: the processes that this command started were killed]"
    )
    assert bash(tools, restart=True) == ok("[everything that ran was killed; a new shell was started in /workspace]")


def test_memory_is_told(tools: Tools, engine: Engine) -> None:
    if not engine.limited:
        pytest.skip("nobody counts the memory of all processes together")
    assert bash(tools, command="python -c 'bytearray(3 << 30)'").content.splitlines()[-2:] == [
        "[exit code 137]",
        "[out of memory: the kernel killed 1 of the processes; the limit for all together is 1024 MiB]",
    ]


def test_create_and_view(tools: Tools) -> None:
    text = "first\n\tsecond\r\nlast \u00e9 without end"
    assert edit(tools, "create", "/workspace/new/deep/a.txt", file_text=text) == ok("/workspace/new/deep/a.txt written")
    assert bash(tools, command="cat /workspace/new/deep/a.txt") == ok(text)
    assert edit(tools, "view", "/workspace/new/deep/a.txt").content.split("\n") == [
        "     1\tfirst",
        "     2\t\tsecond\r",
        "     3\tlast \u00e9 without end",
    ]
    assert edit(tools, "view", "/workspace/new/deep/a.txt", view_range=[2, 2]) == ok("     2\t\tsecond\r")
    assert edit(tools, "view", "/workspace/new/deep/a.txt", view_range=[3, 99]) == ok("     3\tlast \u00e9 without end")
    assert edit(tools, "view", "/workspace/new/deep/a.txt", view_range=[4, -1]) == bad(
        "view_range does not fit: /workspace/new/deep/a.txt has 3 lines"
    )
    assert edit(tools, "create", "/workspace/new/deep/a.txt", file_text="") == ok("/workspace/new/deep/a.txt written")
    assert edit(tools, "view", "/workspace/new/deep/a.txt") == ok("/workspace/new/deep/a.txt is empty")


def test_view_of_a_folder(tools: Tools) -> None:
    bash(tools, command="mkdir -p /tmp/f/b/c/d /tmp/f/.hidden; cd /tmp/f; touch a b/c/d/deep b/.h; ln -s / r")
    assert edit(tools, "view", "/tmp/f") == ok("/tmp/f/\n/tmp/f/a\n/tmp/f/b/\n/tmp/f/b/c/\n/tmp/f/r")
    bash(tools, command="mkdir /tmp/many; cd /tmp/many; touch $(seq 1000)")
    listing = edit(tools, "view", "/tmp/many").content.splitlines()
    assert len(listing) == 502 and listing[-1] == "[only the first 500 entries shown]"


def test_view_of_a_long_file(tools: Tools) -> None:
    bash(tools, command="seq 100000 > /tmp/long; head -c 100000 /dev/zero | tr '\\0' x > /tmp/wide")
    text = edit(tools, "view", "/tmp/long").content
    assert len(text) < 40_000
    found = re.fullmatch(r"\[lines 1 to (\d+) of 100000 shown; view_range shows others\]", text.splitlines()[-1])
    assert found and text.splitlines()[-2] == f"{int(found[1]):6d}\t{found[1]}"
    assert edit(tools, "view", "/tmp/long", view_range=[99999, -1]) == ok(" 99999\t99999\n100000\t100000")
    assert edit(tools, "view", "/tmp/wide").content.endswith("xxx...")


def test_str_replace(tools: Tools) -> None:
    bash(tools, command="printf 'a = 1\\r\\nb = 2\\na = 1\\n\\xff' > /tmp/r")
    assert edit(tools, "str_replace", "/tmp/r", old_str="c", new_str="d") == bad("old_str does not occur in /tmp/r")
    assert edit(tools, "str_replace", "/tmp/r", old_str="a = 1", new_str="d") == bad(
        "old_str occurs 2 times in /tmp/r (lines 1, 3); it must occur exactly once"
    )
    assert edit(tools, "str_replace", "/tmp/r", old_str="b = 2\na", new_str="\u00e9") == ok("/tmp/r edited at line 2")
    assert edit(tools, "str_replace", "/tmp/r", old_str="\r\n") == ok("/tmp/r edited at line 1")
    assert bash(tools, command="od -An -c /tmp/r | tr -d ' '") == ok("a=1303251=1\\n377")


def test_insert(tools: Tools) -> None:
    bash(tools, command="printf 'one\\ntwo' > /tmp/i")
    assert edit(tools, "insert", "/tmp/i", insert_line=2, insert_text="three") == ok("/tmp/i edited at line 3")
    assert edit(tools, "insert", "/tmp/i", insert_line=0, insert_text="zero\n") == ok("/tmp/i edited at line 1")
    assert bash(tools, command="cat /tmp/i") == ok("zero\none\ntwo\nthree")
    assert edit(tools, "insert", "/tmp/i", insert_line=5, insert_text="x") == bad(
        "insert_line does not fit: /tmp/i has 4 lines"
    )


def test_file_problems(tools: Tools) -> None:
    bash(tools, command="mkfifo /tmp/fifo; truncate -s 1G /tmp/huge; mkdir -p /tmp/folder")
    assert edit(tools, "view", "/nowhere") == bad("/nowhere does not exist")
    assert edit(tools, "view", "/tmp/fifo") == bad("/tmp/fifo is not a regular file")
    assert edit(tools, "create", "/tmp/fifo", file_text="x") == bad("/tmp/fifo is not a regular file")
    assert edit(tools, "view", "/dev/zero") == bad("/dev/zero is not a regular file")
    assert edit(tools, "create", "/tmp/folder", file_text="x") == bad("/tmp/folder: Is a directory")
    assert edit(tools, "create", "/task/x", file_text="x") == bad("/task/x: Read-only file system")
    assert edit(tools, "view", "/\ud800").content.startswith("/?: 'utf-8' codec can't encode")
    assert edit(tools, "view", "/proc/1/environ") == bad("/proc/1/environ: Permission denied")
    assert edit(tools, "view", "/tmp/huge") == bad(
        "/tmp/huge has 1073741824 bytes; this tool handles files of up to 10485760 bytes"
    )


def test_file_action_that_is_stopped(tools: Tools) -> None:
    """The action's process is the agent's to kill, not to keep us waiting."""
    bash(tools, command="(while :; do pkill -9 -f init.py; done) >/dev/null 2>&1 &")
    began = time.monotonic()
    outcomes = [edit(tools, "view", "/tmp") for _ in range(20)]
    assert time.monotonic() - began < 20
    assert {outcome.is_error for outcome in outcomes} <= {True, False}
    bash(tools, restart=True)
    assert not edit(tools, "view", "/tmp").is_error


def test_no_room_for_a_process(tools: Tools) -> None:
    program = "import os, time\ntry:\n  while os.fork(): pass\nexcept OSError: pass\ntime.sleep(100)"
    bash(tools, command=f"python -c '{program}' &")
    deadline = time.monotonic() + 20
    while not (outcome := edit(tools, "view", "/tmp")).is_error and time.monotonic() < deadline:
        time.sleep(0.05)
    assert outcome.is_error and outcome.content.startswith("the sandbox has no room for another process")
    bash(tools, restart=True)
    assert not edit(tools, "view", "/tmp").is_error
