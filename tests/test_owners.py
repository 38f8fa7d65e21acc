"""Whose things on this machine are: marks of processes that live, have ended, or cannot be known."""

import os
import subprocess
from pathlib import Path

import pytest

from justgoal import owners


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(owners, "runtime_folder", lambda: tmp_path)
    return tmp_path


def mark_of(pid: int) -> str:
    """As another process would write its own."""
    started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{Path('/proc/self/ns/pid').stat().st_ino}-{pid}-{started}"


def test_mark_of_this_process() -> None:
    assert owners.mark() == mark_of(os.getpid())
    assert not owners.dead(owners.mark())


def test_a_process_that_ends() -> None:
    """A zombie has ended too."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        mark = mark_of(process.pid)
        assert not owners.dead(mark)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert owners.dead(mark)
    assert owners.dead(mark)


def test_a_number_that_was_used_again() -> None:
    namespace, pid, started = owners.mark().split("-")
    assert owners.dead(f"{namespace}-{pid}-{int(started) - 1}")


@pytest.mark.parametrize("mark", ["", "x", "1-2", "1-2-3-4", "-1-2-3", "1-2-3\n"])
def test_no_mark(mark: str) -> None:
    assert not owners.dead(mark)


def test_another_namespace() -> None:
    namespace, _, _ = owners.mark().split("-")
    assert not owners.dead(f"{int(namespace) + 1}-999999999-1")
    assert owners.dead(f"{namespace}-999999999-1")


def test_folders_of_this_process(place: Path) -> None:
    one, two = owners.make_folder("gate"), owners.make_folder("gate")
    assert one != two and one.parent == two.parent == place / "owned" / owners.mark()
    assert one.stat().st_mode & 0o777 == 0o755
    (one / "file").touch()
    owners.remove_folder(one)
    assert [*one.parent.iterdir()] == [two]
    owners.remove_folder(two)
    assert [*(place / "owned").iterdir()] == []


def test_sweep(place: Path) -> None:
    """What belongs to dead processes goes; what belongs to others, or to nobody known, stays."""
    dead = f"{owners.mark().split('-')[0]}-999999999-1"
    mine = owners.make_folder("gate")
    for name in (f"owned/{dead}/gate-1", f"owned/{dead}/task-2/task", "owned/1-2-3/gate-4", "owned/notes"):
        (place / name).mkdir(parents=True)
    agents = place / "cpu" / "agents"
    agents.mkdir(parents=True)
    for name in (f"{dead}-7", f".{dead}-8", f"{owners.mark()}-7", "1-2"):
        (agents / name).touch()
    assert owners.sweep() == 2
    assert {path.name for path in (place / "owned").iterdir()} == {owners.mark(), "1-2-3", "notes"}
    assert mine.is_dir()
    assert {path.name for path in agents.iterdir()} == {f"{owners.mark()}-7", "1-2"}
    assert owners.sweep() == 0
