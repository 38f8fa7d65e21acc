"""Control groups of sandboxes: limits on memory, processes and CPU, and the freezer; versions 1 and 2.

Every sandbox gets a group of its own (one folder per hierarchy under version 1), below the group that this
process is in under version 1, so that limits set on us hold for it too. Needs root. A group's name says which
process made it: what a killed runtime left behind is removed by the next one.
"""

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from justgoal.errors import Fatal
from justgoal.freezer import Freezer
from justgoal.sandboxes import Limits

_CONTROLLERS = ("memory", "pids", "cpu", "freezer")
_PERIOD = 100_000  # us
_NUMBERS = count(1)


@dataclass(frozen=True)
class Hierarchies:
    """Where groups are made: one parent folder per controller, the same one for all under version 2."""

    version: int
    parents: dict[str, Path]

    def group(self, limits: Limits) -> "Group":
        """Make a group with these limits; raises Fatal when the kernel does not let us."""
        group = self._named(f"{_prefix(os.getpid())}{next(_NUMBERS)}")
        try:
            for folder in group.unique():
                folder.mkdir()
            group.limit(limits)
        except OSError as error:
            group.remove()
            raise Fatal(f"cannot limit a sandbox in {error.filename}: {error.strerror}") from error
        return group

    def sweep(self) -> None:
        """Remove the groups of runtimes that no longer exist."""
        mine = f"justgoal-{_namespace()}-"
        names = {folder.name for parent in self.parents.values() for folder in parent.glob(f"{mine}*")}
        for name in names:
            owner = _prefix(int(name.removeprefix(mine).split("-")[0]))
            if not owner or not name.startswith(owner):
                self._named(name).remove()

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

    def freezer(self) -> Freezer:
        """Open the freezer; the caller closes it."""
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
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._thaw()
            if not self.pids() and all(_remove_folder(folder) for folder in reversed(self.unique())):
                return
            if time.monotonic() > deadline:
                raise Fatal(f"processes {sorted(self.pids())} of a sandbox do not end")
            time.sleep(0.001)

    def _thaw(self) -> None:
        """A frozen process keeps its SIGKILL until it is thawed."""
        if (folder := self.folders.get("freezer")) is not None and folder.exists():
            with contextlib.suppress(FileNotFoundError):
                if self.version == 1:
                    _write(folder / "freezer.state", "THAWED")
                else:
                    _write(folder / "cgroup.freeze", 0)


def memory_kills(events: int) -> int:
    """How many processes the kernel has killed for memory, from an open file of Group.memory_events."""
    for line in os.pread(events, 4096, 0).splitlines():
        if line.startswith(b"oom_kill "):
            return int(line.split()[1])
    return 0


def open_freezer(folder: Path, version: int) -> Freezer:
    names = ("freezer.state", "freezer.state") if version == 1 else ("cgroup.freeze", "cgroup.events")
    write = os.open(folder / names[0], os.O_WRONLY | os.O_CLOEXEC)
    return Freezer(write, os.open(folder / names[1], os.O_RDONLY | os.O_CLOEXEC), version)


def hierarchies() -> Hierarchies:
    """The hierarchies of this machine, ready for groups below this process's own."""
    own, unified = {}, None
    for kind, options, folder in _mounted():
        if kind == "cgroup2":
            unified = folder
        else:
            own.update({name: folder for name in _CONTROLLERS if name in options})
    if unified is not None and "memory" in (unified / "cgroup.controllers").read_text().split():
        return Hierarchies(2, dict.fromkeys(_CONTROLLERS, _delegated(unified)))
    missing = [name for name in _CONTROLLERS if name not in own]
    if missing:
        raise Fatal(f"no control group hierarchy for {', '.join(missing)}: mount cgroup2 on /sys/fs/cgroup")
    return Hierarchies(1, own)


def _delegated(unified: Path) -> Path:
    """The top of version 2 as we see it, made ready to have children with limits, emptied if need be.

    Only the machine's own top group may hold processes beside limited children; a container's may not.
    """
    control = unified / "cgroup.subtree_control"
    wanted = "+memory +pids +cpu"
    if {"memory", "pids", "cpu"} <= set(control.read_text().split()):
        return unified
    try:
        _write(control, wanted)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise Fatal(f"cannot enable limits in {control}: {error.strerror}") from error
        rest = unified / "justgoal-host"
        rest.mkdir(exist_ok=True)
        for pid in (unified / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                _write(rest / "cgroup.procs", pid)
        _write(control, wanted)
    return unified


def _mounted() -> Iterator[tuple[str, list[str], Path]]:
    """Mounted hierarchies: kind, controllers, and our own group's folder (its top for version 2)."""
    paths = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        paths.update(dict.fromkeys(names.split(","), path))
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ", 1)
        root, mount = left.split()[3:5]
        kind, _, options = right.split()[:3]
        if kind not in ("cgroup", "cgroup2"):
            continue
        controllers = options.split(",")
        path = next((paths[name] for name in controllers if name in paths), "/")
        own = Path(mount) / path.removeprefix(root).lstrip("/")
        yield kind, controllers, own if kind == "cgroup" and own.is_dir() else Path(mount)


def _prefix(pid: int) -> str:
    """The beginning of the names of a process's groups; empty when there is no such process."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return f"justgoal-{_namespace()}-{pid}-{started}-"


def _namespace() -> int:
    """Our process namespace: numbers of processes mean nothing outside it."""
    return Path("/proc/self/ns/pid").stat().st_ino


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
