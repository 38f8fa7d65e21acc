"""Control groups of sandboxes: limits on memory, processes and CPU, and the freezer; versions 1 and 2.

Every sandbox gets a group of its own (one folder per hierarchy under version 1), below the group that this
process is in under version 1, so that limits set on us hold for it too. Needs root, or groups that the user was given.
Groups of containers are made by the Docker Engine; here they are found and read.
"""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from justgoal import owners
from justgoal.errors import Fatal
from justgoal.freezer import Freezer, GroupFreezer, SignalFreezer
from justgoal.sandboxes import Limits

_CONTROLLERS = ("memory", "pids", "cpu", "freezer")
_PERIOD = 100_000  # us
_ASKING = 2.0  # s
_NUMBERS = count(1)
_PREFIX = "justgoal-"
_REST = "justgoal-host"
_MANAGER = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")


@dataclass(frozen=True)
class Hierarchies:
    """Where groups are made: one parent folder per controller, the same one for all under version 2.

    `mounts` has, per controller, which part of the hierarchy is mounted (/ for all of it), and where.
    """

    version: int
    parents: dict[str, Path]
    mounts: dict[str, tuple[str, Path]]

    def group(self, limits: Limits) -> "Group":
        """Make a group with these limits; raises Fatal when the kernel does not let us."""
        group = self._named(f"{_PREFIX}{owners.mark()}-{next(_NUMBERS)}")
        try:
            for folder in group.unique():
                folder.mkdir()
            group.limit(limits)
        except OSError as error:
            group.remove()
            raise Fatal(f"cannot limit a sandbox in {error.filename}: {error.strerror}") from error
        return group

    def sweep(self) -> int:
        """Remove the groups, and all processes in them, of runtimes that no longer exist; how many there were."""
        names = {folder.name for parent in self.parents.values() for folder in parent.glob(f"{_PREFIX}*-*")}
        left = [name for name in names if owners.dead(name.removeprefix(_PREFIX).rpartition("-")[0])]
        for name in left:
            self._named(name).remove()
        return len(left)

    def of_process(self, pid: int) -> "Group":
        """The group that a process is in, made by somebody else; raises Fatal where we cannot see it."""
        paths = _paths(Path(f"/proc/{pid}/cgroup").read_text())
        folders = {}
        for controller in _CONTROLLERS:
            name = controller if self.version == 1 else ""
            root, mount = self.mounts[controller]
            folder = mount / paths.get(name, "/").removeprefix(root).lstrip("/")
            if not (folder / "cgroup.procs").exists():
                raise Fatal(f"the control group {folder} of a container cannot be seen from here")
            folders[controller] = folder
        return Group(self.version, folders)

    def _named(self, name: str) -> "Group":
        folders = {controller: parent / name for controller, parent in self.parents.items()}
        if self.version == 2:
            folders["freezer"] /= "inside"
        return Group(self.version, folders)


