"""Sandboxes made by bubblewrap: no daemon, no image, ready in some 30 ms.

Started by root without a user namespace: bubblewrap mounts as root, then `setpriv` inside becomes the
sandbox's uid and drops every capability for good. With `--uid` instead the process would stay root to the
kernel and read root's files. The launching shell joins the control groups first, so that nothing runs outside
them, and passes nothing on but descriptors 0 to 3.
"""

import contextlib
import fcntl
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path, PurePosixPath

from justgoal.errors import Fatal, UsageError
from justgoal.sandboxes import Spec, cgroups, gpus, leftovers, mounts, seccomp, staging

_SETTLING = 10.0  # s
_LAUNCH = """
ulimit -c 0; ulimit -n 4096; umask 022
for group in {groups}; do echo 0 >"$group" || exit 1; done
exec bwrap --args {arguments} -- "$@" 3<&{channel} {channel}<&-
"""


class Bubblewrap:
    """The engine; see Engine. The thread that starts a sandbox must outlive it (bubblewrap dies with it)."""

    name = "bubblewrap"
    image: str | None = None

    def __init__(self) -> None:
        if shutil.which("bwrap") is None:
            raise UsageError("bubblewrap is not installed: apt install bubblewrap")
        if os.geteuid() != 0:
            raise Fatal("sandboxes need root here: run as root or with sudo")
        self.version = subprocess.run(
            ["bwrap", "--version"], capture_output=True, text=True, check=True
        ).stdout.split()[-1]
        self._groups = cgroups.hierarchies()
        leftovers.sweep()
        self._in_use = staging.use()
        self._stage = mounts.stage()

    def start(self, spec: Spec) -> "BubblewrapSandbox":
        """Start it; its command begins to run at once. Raises Fatal when it cannot be started."""
        mounts.existing(spec.mounts)
        group = self._groups.group(spec.limits)
        if spec.idle:
            group.idle(True)
        try:
            return BubblewrapSandbox(spec, group, self._arguments(spec))
        except BaseException:
            group.remove()
            raise

    def close(self) -> None:
        os.close(self._in_use)

    def _arguments(self, spec: Spec) -> list[str]:
        """bubblewrap's arguments up to the command."""
        tree = _Tree()
        for path, target in mounts.links().items():
            tree.add("--symlink", target, path)
        for mount in mounts.mounts(self._stage, spec.uid):
            tree.add("--ro-bind", str(mount.source), mount.target)
        for path in mounts.masked():
            tree.add("--perms", "0755", "--size", "4096", "--tmpfs", path)
            tree.add("--remount-ro", path)
        tree.add("--proc", "/proc")
        tree.add("--dev", "/dev")
        if spec.gpus:
            for mount in gpus.mounts():
                tree.add("--ro-bind", str(mount.source), mount.target)
            for node in gpus.nodes(spec.gpus):
                tree.add("--dev-bind", node, node)
        for path, size in mounts.sizes(spec).items():
            tree.add("--perms", "1777", "--size", str(size), "--tmpfs", path)
        tree.add("--perms", "1777", "--dir", mounts.HOME)
        for mount in spec.mounts:
            tree.add("--bind" if mount.writable else "--ro-bind", str(mount.source), mount.target)
        environment = {**mounts.environment(self._stage), **spec.environment}
        if spec.gpus:
            environment |= gpus.environment(spec.gpus, environment["PATH"])
        capabilities = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
        return [
            "--unshare-pid",
            "--unshare-net",
            "--unshare-ipc",
            "--unshare-uts",
            "--unshare-cgroup",
            "--hostname",
            "sandbox",
            "--new-session",
            "--die-with-parent",
            *(("--as-pid-1",) if spec.as_pid_1 else ()),
            *(word for capability in capabilities for word in ("--cap-add", capability)),
            "--clearenv",
            *(word for item in environment.items() for word in ("--setenv", *item)),
            *tree.arguments,
            "--remount-ro",
            "/",
            "--chdir",
            mounts.first_folder(spec),
        ]


class _Tree:
    """Mount arguments, every missing parent folder made first and open to all: bubblewrap makes them 0700."""

    def __init__(self) -> None:
        self.arguments: list[str] = []
        self._made = {"/"}

    def add(self, *words: str) -> None:
        target = words[-1]
        for parent in reversed(PurePosixPath(target).parents):
            if str(parent) not in self._made:
                self.arguments += ["--perms", "0755", "--dir", str(parent)]
                self._made.add(str(parent))
        self._made.add(target)
        self.arguments += words


