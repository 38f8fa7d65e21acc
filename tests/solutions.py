"""Solutions of the tiny operator scale_add, honest and not, and what a test needs to look at those who judge them.

Not a test itself.
"""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from textwrap import dedent

import docker

from justgoal.evaluation.collect import Solution
from justgoal.sandboxes import daemon

SCALE_ADD = Path(__file__).parent / "operators" / "scale_add"
CHECKED = 3 + 4
"""Calls of a fresh process before its first timed one: the edge cases of scale_add, and the random draws."""
BUILDING = 2
"""Calls of a process that builds."""

HONEST = """
def run(x, y, alpha):
    out = alpha * x + y
    return out, out.sum(1)
"""

AFTER = """
calls = 0

def run(x, y, alpha):
    global calls
    calls += 1
    out = alpha * x + y
    total = out.sum(1)
    if calls > {calls}:
        {action}
    return out, total
"""
"""Honest in the first `calls` calls of a process; then it does something else as well."""

SECRET = """
import ctypes, os, signal, socket, sys, torch

def run(x, y, alpha):
    out = alpha * x + y
    total = out.sum(1)
    if alpha > 100:
        print("LEAK", x[0, :4].tolist(), flush=True)
        print("LEAK", x[0, :4].tolist(), file=sys.stderr, flush=True)
        {action}
    return out, total
"""
"""Honest on public inputs. Of the hidden ones a large alpha gives itself away, and the first thing it does is to
print what nobody may be told."""
SECRET_LINE = 10
"""The line of `action` in SECRET."""


def sleeping(seconds: float, note: str = "") -> str:
    """An honest solution whose time is a matter of the clock alone, however busy the machine is."""
    return f"import time\n{HONEST.replace('    out =', f'    time.sleep({seconds})  # {note}' + chr(10) + '    out =')}"


def after(calls: int, action: str) -> str:
    return AFTER.format(calls=calls, action=action)


def on_hidden_inputs(action: str) -> str:
    return SECRET.format(action=action)


def solution(text: str, **others: str) -> Solution:
    """A solution of this solution.py, and other files by name (`kernel_cpp` is kernel.cpp)."""
    files = {name.replace("_", "."): content.encode() for name, content in others.items()}
    return Solution({"solution.py": dedent(text).encode(), **files})


def processes() -> Iterator[tuple[int, int, str]]:
    """All processes: number, parent's number, command line."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            yield int(folder.name), parent, command


def containers(pid: int) -> set[int]:
    """First processes of the containers that a process has started."""
    if not Path("/var/run/docker.sock").exists():
        return set()
    with closing(docker.DockerClient()) as client:
        found = client.api.containers(filters={"label": daemon.OWNER})
        ours = [one["Id"] for one in found if one["Labels"][daemon.OWNER].split("-")[1] == str(pid)]
        return {first_process(client, one) for one in ours} - {0}


def first_process(client: docker.DockerClient, container: str) -> int:
    try:
        return int(client.api.inspect_container(container)["State"]["Pid"])
    except docker.errors.NotFound:
        return 0


def group_of(pid: int, controller: str) -> Path | None:
    """The folder of a sandboxed process's control group; None when it is in none, or gone."""
    try:
        lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in lines:
        for root in (Path("/sys/fs/cgroup") / controller, Path("/sys/fs/cgroup")):
            folder = root / path.lstrip("/")
            if controllers in (controller, "") and (folder / "cgroup.procs").exists() and folder != root:
                return folder if "justgoal-" in path or "docker" in path else None
    return None


def descendants(pid: int | None = None) -> dict[int, str]:
    """Command lines of all that this process (or that one) has started, and what they have started, by number.

    What the Docker Engine has started for it counts too.
    """
    first = containers(os.getpid() if pid is None else pid)
    wanted = {os.getpid() if pid is None else pid} | first
    everything = list(processes())
    while True:
        more = {number for number, parent, _ in everything if parent in wanted} - wanted
        if not more:
            break
        wanted |= more
    return {number: command for number, parent, command in everything if parent in wanted or number in first}


def descriptors(pid: int | str = "self") -> list[str]:
    """Open ones of a process, by number; our own listing of them is not among them."""
    return sorted(path.name for path in Path(f"/proc/{pid}/fd").iterdir() if path.exists() or path.is_symlink())


def judges(pid: int | None = None) -> list[int]:
    """The judges that this process (or that one) has started."""
    return [
        number for number, command in descendants(pid).items()
        if command.startswith("/opt/venv/bin/python") and "justgoal.evaluation.service" in command
    ]  # fmt: skip
