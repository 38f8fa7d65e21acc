"""Sandboxes made by bubblewrap: no daemon, no image, ready in some 30 ms.

Started by root without a user namespace: bubblewrap mounts as root, then `setpriv` inside becomes the
sandbox's uid and drops every capability for good. With `--uid` instead the process would stay root to the
kernel and read root's files. Started by anybody else it makes a user namespace, in which the user keeps his number
and nobody has a capability. The launching shell joins the control groups first, where there are any, so that
nothing runs outside them, and passes nothing on but descriptors 0 to 3.
"""

import contextlib
import fcntl
import json
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path, PurePosixPath
from typing import IO

from justgoal.errors import Fatal, UsageError
from justgoal.freezer import Freezer
from justgoal.sandboxes import Spec, cgroups, ends, gpus, leftovers, mounts, seccomp, staging

_SETTLING = 10.0  # s
_COUNTED_APART = (5, 14)
"""The first kernel that counts a user's processes in every user namespace by themselves."""
_SWITCHES = {
    "kernel/unprivileged_userns_clone": ("0", "1"),
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
    "user/max_user_namespaces": ("0", "10000"),
}
"""By which distributions forbid user namespaces: the value that does, and one that does not."""
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
        self.version = subprocess.run(
            ["bwrap", "--version"], capture_output=True, text=True, check=True
        ).stdout.split()[-1]
        if os.geteuid() != 0:
            _try_user_namespace()
        self._groups = cgroups.usable()
        self.limited = self._groups is not None
        leftovers.sweep()
        self._in_use = staging.use()
        self._stage = mounts.stage()

    def start(self, spec: Spec) -> "BubblewrapSandbox":
        """Start it; its command begins to run at once. Raises Fatal when it cannot be started."""
        mounts.existing(spec.mounts)
        group = self._groups.group(spec.limits) if self._groups else cgroups.Ungrouped()
        if spec.idle:
            group.idle(True)
        try:
            return BubblewrapSandbox(spec, group, self._arguments(spec), self._command(spec))
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
        environment = {**mounts.environment(self._stage), **spec.environment}
        if spec.gpus:
            for mount in gpus.mounts():
                tree.add("--ro-bind", str(mount.source), mount.target)
            for node in gpus.nodes(spec.gpus):
                tree.add("--dev-bind", node, node)
            environment |= gpus.environment(spec.gpus, environment["PATH"])
        for path, size in mounts.sizes(spec).items():
            tree.add("--perms", "1777", "--size", str(size), "--tmpfs", path)
        tree.add("--perms", "1777", "--dir", mounts.HOME)
        for mount in spec.mounts:
            tree.add("--bind" if mount.writable else "--ro-bind", str(mount.source), mount.target)
        return [
            *_identity(spec.uid),
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
            "--clearenv",
            *(word for item in environment.items() for word in ("--setenv", *item)),
            *tree.arguments,
            *("--remount-ro", "/dev"),
            *("--remount-ro", "/"),
            "--chdir",
            mounts.first_folder(spec),
        ]

    def _command(self, spec: Spec) -> list[str]:
        """The command, by way of programs inside that give up for good what there is to give up.

        Without a control group each process is limited by itself: how much memory it may have and, where the kernel
        counts them by user namespace, how many may be beside it.
        """
        become, limit = [], []
        if os.geteuid() == 0:
            uid = str(spec.uid)
            become = ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", "--inh-caps=-all",
                      "--bounding-set=-all", "--no-new-privs", "--pdeathsig", "KILL", "--"]  # fmt: skip
        if not self.limited:
            counted = os.geteuid() != 0 and _kernel() >= _COUNTED_APART
            number = [f"--nproc={spec.limits.pids}"] if counted else []
            limit = ["prlimit", f"--data={spec.limits.memory}", *number, "--"]
        return [*become, *limit, *spec.command]


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

    def __init__(
        self, spec: Spec, group: cgroups.Group | cgroups.Ungrouped, arguments: list[str], command: list[str]
    ) -> None:
        self.spec = spec
        self._group = group
        self._closed = False
        self._first: int | None = None
        self._memory_events = group.memory_events()
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, self._memory_events)
            self.channel, far, self.output, write = ends(spec, opened)
            with far, os.fdopen(write):
                self._process, told = _launch(spec, group, arguments, command, far.fileno(), write)
            self._pidfd = os.pidfd_open(self._process.pid)
            opened.callback(os.close, self._pidfd)
            try:
                with told:
                    self.freezer = self._settle(told.fileno())
            except BaseException:
                self._kill()
                raise
            opened.callback(self.freezer.close)
            self._opened = opened.pop_all()

    def _settle(self, told: int) -> Freezer:
        """Wait until the command's process exists; spare bubblewrap's own from freezing and memory kills.

        PID 1 of the agent's sandbox is spared memory kills too, which only its launcher can do, and only with
        CAP_SYS_RESOURCE; without (root in many containers) it is merely the last that the kernel chooses.
        """
        end = time.monotonic() + _SETTLING
        try:
            first = _first_process(told)
            self._first = os.pidfd_open(first)
            command = first
            while not self.spec.as_pid_1 and (command := _child(first)) == 0:
                self._wait(end)
            ours = {self._process.pid} if self.spec.as_pid_1 else {self._process.pid, first}
            for pid in ours:
                self._group.leave_freezer(pid)
            # The agent's PID 1 is ours and must survive its commands; a worker's is the solution itself.
            for pid in {*ours, command} if self.spec.role == "agent" else ours:
                cgroups.spare(pid)
            while (freezer := self._group.freezer(command)) is None:
                self._wait(end)
            return freezer
        except (ProcessLookupError, _NotStarted) as error:
            self._process.wait(_SETTLING)
            message = _read(self.output).decode(errors="replace").strip()
            raise Fatal(f"a sandbox did not start: {message or 'bubblewrap gave no reason'}") from error

    def _wait(self, end: float) -> None:
        if self._process.poll() is not None or time.monotonic() > end:
            raise _NotStarted
        time.sleep(0.0005)

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
        self._kill()
        self._opened.close()

    def _kill(self) -> None:
        """PID 1 and with it all inside; returns when nothing is left, bubblewrap's own processes included."""
        with contextlib.suppress(ProcessLookupError):
            if self._first is not None:
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._group.remove()
        self._process.wait()
        if self._first is not None:
            select.select([self._first], [], [])
            os.close(self._first)