class Group:
    """One sandbox's folders. The command joins by writing 0 to each of `joins` before it becomes the sandbox.

    Under version 2 the freezer is a folder inside: bubblewrap's own processes can be limited, yet not freeze.
    """

    def __init__(self, version: int, folders: dict[str, Path]) -> None:
        self.version = version
        self.folders = folders

    def unique(self) -> list[Path]:
        return list(dict.fromkeys(self.folders.values()))

    @property
    def joins(self) -> list[str]:
        folders = self.unique() if self.version == 1 else [self.folders["freezer"]]
        return [str(folder / "cgroup.procs") for folder in folders]

    def limit(self, limits: Limits) -> None:
        memory, pids, cpu = (self.folders[name] for name in ("memory", "pids", "cpu"))
        quota = max(1000, int(limits.cpus * _PERIOD))
        unlimited = limits.cpus >= len(os.sched_getaffinity(0))  # a quota of all cores only adds jitter
        _write(pids / "pids.max", limits.pids)
        if self.version == 1:
            _write(memory / "memory.limit_in_bytes", limits.memory)
            if (memory / "memory.memsw.limit_in_bytes").exists():
                _write(memory / "memory.memsw.limit_in_bytes", limits.memory)
            if not unlimited:
                _write(cpu / "cpu.cfs_period_us", _PERIOD)
                _write(cpu / "cpu.cfs_quota_us", quota)
            return
        _write(memory / "memory.max", limits.memory)
        if (memory / "memory.swap.max").exists():
            _write(memory / "memory.swap.max", 0)
        if not unlimited:
            _write(cpu / "cpu.max", f"{quota} {_PERIOD}")

    def idle(self, idle: bool) -> None:
        """Whether everybody else goes first, as with the scheduler's idle policy within a group."""
        file = self.folders["cpu"] / "cpu.idle"
        if file.exists():  # since Linux 5.15
            _write(file, int(idle))

    def freezer(self, process: int) -> Freezer:
        """Open the freezer of all in the group, `process` among them; the caller closes it."""
        return open_freezer(self.folders["freezer"], self.version)

    def leave_freezer(self, pid: int) -> None:
        """Take a process that only waits (bubblewrap's own) out of the freezer: that halves its time."""
        _write(self.folders["freezer"].parent / "cgroup.procs", pid)

    def freezable(self) -> set[int]:
        """The processes that freeze."""
        return set(map(int, (self.folders["freezer"] / "cgroup.procs").read_text().split()))

    def pids(self) -> set[int]:
        found: set[int] = set()
        for folder in self.unique():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found.update(map(int, (folder / "cgroup.procs").read_text().split()))
        return found - {0}

    def memory_events(self) -> int:
        """Open the file that memory_kills reads; the caller closes it."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        return os.open(self.folders["memory"] / name, os.O_RDONLY | os.O_CLOEXEC)

    def remove(self, patience: float = 10.0) -> None:
        """Kill what is inside, frozen or not, wait for it, and remove the folders."""
        deadline = time.monotonic() + patience
        while True:
            self.kill()
            if not self.pids() and all(_remove_folder(folder) for folder in reversed(self.unique())):
                return
            if time.monotonic() > deadline:
                raise Fatal(f"processes {sorted(self.pids())} of a sandbox do not end")
            time.sleep(0.001)

    def kill(self) -> None:
        """Kill what is inside now, frozen or not."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._thaw()

    def _thaw(self) -> None:
        """A frozen process keeps its SIGKILL until it is thawed."""
        if (folder := self.folders.get("freezer")) is not None and folder.exists():
            with contextlib.suppress(FileNotFoundError):
                if self.version == 1:
                    _write(folder / "freezer.state", "THAWED")
                else:
                    _write(folder / "cgroup.freeze", 0)


class Ungrouped:
    """Instead of a Group where none can be made: nobody counts, and what stops a sandbox are signals."""

    joins: tuple[str, ...] = ()

    def idle(self, idle: bool) -> None:
        """Whoever wants to go last can say so itself."""

    def freezer(self, process: int) -> Freezer | None:
        """None until the sandbox of `process` is complete."""
        with contextlib.suppress(OSError):
            return SignalFreezer(process)
        return None

    def leave_freezer(self, pid: int) -> None:
        """It was never in one."""

    def memory_events(self) -> int:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def remove(self) -> None:
        """There is none."""


def memory_kills(events: int) -> int:
    """How many processes the kernel has killed for memory, from an open file of Group.memory_events."""
    for line in os.pread(events, 4096, 0).splitlines():
        if line.startswith(b"oom_kill "):
            return int(line.split()[1])
    return 0


