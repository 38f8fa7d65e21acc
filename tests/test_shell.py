"""The persistent shell in a real sandbox, and what an agent may do to it."""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from justgoal.errors import SandboxLost, StopRun
from justgoal.freezer import SignalFreezer
from justgoal.sandboxes import UID, Engine, Limits, mounts
from justgoal.sandboxes.disk import DiskWatch
from justgoal.sandboxes.shell import SOCKET, CommandResult, Shell, agent_spec
from justgoal.tools import Tools

pytestmark = pytest.mark.docker

MIB = 1 << 20


@pytest.fixture(autouse=True)
def fresh(shell: Shell) -> None:
    shell.restart()


def run(shell: Shell, command: str, timeout: float = 30) -> CommandResult:
    result = shell.run(command, timeout)
    assert result.ended == "exit", result
    return result


def lines(shell: Shell, command: str) -> list[str]:
    return run(shell, command).output.splitlines()


def eventually(found: Callable[[], bool], limit: float = 10.0) -> bool:
    """Whether it becomes true: a process that was killed takes a moment to go, more on a busy machine."""
    end = time.monotonic() + limit
    while not found():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_state_is_kept(shell: Shell) -> None:
    assert lines(shell, "pwd; id -un") == ["/workspace", "agent"]
    run(shell, "cd /tmp; X='a  b'; f() { echo \"f $1\"; }")
    assert lines(shell, 'pwd; echo "$X"; f 1') == ["/tmp", "a  b", "f 1"]
    assert run(shell, "(exit 7)").exit_code == 7
    assert not run(shell, "true").restarted


@pytest.mark.parametrize(
    ("command", "output", "code"),
    [
        ("echo out; echo err >&2", "out\nerr\n", 0),
        ("printf 'no newline'", "no newline", 0),
        ("cat", "", 0),
        ('read x; echo "$x."', ".\n", 0),
        ("printf 'a\\0b\\xff\\xc3\\xa9'", "ab\ufffd\u00e9", 0),
        ("cat <<'E'\nit's $X\nE", "it's $X\n", 0),
        ("# nothing", "", 0),
        ("", "", 0),
        ("exec >/tmp/lost 2>&1; echo gone", "", 0),
        ("-x", "bash: line 1: -x: command not found\n", 127),
        ("echo 'open", None, 2),
        ("if", None, 2),
        ("\ud800", None, 127),
    ],
)
def test_commands(shell: Shell, command: str, output: str | None, code: int) -> None:
    result = run(shell, command)
    assert result.exit_code == code
    if output is not None:
        assert result.output.replace("line 2", "line 1") == output
    assert lines(shell, "echo after") == ["after"]


def test_trace_does_not_end_a_call(shell: Shell) -> None:
    assert lines(shell, "set -x; echo hi") == ["++ echo hi", "hi"]
    assert lines(shell, "sleep 0.05; echo ho")[-1] == "ho"


def test_long_command(shell: Shell) -> None:
    assert lines(shell, f"printf %s '{'x' * 300_000}' | wc -c") == ["300000"]


def test_long_output(shell: Shell) -> None:
    result = run(shell, "seq 100000 | tee /tmp/whole")
    size = int(lines(shell, "wc -c < /tmp/whole")[0])
    head, notice, tail = result.output.partition("[")[0], *result.output.partition("[")[2].split("]\n", 1)
    assert head.startswith("1\n2\n") and tail.endswith("\n99999\n100000\n")
    assert len(tail) == 8 << 10
    omitted, _, rest = notice.partition(" bytes omitted; the full output is in ")
    assert int(omitted) == size - (16 << 10)
    assert rest.startswith("/tmp/outputs/call-")
    run(shell, f"cmp {rest} /tmp/whole")


def test_output_file_cannot_be_a_trap(shell: Shell) -> None:
    """A pipe or a link in the place of the file neither hangs nor redirects us."""
    run(shell, "rm -rf /tmp/outputs; mkfifo /tmp/outputs; echo safe > /tmp/target")
    assert "bytes omitted]" in run(shell, "seq 100000").output
    run(
        shell,
        "rm /tmp/outputs; mkdir /tmp/outputs; for i in $(seq 500); do ln -s /tmp/target /tmp/outputs/call-$i.txt; done",
    )
    run(shell, "seq 100000")
    assert lines(shell, "cat /tmp/target") == ["safe"]
    run(shell, "rm -rf /tmp/outputs")


