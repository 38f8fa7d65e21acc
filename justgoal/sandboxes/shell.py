"""The runtime's end of the agent's sandbox: commands in its persistent shell, and file actions.

The other end is sandbox/init.py, PID 1 in there. Deadlines are kept here; they stand still while the sandbox
is frozen, whoever froze it, and while the gate serves, which it does only as long as a command runs.
"""

import contextlib
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from justgoal import resources
from justgoal.errors import SandboxLost, StopRun
from justgoal.sandboxes import Limits, Mount, Sandbox, Spec
from justgoal.sandboxes.disk import DiskWatch
from justgoal.sandboxes.mounts import stage_tree

SOCKET = "evaluate.sock"  # in the gate's folder
FLOOD = 64 << 20  # as in sandbox/init.py
_START = 30.0  # s until PID 1 must have answered
_FILE = 30.0  # s that a file action may take
_STOPPING = 15.0  # s until a stopped command must be gone
_SLICE = 0.1  # s between looks at the freezer: what a freeze can cost a deadline
Message = dict[str, Any]


class Gate(Protocol):
    """What is served while a command runs: readable means that somebody inside asks for something."""

    def fileno(self) -> int: ...

    def serve(self) -> bool:
        """Answer what is waiting; whether the time that it took is the runtime's. May raise StopRun."""


@dataclass(frozen=True)
class CommandResult:
    """What a command printed, cut as the model sees it, and how it ended.

    `ended`: exit (with `exit_code`), deadline, flood, disk (DiskWatch), shell_lost (the shell itself ended, with
    `exit_code`), or stopped. `restarted`: the shell of the last call is gone. `killed`: processes lost to the memory
    limit. `full`: folders in memory without room for another byte.
    """

    output: str
    exit_code: int | None
    ended: str
    restarted: bool = False
    killed: int = 0
    full: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileResult:
    text: str
    ok: bool


def agent_spec(
    workspace: Path,
    task: Path,
    gate: Path | None,
    limits: Limits,
    uid: int,
    environment: Mapping[str, str] | None = None,
) -> Spec:
    """The agent's sandbox: /workspace to write in, /task to read, the folder of the gate's socket."""
    mounts = [
        Mount(stage_tree(resources.sandbox_files()), "/opt/justgoal"),
        Mount(task, "/task"),
        Mount(workspace, "/workspace", writable=True),
    ]
    if gate is not None:
        mounts.append(Mount(gate, "/run/justgoal"))
    command = ("/opt/venv/bin/python", "-ES", "/opt/justgoal/init.py")
    return Spec("agent", command, limits, uid, tuple(mounts), environment=environment or {}, as_pid_1=True)


