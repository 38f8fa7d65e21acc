"""Freezing a sandbox: nothing in it runs until it is thawed.

Through its control group where there is one. The runtime opens the files and may hand the descriptors to the judge,
who then needs neither a path nor root (the kernel checks permissions when a file is opened). Otherwise every process of
its process namespace is stopped by a signal, which only somebody outside of it can do: the runtime does so itself, and
for the judge, who lives in another namespace, by orders over a socket. Whoever freezes sees no difference.
"""

import ctypes
import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

NAP = 5e-6  # s; the kernel adds its timer slack
PR_SET_TIMERSLACK = 29
_FREEZE, _STOP, _THAW, _ASK = b"f", b"s", b"t", b"?"
_ENDED = "X"
_STOPPED, _IN_KERNEL = frozenset("TtZX"), frozenset("D")
"""States of a thread: it is stopped or has ended; it waits, and is stopped before it runs any code of its program."""


def timer_slack(nanoseconds: int) -> None:
    """By how much the kernel may lengthen the sleeps of this thread; 0 is the default, 50 us."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, nanoseconds, 0, 0, 0)


class Freezer(Protocol):
    """`kind` says how; with it `descriptors` can be handed to another process (received)."""

    @property
    def kind(self) -> str: ...

    @property
    def descriptors(self) -> Sequence[int]: ...

    def order(self, frozen: bool) -> None:
        """Ask for it; returns at once, the sandbox follows within about 0.1 ms."""

    def frozen(self) -> bool: ...

    def freeze(self) -> None:
        """Freeze, and return when nothing in the sandbox runs, or it is gone."""

    def thaw(self) -> None: ...

    def place(self) -> dict[str, Any]:
        """Where another process of this host finds it (find)."""

    def close(self) -> None: ...


def received(kind: str, descriptors: Sequence[int]) -> Freezer:
    """One that another process has handed over."""
    if kind == SignalFreezer.kind:
        return RemoteFreezer(socket.socket(fileno=descriptors[0]))
    return GroupFreezer(descriptors[0], descriptors[1], int(kind.split()[-1]))


def find(place: dict[str, Any]) -> Freezer:
    """Another process's; raises OSError, LookupError, TypeError or ValueError where there is none any more."""
    if place["kind"] == SignalFreezer.kind:
        found = SignalFreezer(place["process"])
        if found.place() != place:
            found.close()
            raise ProcessLookupError(f"process {place['process']} is another one")
        return found
    write = os.open(place["write"], os.O_WRONLY | os.O_CLOEXEC)
    read = os.open(place["read"], os.O_RDONLY | os.O_CLOEXEC)
    return GroupFreezer(write, read, int(place["kind"].split()[-1]))


# -------------------------------------------------------------------- control groups


@dataclass(frozen=True)
class GroupFreezer:
    """One cgroup's. `version` 1: freezer.state for both; 2: cgroup.freeze is written, cgroup.events read."""

    write_fd: int
    read_fd: int
    version: int

    @property
    def kind(self) -> str:
        return f"control groups version {self.version}"

    @property
    def descriptors(self) -> Sequence[int]:
        return self.write_fd, self.read_fd

    def order(self, frozen: bool) -> None:
        thawed, freezing = (b"THAWED", b"FROZEN") if self.version == 1 else (b"0", b"1")
        try:
            os.pwrite(self.write_fd, freezing if frozen else thawed, 0)
        except OSError as error:
            if error.errno != errno.ENODEV:  # the group is gone with its last process, as a container's is
                raise

    def frozen(self) -> bool:
        return self._says() is True

    def freeze(self) -> None:
        """Sleeps between reads. Spinning keeps the tasks that are to be frozen off their cores (4.7 ms, measured), and
        so does yielding: after a call of 10 ms the scheduler lets the one who yields go first for 1 ms more (measured).
        """
        self.order(True)
        while self._says() is False:
            time.sleep(NAP)

    def thaw(self) -> None:
        self.order(False)

    def place(self) -> dict[str, Any]:
        write, read = (str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in (self.write_fd, self.read_fd))
        return {"kind": self.kind, "write": write, "read": read}

    def close(self) -> None:
        for descriptor in {self.write_fd, self.read_fd}:
            os.close(descriptor)

    def _says(self) -> bool | None:
        """Whether it is frozen; None when there is no such group any more."""
        try:
            state = os.pread(self.read_fd, 256, 0)
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
            return None
        return state.startswith(b"FROZEN") if self.version == 1 else b"frozen 1" in state


# -------------------------------------------------------------------- signals


