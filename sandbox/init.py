"""PID 1 of the agent's sandbox: one socket to the runtime (descriptor 3), one persistent bash, the file tool.

A frame is two big-endian 32-bit lengths, a JSON object and raw bytes. The runtime asks, one thing at a time:
    {"do": "run", "command": text}      answered when the command has ended, or was stopped
    {"do": "stop", "why": word}         ends what runs now; that answer then says `why`
    {"do": "restart"}                   kills everything and starts a new shell
    {"do": "file", "command": ...}      a file action (files.py), done by a child so that it cannot hang us

Deadlines are the runtime's business: its clock stands still while we are frozen, ours does not. Processes
inside have our uid; we are neither dumpable nor, being PID 1 without signal handlers, killable from inside.
"""

import ctypes
import json
import os
import select
import shlex
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import files

HEAD = TAIL = 8 << 10  # bytes of a long output that the model sees
FLOOD = 64 << 20  # bytes of output that end a call
IDLE = 1 << 20  # bytes of background output read between calls; then the writers wait
GRACE = 0.3  # s for the shell to come back after its commands were killed
OUTPUTS = Path("/tmp/outputs")
IN_MEMORY = ("/tmp", "/dev/shm")
TICKS = os.sysconf("SC_CLK_TCK")
Message = dict[str, Any]


