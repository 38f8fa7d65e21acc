"""What a sandbox is, whichever engine makes it: processes of another uid in namespaces of their own.

Every sandbox sees the same allow-listed system (see mounts.py), has no network, its own limits and freezer.
"""

import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from justgoal.freezer import Freezer

UID = 61000 if os.geteuid() == 0 else os.geteuid()
"""Of sandboxes: nobody else's, or the user's own, who can give nobody another."""
JUDGE_UID = 61001 if os.geteuid() == 0 else UID


@dataclass(frozen=True)
class Mount:
    """A bind of one file or folder of the host, besides those that every sandbox has."""

    source: Path
    target: str
    writable: bool = False


@dataclass(frozen=True)
class Limits:
    """Memory and tmpfs in bytes, processes and threads together, cores; bytes in a folder of this machine's disk."""

    memory: int
    pids: int
    cpus: float
    disk: int | None = None


@dataclass(frozen=True)
class Spec:
    """One sandbox to start. Its command's descriptor 3 is the far end of `Sandbox.channel`.

    `tmpfs`: sizes of writable folders; /tmp and /dev/shm are there anyway, with a half and a quarter of the
    memory. `as_pid_1`: the command is PID 1 inside, without a reaper above it. `packets`: the channel keeps
    the borders of messages (SOCK_SEQPACKET) instead of being a stream. `quiet`: what the command prints
    goes nowhere, and `Sandbox.output` stays empty. `idle`: it gets only processor time that nobody else wants.
    `gpus`: UUIDs of those that it may use.
    """

    role: str
    command: tuple[str, ...]
    limits: Limits
    uid: int
    mounts: tuple[Mount, ...] = ()
    tmpfs: Mapping[str, int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    as_pid_1: bool = False
    packets: bool = False
    quiet: bool = False
    idle: bool = False
    gpus: tuple[str, ...] = ()


def ends(spec: Spec, opened: ExitStack) -> tuple[socket.socket, socket.socket, int, int]:
    """Both ends of a sandbox's channel and of the pipe with what it prints; ours are closed with `opened`."""
    channel, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET if spec.packets else socket.SOCK_STREAM)
    opened.callback(channel.close)
    output, write = os.pipe2(os.O_CLOEXEC)
    opened.callback(os.close, output)
    os.set_blocking(output, False)
    return channel, far, output, write


class Sandbox(Protocol):
    """A started sandbox. `output` is a non-blocking descriptor with stdout and stderr of the command."""

    spec: Spec
    channel: socket.socket
    freezer: Freezer
    output: int

    def alive(self) -> bool:
        """Whether the command still runs."""

    def exit_status(self, timeout: float) -> int | None:
        """Its exit code, or minus the number of the signal that ended it; None: still running after `timeout` s."""

    def background(self, idle: bool) -> None:
        """Whether it gets only processor time that nobody else wants."""

    def memory_kills(self) -> int:
        """How many processes the kernel has killed in it for memory."""

    def close(self) -> None:
        """Kill everything inside and leave no process, mount or cgroup. May be called twice."""


class Engine(Protocol):
    """Starts sandboxes; `name`, `version` and `image` (where there is one) go into run.json.

    `limited`: whether Limits hold for a sandbox as a whole; otherwise each of its processes is limited ("weak").
    """

    name: str
    version: str
    image: str | None
    limited: bool

    def start(self, spec: Spec) -> Sandbox:
        """Start it, or raise Fatal with one line that says what is missing and how to get it."""

    def close(self) -> None:
        """Give up what it holds itself; its sandboxes must be closed before."""