def test_background_child_does_not_hold_a_call(shell: Shell) -> None:
    began = time.monotonic()
    assert lines(shell, "sleep 100 & setsid sleep 100 & echo done") == ["done"]
    assert time.monotonic() - began < 10
    assert lines(shell, "until [ $(pgrep -xc sleep) = 2 ]; do :; done; echo both") == ["both"]


def test_deadline_kills_what_the_call_started(shell: Shell) -> None:
    run(shell, "X=kept; sleep 1001 &")
    command = "setsid sleep 1002 & (setsid sh -c 'trap \"\" TERM; sleep 1003' &) ; echo before; sleep 1004"
    result = shell.run(command, 0.3)
    assert (result.ended, result.exit_code, result.output) == ("deadline", None, "before\n")
    assert not result.restarted
    seen = "echo $X; pgrep -a sleep | cut -d' ' -f2-"
    assert eventually(lambda: lines(shell, seen)[-2:] == ["kept", "sleep 1001"])


@pytest.mark.parametrize(
    "command",
    [
        "while :; do :; done",
        "while :; do sleep 1; done",
        "exec sleep 1000",
        "kill -STOP $$",
        "for i in $(seq 300); do setsid sh -c 'while :; do sh -c : & done' & done; sleep 100",
    ],
)
def test_deadline_of_a_stubborn_shell(shell: Shell, command: str) -> None:
    result = shell.run(command, 0.3)
    assert (result.ended, result.restarted) == ("deadline", True)
    assert eventually(lambda: int(lines(shell, "ps -e --no-headers | wc -l")[-1]) <= 5)
    assert not run(shell, "true").restarted


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 3", 3),
        ("kill -9 $$", -9),
        ("exec true", 0),
        ("set -e; false", 1),
        ("kill -9 -1; kill -9 $$", -9),
    ],
)
def test_shell_lost(shell: Shell, command: str, code: int) -> None:
    result = shell.run(f"echo before; {command}", 30)
    assert (result.ended, result.exit_code, result.output.splitlines()[0]) == ("shell_lost", code, "before")
    assert lines(shell, "pwd") == ["/workspace"]


def test_shell_lost_between_calls(shell: Shell) -> None:
    run(shell, "P=$$; (sleep 0.1; kill -9 $P) &")
    time.sleep(0.4)
    assert run(shell, "echo hi").restarted
    assert not run(shell, "echo hi").restarted


def test_flood(shell: Shell) -> None:
    result = shell.run("yes", 60)
    assert result.ended == "flood"
    assert result.output.startswith("y\ny\n")
    assert len(result.output) < 20_000
    assert eventually(lambda: lines(shell, "pgrep -c yes")[-1] == "0")
    run(shell, "rm -r /tmp/outputs")


def test_background_flood(shell: Shell) -> None:
    """A flood between calls neither fills our memory nor hides the next call's own output."""
    run(shell, "yes & sleep 0.05")
    time.sleep(0.2)
    result = shell.run("echo mine; sleep 100", 20)
    assert result.ended == "flood"
    assert eventually(lambda: lines(shell, "pgrep -c yes")[-1] == "0")
    run(shell, "rm -r /tmp/outputs")


def test_old_flood_does_not_hold_a_deadline(shell: Shell) -> None:
    """What an earlier call started is spared by a deadline, and may print for ever."""
    run(shell, "(while :; do echo spam; sleep 0.01; done) & yes >/dev/null &")
    result = shell.run("exec sleep 100", 0.3)
    assert (result.ended, result.restarted) == ("deadline", True)
    assert "1" in lines(shell, "pgrep -c yes")  # among what the spammer prints


def test_output_without_room(shell: Shell) -> None:
    run(shell, "head -c 490M /dev/zero > /tmp/big")
    assert "bytes omitted]" in run(shell, "head -c 40M /dev/zero | tr '\\0' x").output
    assert lines(shell, "rm /tmp/big; ls /tmp/outputs | wc -l") == ["0"]