class Shell:
    """See the module. One call at a time; every method raises SandboxLost when the sandbox has ended."""

    def __init__(
        self,
        sandbox: Sandbox,
        gate: Gate | None,
        frozen: Callable[[], None] = lambda: None,
        disk: DiskWatch | None = None,
    ) -> None:
        """`frozen` is called now and then while the sandbox is frozen: whoever froze it may have been killed."""
        self.sandbox = sandbox
        self._disk = disk
        self._gate = gate
        self._frozen = frozen
        self._received = b""
        self._kills = sandbox.memory_kills()
        self._notices = resources.notices()
        self._answer(_START, None)

    def run(self, command: str, timeout: float) -> CommandResult:
        """Run a command for at most `timeout` seconds. When the gate raises, the command is killed first."""
        self._send({"do": "run", "command": command})
        try:
            return self._result(*self._answer(timeout, self._gate))
        except SandboxLost:
            raise
        except StopRun as stop:
            stop.output = self._stopped().output
            raise
        except BaseException:
            self._stopped()
            raise

    def restart(self) -> None:
        """Kill everything inside but PID 1, and start a new shell."""
        self._send({"do": "restart"})
        self._answer(_STOPPING, None)

    def file(self, action: Message) -> FileResult:
        """Do one action of the file tool, whose fields must be complete and of the right types."""
        self._send({"do": "file", **action})
        answer, extra = self._answer(_FILE, None)
        lines = [_text(extra)] if extra else []
        if notice := answer.get("notice"):
            fields = {"path": action["path"], "seconds": f"{_FILE:g}", **answer}
            lines.append(self._notices[notice].format(**fields))
        return FileResult("\n".join(lines), bool(answer["ok"]))

    def _stopped(self) -> CommandResult:
        """End the command that runs, and take what it printed."""
        self._send({"do": "stop", "why": "stopped"})
        return self._result(*self._answer(_STOPPING, None))

    def _result(self, answer: Message, extra: bytes) -> CommandResult:
        head, tail = extra[: answer["head"]], extra[answer["head"] :]
        output = _text(extra)
        if omitted := answer["total"] - len(extra):
            notice = self._notices["omitted" if answer["file"] else "omitted_lost"]
            line = notice.format(bytes=omitted, file=answer["file"])
            output = "\n".join((_text(head).rstrip("\n"), line, _text(tail)))
        kills = self.sandbox.memory_kills()
        killed, self._kills = kills - self._kills, kills
        full = tuple(answer["full"])
        return CommandResult(output, answer["exit_code"], answer["ended"], answer["restarted"], killed, full)

    def _send(self, message: Message) -> None:
        text = json.dumps(message).encode()
        try:
            self.sandbox.channel.sendall(struct.pack(">II", len(text), 0) + text)
        except OSError as error:
            raise self._lost() from error

    def _answer(self, timeout: float, gate: Gate | None) -> tuple[Message, bytes]:
        """The next frame. After `timeout` unfrozen seconds what runs is stopped; then it must come soon."""
        left, stopping = timeout, False
        while (frame := self._frame()) is None:
            if self._disk is not None and self._disk.exceeded.is_set():
                self._send({"do": "stop", "why": "disk"})  # before it is thawed
                self._disk.relieve()
            left -= self._wait(left, gate)
            if left > 0:
                continue
            if stopping:
                raise SandboxLost("the agent's sandbox does not answer")
            self._send({"do": "stop", "why": "deadline"})
            left, stopping, gate = _STOPPING, True, None
        return frame

    def _wait(self, left: float, gate: Gate | None) -> float:
        """Wait for the sandbox or the gate; returns the seconds that count: neither frozen nor the gate's."""
        channel, freezer = self.sandbox.channel, self.sandbox.freezer
        frozen = freezer.frozen()
        if frozen:
            self._frozen()
        began = time.monotonic()
        waiting: list[socket.socket | Gate] = [channel] if gate is None else [channel, gate]
        ready, _, _ = select.select(waiting, [], [], min(left, _SLICE))
        passed = 0.0 if frozen or freezer.frozen() else time.monotonic() - began
        if channel in ready:
            self._receive()
        if gate is not None and gate in ready:
            began = time.monotonic()
            if not gate.serve():
                passed += time.monotonic() - began
        return passed

    def _receive(self) -> None:
        try:
            data = self.sandbox.channel.recv(1 << 16)
        except OSError as error:
            raise self._lost() from error
        if not data:
            raise self._lost()
        self._received += data

    def _frame(self) -> tuple[Message, bytes] | None:
        if len(self._received) < 8:
            return None
        length, extra = struct.unpack_from(">II", self._received)
        end = 8 + length + extra
        if len(self._received) < end:
            return None
        frame = self._received[8 : 8 + length], self._received[8 + length : end]
        self._received = self._received[end:]
        return json.loads(frame[0]), frame[1]

    def _lost(self) -> SandboxLost:
        status = self.sandbox.exit_status(1.0)
        printed = b""
        with contextlib.suppress(BlockingIOError):
            printed = os.read(self.sandbox.output, 1 << 16)
        reasons = [f"status {status}", *_text(printed).strip().splitlines()[-1:]]
        if kills := self.sandbox.memory_kills() - self._kills:
            reasons.insert(1, f"{kills} processes killed for memory")
        return SandboxLost(f"the agent's sandbox ended by itself ({', '.join(reasons)})")


def _text(data: bytes) -> str:
    return data.decode(errors="replace").replace("\0", "")