class SignalFreezer:
    """All processes of a process namespace, seen through its own /proc and signalled from outside of it.

    Nothing inside can stop PID 1, or wake it: the state of PID 1 says whether the sandbox is frozen.
    """

    kind = "signals"

    def __init__(self, process: int) -> None:
        """`process`: the number, here, of a process whose /proc is that of its namespace; raises OSError otherwise."""
        self._process = process
        self._processes = os.open(f"/proc/{process}/root/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._server: tuple[socket.socket, threading.Thread] | None = None
        try:
            self._check()
        except OSError:
            os.close(self._processes)
            raise

    def order(self, frozen: bool) -> None:
        if frozen:
            self._stop(self._names())
        else:
            for name in self._names():
                self._signal(name, signal.SIGCONT)

    def frozen(self) -> bool:
        return "T" in self._states("1")

    def freeze(self) -> None:
        """Over when all that were found stand still and there are no others.

        Until it is stopped itself a process may start another, or wake one that is.
        """
        while True:
            found = self._names()
            if not self._stop(found) and self._names() == found:
                return
            time.sleep(NAP)

    def thaw(self) -> None:
        self.order(False)

    @property
    def descriptors(self) -> Sequence[int]:
        """A socket that takes orders, from now on."""
        if self._server is None:
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._server = far, threading.Thread(target=self._serve, args=(near,), daemon=True)
            self._server[1].start()
        return (self._server[0].fileno(),)

    def place(self) -> dict[str, Any]:
        words = Path(f"/proc/{self._process}/stat").read_text().rpartition(")")[2].split()
        return {"kind": self.kind, "process": self._process, "started": int(words[19])}

    def close(self) -> None:
        if self._server is not None:
            far, thread = self._server
            far.shutdown(socket.SHUT_RDWR)  # that of all copies, so the thread ends
            far.close()
            thread.join()
        os.close(self._processes)

    def _check(self) -> None:
        """Raise OSError unless this is the /proc of the namespace: before a sandbox is complete it is still ours."""
        status = Path(f"/proc/{self._process}/status").read_text()
        number = next(line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:"))
        ours, theirs = (os.stat(f"/proc/{process}/ns/pid").st_ino for process in ("self", self._process))  # noqa: PTH116
        seen = os.stat(f"{number}/ns/pid", dir_fd=self._processes).st_ino
        if seen != theirs or theirs == ours:
            raise ProcessLookupError(f"process {self._process} has no /proc of its own namespace")

    def _names(self) -> list[str]:
        """The numbers of all processes, in the namespace; none when it is gone."""
        with suppress(OSError):
            return [name for name in os.listdir(self._processes) if name.isdigit()]  # noqa: PTH208
        return []

    def _stop(self, names: Sequence[str]) -> bool:
        """Stop all that are not, PID 1 last; whether there were any that did not wait in the kernel."""
        busy = False
        for name in reversed(names):
            states = self._states(name)
            if states - _STOPPED:
                self._signal(name, signal.SIGSTOP)
                busy = busy or bool(states - _STOPPED - _IN_KERNEL)
        return busy

    def _states(self, name: str) -> set[str]:
        """Those of a process's threads."""
        state, threads = self._state(f"{name}/stat")
        if threads == 1:
            return {state}
        try:
            tasks = self._open(f"{name}/task")
        except OSError:
            return {_ENDED}
        try:
            return {self._state(f"{name}/task/{task}/stat")[0] for task in os.listdir(tasks)}  # noqa: PTH208
        except OSError:
            return {_ENDED}
        finally:
            os.close(tasks)

    def _state(self, path: str) -> tuple[str, int]:
        """State of a thread and how many threads there are; as of one that has ended when it is gone."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._processes)
        except OSError:
            return _ENDED, 1
        try:
            words = os.read(file, 4096).rpartition(b")")[2].split()
        except OSError:
            return _ENDED, 1
        finally:
            os.close(file)
        return words[0].decode(), int(words[17])

    def _signal(self, name: str, number: int) -> None:
        """Through the folder of the process in /proc, which stands for that very process."""
        with suppress(OSError):
            process = self._open(name)
            try:
                signal.pidfd_send_signal(process, number)
            finally:
                os.close(process)

    def _open(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._processes)

    def _serve(self, channel: socket.socket) -> None:
        """Carry out the orders of a RemoteFreezer, on the core of the judge, who waits meanwhile."""
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of this thread, as is the timer slack
        timer_slack(1)
        with channel, suppress(OSError):
            while order := channel.recv(1):
                if order in (_STOP, _THAW):
                    self.order(order == _STOP)
                elif order == _FREEZE:
                    self.freeze()
                    channel.send(b"1")
                else:
                    channel.send(b"1" if self.frozen() else b"0")


class RemoteFreezer:
    """A SignalFreezer of another process, which carries out what it is told."""

    kind = SignalFreezer.kind

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    @property
    def descriptors(self) -> Sequence[int]:
        return (self._channel.fileno(),)

    def order(self, frozen: bool) -> None:
        self._say(_STOP if frozen else _THAW)

    def frozen(self) -> bool:
        self._say(_ASK)
        return self._answer() == b"1"

    def freeze(self) -> None:
        self._say(_FREEZE)
        self._answer()

    def thaw(self) -> None:
        self.order(False)

    def place(self) -> dict[str, Any]:
        raise NotImplementedError("only the process that started a sandbox knows where it is")

    def close(self) -> None:
        self._channel.close()

    def _say(self, order: bytes) -> None:
        with suppress(OSError):  # whoever carries it out has gone, and the sandbox with it
            self._channel.send(order)

    def _answer(self) -> bytes:
        with suppress(OSError):
            return self._channel.recv(1)
        return b""