def test_fork_bomb_is_survived(shell: Shell) -> None:
    shell.run("bomb() { bomb | bomb & }; bomb; sleep 0.3", 5)
    shell.restart()
    assert lines(shell, "ps -e --no-headers | wc -l") == ["4"]


def test_full_memory_folder_is_told(shell: Shell) -> None:
    result = run(shell, "head -c 2G /dev/zero > /tmp/big; echo done")
    assert (result.output.splitlines()[-1], result.full) == ("done", ("/tmp",))
    assert run(shell, "rm /tmp/big").full == ()


@pytest.fixture
def little(engine: Engine, tmp_path: Path) -> Iterator[Tools]:
    """Tools whose workspace may hold 20 MiB."""
    workspace = tmp_path / "run" / "workspace"
    mounts.own_folder(workspace, UID)
    task = mounts.stage_tree(Path(__file__).parents[1] / "prompts")
    spec = agent_spec(workspace, task, None, Limits(512 * MIB, 64, 2, 20 * MIB), UID)
    with (
        contextlib.closing(engine.start(spec)) as sandbox,
        DiskWatch(workspace, 20 * MIB, sandbox.freezer) as watch,
    ):
        yield Tools(Shell(sandbox, None, disk=watch))


FULL = "[stopped: /workspace holds more than 20 MiB; all processes were killed; remove what you do not need]"


def bash(tools: Tools, command: str) -> str:
    return tools.execute("bash", {"command": command}).content


def test_full_workspace_is_told(little: Tools) -> None:
    """What is there may be looked at and removed, and not become more."""
    assert bash(little, "echo begun; head -c 30M /dev/zero > big; sleep 100") == f"begun\n{FULL}"
    assert bash(little, "sleep 2.5; pgrep -c sleep; ls") == "0\nbig"
    assert bash(little, "head -c 10M /dev/zero > more; sleep 100") == FULL
    assert bash(little, "rm big; head -c 5M /dev/zero > less; sleep 2.5; ls") == "less\nmore"


def test_full_workspace_is_frozen_between_calls(little: Tools) -> None:
    """Whoever fills the disk while nobody waits does so for a second; then it stands still until the next call."""
    freezer = little._shell.sandbox.freezer
    bash(little, "(head -c 30M /dev/zero > big; sleep 100) & ")
    assert eventually(freezer.frozen)
    freezer.thaw()  # as whoever holds the device does in the end
    assert eventually(freezer.frozen)
    assert bash(little, "echo hi") == FULL
    assert bash(little, "pgrep -c sleep").endswith("0\n[exit code 1]")
    assert bash(little, "ls") == "big"


def test_memory_kill_is_told(shell: Shell) -> None:
    if isinstance(shell.sandbox.freezer, SignalFreezer):
        pytest.skip("without a control group nothing is killed for memory")
    result = run(shell, "python -c 'bytearray(3 << 30)'")
    assert (result.exit_code, result.killed) == (137, 1)
    assert run(shell, "true").killed == 0


def test_supervisor_is_out_of_reach(shell: Shell) -> None:
    script = """
for s in KILL INT TERM HUP STOP CHLD USR1; do kill -$s 1; done
for f in mem environ fd/3 maps; do head -c 1 /proc/1/$f && echo "read $f"; done 2>/dev/null
ls /proc/1/fd /proc/1/fdinfo 2>/dev/null
gdb -p 1 -batch 2>&1 | grep -c 'Operation not permitted'
python -c 'import ctypes; print(ctypes.CDLL(None).ptrace(16, 1, 0, 0))'
"""
    assert lines(shell, script)[-1] == "-1"
    assert "read" not in run(shell, script).output
    assert lines(shell, "echo alive") == ["alive"]


def test_restart(shell: Shell) -> None:
    run(shell, "X=1; cd /tmp; sleep 100 & setsid sleep 100 &")
    shell.restart()
    assert lines(shell, "echo $X.; pwd; pgrep -c sleep") == [".", "/workspace", "0"]