@dataclass
class Call:
    """One command: what it printed so far, and how to tell that it has ended."""

    number: int
    began: tuple[int, int]  # processes that began later are the call's
    mark: bytes = field(default_factory=lambda: f"\0{os.urandom(8).hex()}:".encode())
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    held: bytes = b""
    total: int = 0
    file: int | None = None
    why: str = ""
    give_up: float = 0.0

    @property
    def path(self) -> Path:
        return OUTPUTS / f"call-{self.number}.txt"

    def line(self, command: str) -> bytes:
        """What bash reads. The mark is assembled by printf only, so that `set -x` cannot print it."""
        token = self.mark[1:-1].decode()
        return (
            f"eval -- {shlex.quote(command)} </dev/null >&2 2>&1; "
            f"{{ builtin printf '\\0%s:%d\\0' {token} $?; }} 2>/dev/null\n"
        ).encode(errors="replace")

    def feed(self, data: bytes) -> int | None:
        """Take output; the exit code when the mark came. What follows the mark is left in `held`."""
        data = self.held + data
        begin = data.find(self.mark)
        if begin >= 0:
            code, end, rest = data[begin + len(self.mark) :].partition(b"\0")
            self.keep(data[:begin])
            self.held = rest if end else data[begin:]
            if end and not (code.isdigit() and len(code) < 4):  # a trap can see the mark and print it
                self.keep(data[begin : begin + len(self.mark) + len(code)])
                return None
            return int(code) if end else None
        begin = data.rfind(b"\0", max(0, len(data) - len(self.mark)))
        self.keep(data[:begin] if begin >= 0 else data)
        self.held = data[begin:] if begin >= 0 else b""
        return None

    def keep(self, data: bytes) -> None:
        if self.why or not data:
            return
        if self.total <= HEAD + TAIL < self.total + len(data):
            self.spill(bytes(self.head + self.tail))
        self.total += len(data)
        self.write(data)
        room = HEAD - len(self.head)
        self.head += data[:room]
        self.tail += data[room:]
        del self.tail[:-TAIL]

    def spill(self, data: bytes) -> None:
        """From here on the whole output goes to a file; without one (no room, no folder) the middle is lost."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with suppress(OSError):
            OUTPUTS.mkdir(exist_ok=True)
            self.path.unlink(missing_ok=True)
            self.file = os.open(self.path, flags, 0o644)
        self.write(data)

    def write(self, data: bytes) -> None:
        try:
            while self.file is not None and data:
                data = data[os.write(self.file, data) :]
        except OSError:
            self.close()
            with suppress(OSError):
                self.path.unlink()

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


class Shell:
    """One bash that reads its commands from a pipe and prints into the pipe that all shells share."""

    def __init__(self, output: int) -> None:
        theirs, self.stdin = os.pipe()
        self.pending = b"echo 500 >/proc/self/oom_score_adj\n"  # the kernel shall choose us last
        try:
            self.pid = os.fork()
        except OSError:  # as many processes as there may be
            kill_all()
            self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            for source, target in ((theirs, 0), (output, 1), (output, 2)):
                os.dup2(source, target)
            os.execv("/bin/bash", ["bash", "--noprofile", "--norc"])
        os.close(theirs)
        os.set_blocking(self.stdin, False)
        self.pidfd = os.pidfd_open(self.pid)
        self.status = 0

    def flush(self) -> None:
        with suppress(BlockingIOError, BrokenPipeError):
            self.pending = self.pending[os.write(self.stdin, self.pending) :]

    def close(self) -> None:
        os.close(self.stdin)
        os.close(self.pidfd)


class Init:
    """The loop. At most one of `call` (a command) and `helper` (a file action) is under way."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.received = b""
        self.output, self.write_end = os.pipe()
        os.set_blocking(self.output, False)
        self.load = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
        self.shell = Shell(self.write_end)
        self.numbers = 0
        self.call: Call | None = None
        self.helper: tuple[int, int, bytearray] | None = None
        self.late = b""
        self.idle = 0
        self.restarted = False

    def loop(self) -> None:
        self.answer({"ready": True})
        while True:
            descriptor = self.wait()
            if descriptor == self.channel.fileno():
                self.receive()
            elif descriptor == self.shell.pidfd:
                self.shell_ended()
            elif descriptor == self.shell.stdin:
                self.shell.flush()
            elif descriptor == self.output:
                self.read_output()
            elif descriptor is not None:
                self.read_helper()
            if self.call and self.call.why and time.monotonic() > self.call.give_up:
                self.call.give_up = float("inf")
                kill(self.shell.pid)  # first: it may be what starts the others
                self.kill_since(self.call.began)
            self.reap()

    def wait(self) -> int | None:
        """A descriptor with something to do; one at a time, as doing it may close others."""
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        poll.register(self.shell.pidfd, select.POLLIN)
        if self.shell.pending:
            poll.register(self.shell.stdin, select.POLLOUT)
        if self.helper:
            poll.register(self.helper[1], select.POLLIN)
        if self.call or self.idle < IDLE:
            poll.register(self.output, select.POLLIN)
        ready = poll.poll(10 if self.call and self.call.why else 1000)
        return ready[0][0] if ready else None

    def receive(self) -> None:
        data = self.channel.recv(1 << 16)
        if not data:
            os._exit(0)  # the runtime is gone: so is everything here
        self.received += data
        while len(self.received) >= 8:
            length, extra = struct.unpack_from(">II", self.received)
            if len(self.received) < 8 + length + extra:
                return
            request = json.loads(self.received[8 : 8 + length])
            self.received = self.received[8 + length + extra :]
            getattr(self, f"do_{request['do']}")(request)

    def answer(self, message: Message, extra: bytes = b"") -> None:
        text = json.dumps(message).encode()
        self.channel.sendall(struct.pack(">II", len(text), len(extra)) + text + extra)

    def do_run(self, request: Message) -> None:
        self.numbers += 1
        self.call = Call(self.numbers, self.now())
        self.shell.pending += self.call.line(request["command"])
        self.shell.flush()
        late, self.late, self.idle = self.late, b"", 0
        self.call.feed(late)

    def now(self) -> tuple[int, int]:
        """A moment in the lives of processes: ticks since boot, then the last number that was given out."""
        last = os.pread(self.load, 100, 0).split()[-1]
        return int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS), int(last)

    def do_stop(self, request: Message) -> None:
        if self.call and not self.call.why:
            self.stop(request["why"])
        elif request["why"] == "disk":
            self.kill_since((0, 0))
        if self.helper:
            kill(self.helper[0])

    def do_restart(self, request: Message) -> None:
        kill_all()
        while self.read_output():
            pass
        self.new_shell()
        self.restarted, self.late, self.idle = False, b"", 0
        self.answer({"restarted": True})

    def do_file(self, request: Message) -> None:
        read, write = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(read)
            os.close(write)
            self.answer({"ok": False, "notice": "file_no_process"})
            return
        if pid == 0:
            answer, extra = files.act(request)
            text = json.dumps(answer).encode()
            with os.fdopen(write, "wb") as pipe:
                pipe.write(struct.pack(">I", len(text)) + text + extra)
            os._exit(0)
        os.close(write)
        self.helper = (pid, read, bytearray())

    def read_helper(self) -> None:
        assert self.helper
        _, read, data = self.helper
        chunk = os.read(read, 1 << 16)
        data += chunk
        if chunk:
            return
        os.close(read)
        self.helper = None
        if len(data) < 4:
            self.answer({"ok": False, "notice": "file_stopped"})
        else:
            length = struct.unpack_from(">I", data)[0]
            self.answer(json.loads(data[4 : 4 + length]), bytes(data[4 + length :]))

    def read_output(self) -> bool:
        """Read once; whether there was something."""
        try:
            data = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return False
        if self.call is None:
            self.idle += len(data)
            self.late = (self.late + data)[-TAIL:]
            return True
        code = self.call.feed(data)
        if code is not None:
            self.finish("exit", code)
        elif self.call.total > FLOOD and not self.call.why:
            self.stop("flood")
        return True

    def stop(self, why: str) -> None:
        """Kill what the call started, or all but the shell where there is too much of it; that too if it hangs."""
        assert self.call
        self.call.why = why
        self.call.give_up = time.monotonic() + GRACE
        if why in ("flood", "disk"):
            self.call.began = (0, 0)
        self.kill_since(self.call.began)

    def finish(self, ended: str, code: int | None) -> None:
        call, self.call = self.call, None
        assert call
        self.late, self.idle = call.held[-TAIL:], 0
        path = str(call.path) if call.file is not None else None
        call.close()
        self.answer(
            {
                "ended": call.why or ended,
                "exit_code": None if call.why else code,
                "total": call.total,
                "head": len(call.head),
                "file": path,
                "restarted": self.restarted,
                "full": [folder for folder in IN_MEMORY if os.statvfs(folder).f_bavail == 0],
            },
            bytes(call.head + call.tail),
        )
        self.restarted = False

    def shell_ended(self) -> None:
        """The shell exited, was killed, or became another program that ended."""
        self.reap()
        status = os.waitstatus_to_exitcode(self.shell.status)
        self.new_shell()
        self.restarted = True
        if self.call:
            self.read_output()  # once: all that the shell wrote is in the pipe, others may write for ever
        if self.call:
            self.call.keep(self.call.held)
            self.call.held = b""
            self.finish("shell_lost", status)

    def new_shell(self) -> None:
        self.shell.close()
        self.shell = Shell(self.write_end)

    def kill_since(self, moment: tuple[int, int]) -> None:
        """Kill every process that began after it, but us and the shell; all if they outrun us."""
        done: set[tuple[int, int]] = set()
        for _ in range(100):
            fresh = {
                (began, pid) for began, pid in processes() if (began, pid) > moment and pid not in (1, self.shell.pid)
            } - done
            if not fresh:
                return
            for _, pid in fresh:
                kill(pid)
            done |= fresh
        kill_all()

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.shell.pid:
                self.shell.status = status


def processes() -> Iterator[tuple[int, int]]:
    """Every process that is no zombie: when it began (as Init.now) and its number."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue
            if words[0] not in (b"Z", b"X"):
                yield int(words[19]), int(folder.name)


def kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_all() -> None:
    """Everything but us, in one step that no fork outruns; returns when it is dead and reaped."""
    while True:
        kill(-1)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def main() -> None:
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # PID 1 ignores what it has no handler for
    os.set_inheritable(3, False)
    Init(socket.socket(fileno=3)).loop()


if __name__ == "__main__":
    main()