class _NotStarted(Exception):
    """bubblewrap has ended, or does not come to an end."""


def _launch(
    spec: Spec,
    group: cgroups.Group | cgroups.Ungrouped,
    arguments: list[str],
    command: list[str],
    channel: int,
    output: int,
) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Start bubblewrap by way of a shell that joins the groups and puts the descriptors in their places.

    What comes with the process is what bubblewrap tells about the sandbox.
    """
    told, telling = os.pipe2(os.O_CLOEXEC)
    passed = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10) for descriptor in (channel, telling)]
    os.close(telling)
    arguments = ["--info-fd", str(passed[1]), *arguments]
    if refused := seccomp.program(alarms=isinstance(group, cgroups.Group)):
        passed.append(_memory_file(refused))
        arguments = ["--seccomp", str(passed[2]), *arguments]
    passed.insert(0, _memory_file("\0".join(arguments).encode()))
    script = _LAUNCH.format(groups=" ".join(group.joins), arguments=passed[0], channel=passed[1])
    printed = subprocess.DEVNULL if spec.quiet else output
    try:
        process = subprocess.Popen(
            ["/bin/bash", "-c", script, "launch", *command],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            pass_fds=passed,
            cwd="/",
            env={"PATH": os.defpath},
            start_new_session=True,
        )  # Ctrl-C is not for them
        return process, os.fdopen(told, "rb")
    except BaseException:
        os.close(told)
        raise
    finally:
        for descriptor in passed:
            os.close(descriptor)


def _identity(uid: int) -> list[str]:
    """What bubblewrap is told about the user inside; root's sandboxes become him by setpriv (see the module)."""
    if os.geteuid() != 0:
        return ["--unshare-user", "--uid", str(uid), "--gid", str(uid)]
    return [word for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP") for word in ("--cap-add", capability)]


def _try_user_namespace() -> None:
    """Raise UsageError where the kernel lets nobody but root make one."""
    words = ["bwrap", "--unshare-user", "--unshare-pid", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    tried = subprocess.run(words, capture_output=True, text=True)
    if tried.returncode == 0:
        return
    for name, (forbidden, allowed) in _SWITCHES.items():
        file = Path("/proc/sys") / name
        if file.exists() and file.read_text().strip() == forbidden:
            switch = f"sudo sysctl {name.replace('/', '.')}={allowed}"
            raise UsageError(f"user namespaces are forbidden here: {switch}, or run as root")
    reason = " ".join(tried.stderr.removeprefix("bwrap: ").split())
    raise UsageError(f"bubblewrap cannot make a user namespace here: {reason}; run as root")


def _first_process(told: int) -> int:
    """The number of the sandbox's PID 1 here; raises _NotStarted when bubblewrap ends without one."""
    text = b""
    while select.select([told], [], [], _SETTLING)[0] and (data := os.read(told, 4096)):
        text += data
        with contextlib.suppress(ValueError):
            return int(json.loads(text)["child-pid"])
    raise _NotStarted


def _child(pid: int) -> int:
    """A child of a process with one thread; 0 while there is none, or no such process."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().partition(" ")[0] or 0)
    return 0


def _kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])


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