class BubblewrapSandbox:
    """A running one; see Sandbox."""

    def __init__(self, spec: Spec, group: cgroups.Group, arguments: list[str]) -> None:
        self.spec = spec
        self._group = group
        self._closed = False
        self.freezer = group.freezer()
        self._memory_events = group.memory_events()
        self.channel, far = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET if spec.packets else socket.SOCK_STREAM
        )
        self.output, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.output, False)
        with far:
            try:
                self._process = _launch(spec, group, arguments, far.fileno(), write)
            except BaseException:
                self._close_descriptors()
                raise
            finally:
                os.close(write)
        self._pidfd = os.pidfd_open(self._process.pid)
        try:
            self._settle()
        except BaseException:
            self.close()
            raise

    def _settle(self) -> None:
        """Wait until the command's process exists; spare bubblewrap's own from freezing and memory kills.

        PID 1 of the agent's sandbox is spared memory kills too, which only its launcher can do, and only with
        CAP_SYS_RESOURCE; without (root in many containers) it is merely the last that the kernel chooses.
        """
        monitor = self._process.pid
        deadline = time.monotonic() + _SETTLING
        while self._process.poll() is None and time.monotonic() < deadline:
            inside = self._group.freezable()
            first = {pid for pid in inside if _parent(pid) == monitor}
            if self.spec.as_pid_1 and first:
                # The agent's PID 1 is ours and must survive its commands; a worker's is the solution itself.
                return self._spare({monitor}, first if self.spec.role == "agent" else set())
            if first and any(_parent(pid) in first for pid in inside):
                return self._spare({monitor, *first}, set())
            time.sleep(0.0005)
        message = _read(self.output).decode(errors="replace").strip()
        raise Fatal(f"a sandbox did not start: {message or 'bubblewrap gave no reason'}")

    def _spare(self, frozen_not: set[int], killed_not: set[int]) -> None:
        for pid in frozen_not:
            self._group.leave_freezer(pid)
        for pid in frozen_not | killed_not:
            cgroups.spare(pid)

    def alive(self) -> bool:
        return self._process.poll() is None

    def exit_status(self, timeout: float) -> int | None:
        """bubblewrap reports a death by signal as 128 plus its number: an exit code of 139 reads as -11."""
        if self._process.poll() is None:
            select.select([self._pidfd], [], [], timeout)
        code = self._process.poll()
        if code is not None and 128 < code < 128 + signal.NSIG:
            return 128 - code
        return code

    def background(self, idle: bool) -> None:
        self._group.idle(idle)

    def memory_kills(self) -> int:
        return cgroups.memory_kills(self._memory_events)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._group.remove()
        self._process.wait()
        os.close(self._pidfd)
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        self.channel.close()
        self.freezer.close()
        os.close(self._memory_events)
        os.close(self.output)


def _launch(
    spec: Spec, group: cgroups.Group, arguments: list[str], channel: int, output: int
) -> subprocess.Popen[bytes]:
    """Start bubblewrap by way of a shell that joins the groups and puts the descriptors in their places."""
    uid = str(spec.uid)
    become = [
        "setpriv",
        "--reuid",
        uid,
        "--regid",
        uid,
        "--clear-groups",
        "--inh-caps=-all",
        "--bounding-set=-all",
        "--no-new-privs",
        "--",
        *spec.command,
    ]
    passed = [fcntl.fcntl(channel, fcntl.F_DUPFD_CLOEXEC, 10)]
    if refused := seccomp.program():
        passed.append(_memory_file(refused))
        arguments = ["--seccomp", str(passed[1]), *arguments]
    passed.insert(0, _memory_file("\0".join(arguments).encode()))
    script = _LAUNCH.format(groups=" ".join(group.joins), arguments=passed[0], channel=passed[1])
    printed = subprocess.DEVNULL if spec.quiet else output
    try:
        return subprocess.Popen(
            ["/bin/bash", "-c", script, "launch", *become],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            pass_fds=passed,
            cwd="/",
            env={"PATH": os.defpath},
            start_new_session=True,
        )  # Ctrl-C is not for them
    finally:
        for descriptor in passed:
            os.close(descriptor)


def _parent(pid: int) -> int:
    """The parent process, 0 when it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _read(descriptor: int) -> bytes:
    """What is there to be read now, up to 4 KiB."""
    try:
        return os.read(descriptor, 4096)
    except BlockingIOError:
        return b""


def _memory_file(content: bytes) -> int:
    """Arguments go through a file: a command line can be read inside, and would name folders of the host."""
    plain = os.memfd_create("arguments")
    os.write(plain, content)
    os.lseek(plain, 0, os.SEEK_SET)
    descriptor = fcntl.fcntl(plain, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(plain)
    return descriptor