def test_deadline_stands_still_while_frozen(shell: Shell) -> None:
    """Frozen for longer than its deadline, by somebody else, a command still ends well."""

    def freeze() -> None:
        time.sleep(0.2)
        shell.sandbox.freezer.freeze()
        time.sleep(1.5)
        shell.sandbox.freezer.thaw()

    other = threading.Thread(target=freeze)
    began = time.monotonic()
    other.start()
    result = shell.run("for i in $(seq 8); do sleep 0.1; done; echo done", 1.3)
    other.join()
    assert (result.ended, result.output) == ("exit", "done\n")
    assert time.monotonic() - began > 1.5


class Answering:
    """A gate that freezes the sandbox, takes its time, and answers; or ends the run."""

    def __init__(self, folder: Path, stop: bool = False) -> None:
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(folder / SOCKET))
        (folder / SOCKET).chmod(0o666)
        self.server.listen()
        self.shell: Shell | None = None
        self.stop = stop
        self.asked: list[list[str]] = []

    def fileno(self) -> int:
        return self.server.fileno()

    def serve(self) -> bool:
        assert self.shell
        if self.stop:
            raise StopRun("patience")
        connection, _ = self.server.accept()
        with connection, connection.makefile("rwb") as file:
            self.asked.append(json.loads(file.readline())["arguments"])
            self.shell.sandbox.freezer.freeze()
            time.sleep(1.0)
            file.write(json.dumps({"text": "correct, 1.0 ms", "code": len(self.asked[-1])}).encode() + b"\n")
            file.flush()
            self.shell.sandbox.freezer.thaw()
        return True


@contextlib.contextmanager
def gated(engine: Engine, folder: Path, stop: bool = False) -> Iterator[tuple[Shell, Answering]]:
    mounts.own_folder(folder / "run" / "workspace", UID)
    (folder / "gate").mkdir(mode=0o755)
    gate = Answering(folder / "gate", stop)
    task = mounts.stage_tree(Path(__file__).parents[1] / "prompts")
    spec = agent_spec(folder / "run" / "workspace", task, folder / "gate", Limits(256 * MIB, 64, 2), UID)
    sandbox = engine.start(spec)
    with gate.server, contextlib.closing(sandbox):
        gate.shell = Shell(sandbox, gate)
        yield gate.shell, gate


def test_evaluate_survives_freezing(engine: Engine, tmp_path: Path) -> None:
    with gated(engine, tmp_path) as (shell, gate):
        result = run(shell, "evaluate; echo $?; timeout 100 evaluate --expert x", timeout=0.8)
        assert result.output == "correct, 1.0 ms\n0\ncorrect, 1.0 ms\n"
        assert result.exit_code == 2
        assert gate.asked == [[], ["--expert", "x"]]


def test_evaluate_without_a_judge(shell: Shell) -> None:
    assert run(shell, "evaluate").output == "evaluate: the judge does not answer\n"


def test_gate_ends_the_run(engine: Engine, tmp_path: Path) -> None:
    with gated(engine, tmp_path, stop=True) as (shell, _):
        with pytest.raises(StopRun) as stop:
            shell.run("sleep 1000 & echo before; evaluate; echo after; sleep 1000", 30)
        assert (stop.value.status, stop.value.output) == ("patience", "before\n")
        if engine.limited:  # its processes are found by their control group
            pids = shell.sandbox._group.pids  # type: ignore[attr-defined]
            rest = ["bwrap", "init", "bash"] if engine.name == "bubblewrap" else ["init", "bash"]
            assert eventually(lambda: len(pids()) == len(rest))


def test_sandbox_lost(engine: Engine, tmp_path: Path) -> None:
    if not engine.limited:
        pytest.skip("the test finds processes by their control group")
    with gated(engine, tmp_path) as (shell, _):
        threading.Timer(0.2, lambda: [os.kill(pid, 9) for pid in sorted(shell.sandbox._group.pids())]).start()  # type: ignore[attr-defined]
        with pytest.raises(SandboxLost, match="the agent's sandbox ended by itself"):
            shell.run(f"sleep 100 # {secrets.token_hex(4)}", 30)