def spare(pid: int) -> None:
    """Let the kernel choose it last when memory is short, or never, if we have CAP_SYS_RESOURCE: root may lack it."""
    with contextlib.suppress(PermissionError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("-1000")


def open_freezer(folder: Path, version: int) -> GroupFreezer:
    names = ("freezer.state", "freezer.state") if version == 1 else ("cgroup.freeze", "cgroup.events")
    write = os.open(folder / names[0], os.O_WRONLY | os.O_CLOEXEC)
    return GroupFreezer(write, os.open(folder / names[1], os.O_RDONLY | os.O_CLOEXEC), version)


def usable() -> Hierarchies | None:
    """The hierarchies of this machine, where this process may make groups.

    Root may, but in some containers. Others may where they were given some; systemd gives them to every user that it
    has a manager for.
    """
    if os.geteuid() != 0:
        _ask_systemd()
    with contextlib.suppress(OSError, Fatal):
        found = hierarchies()
        if all(os.access(parent, os.W_OK) for parent in found.parents.values()):
            return found
    return None


def hierarchies() -> Hierarchies:
    """The hierarchies of this machine, ready for groups below this process's own."""
    own: dict[str, Path] = {}
    tops: dict[str, tuple[str, Path]] = {}
    for kind, options, top, folder in _mounted():
        if kind == "cgroup2" and "memory" in (folder / "cgroup.controllers").read_text().split():
            parents = dict.fromkeys(_CONTROLLERS, _delegated(folder))
            return Hierarchies(2, parents, dict.fromkeys(_CONTROLLERS, top))
        for name in (name for name in _CONTROLLERS if name in options):
            own[name], tops[name] = folder, top
    missing = [name for name in _CONTROLLERS if name not in own]
    if missing:
        raise Fatal(f"no control group hierarchy for {', '.join(missing)}: mount cgroup2 on /sys/fs/cgroup")
    return Hierarchies(1, own, tops)


def _delegated(unified: Path) -> Path:
    """The top of version 2 as we see it, made ready to have children with limits, emptied if need be.

    Only the machine's own top group may hold processes beside limited children; a container's may not. For anybody
    but root it is our own group, and is emptied only if systemd has made it for us.
    """
    if unified.name == _REST:
        unified = unified.parent
    control = unified / "cgroup.subtree_control"
    wanted = "+memory +pids +cpu"
    if {"memory", "pids", "cpu"} <= set(control.read_text().split()):
        return unified
    try:
        _write(control, wanted)
    except OSError as error:
        if error.errno != errno.EBUSY or (os.geteuid() != 0 and not unified.name.startswith(_PREFIX)):
            raise Fatal(f"cannot enable limits in {control}: {error.strerror}") from error
        rest = unified / _REST
        rest.mkdir(exist_ok=True)
        for pid in (unified / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                _write(rest / "cgroup.procs", pid)
        _write(control, wanted)
    return unified


def _ask_systemd() -> None:
    """Have this process moved to a group that it may divide, as `systemd-run --user --scope` does with a new one.

    Nothing happens where there is no manager of this user, or under version 1, whose limits it does not give away.
    """
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nowhere")
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    if not unified or not (runtime / "systemd" / "private").exists() or shutil.which("busctl") is None:
        return
    unit = f"{_PREFIX}{owners.mark()}.scope"
    if unit in Path("/proc/self/cgroup").read_text():
        return
    properties = ["2", "PIDs", "au", "1", str(os.getpid()), "Delegate", "b", "true"]
    words = ["busctl", "--user", "call", *_MANAGER, "StartTransientUnit", "ssa(sv)a(sa(sv))", unit, "fail"]
    if subprocess.run([*words, *properties, "0"], capture_output=True).returncode != 0:
        return
    end = time.monotonic() + _ASKING
    while unit not in Path("/proc/self/cgroup").read_text() and time.monotonic() < end:
        time.sleep(0.005)


def _mounted() -> Iterator[tuple[str, list[str], tuple[str, Path], Path]]:
    """Mounted hierarchies: kind, controllers, part and place, and our own group's folder (the place for version 2)."""
    paths = _paths(Path("/proc/self/cgroup").read_text())
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ", 1)
        root, mount = left.split()[3:5]
        kind, _, options = right.split()[:3]
        if kind not in ("cgroup", "cgroup2"):
            continue
        controllers = options.split(",")
        ours = kind == "cgroup" or os.geteuid() != 0
        path = next((paths[name] for name in ([""] if kind == "cgroup2" else controllers) if name in paths), "/")
        own = Path(mount) / path.removeprefix(root).lstrip("/")
        yield kind, controllers, (root, Path(mount)), own if ours and own.is_dir() else Path(mount)


def _paths(text: str) -> dict[str, str]:
    """A process's groups by controller, from its /proc/PID/cgroup; that of version 2 has an empty name."""
    found = {}
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        found.update(dict.fromkeys(names.split(","), path))
    return found


def _remove_folder(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise
    return True


def _write(file: Path, value: object) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)
