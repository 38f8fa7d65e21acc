"""What runtimes leave behind that are killed at any moment, and that the next start or `justgoal clean` removes it."""

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from messages_server import MessagesServer, say, text, use
from solutions import HONEST, SCALE_ADD, group_of, processes

from justgoal import owners
from justgoal.sandboxes import (
    JUDGE_UID,
    UID,
    Engine,
    Limits,
    Spec,
    cgroups,
    daemon,
    engines,
    leftovers,
    mounts,
    staging,
)

pytestmark = pytest.mark.docker("slow")
PROGRAM = "from justgoal.cli import main; main()"
WRITE = f"mkdir -p solution\ncat > solution/solution.py <<'END'\n{HONEST}\nEND\nevaluate; evaluate"


def things(owned_by: list[int], engine: str) -> list[str]:
    """All that is on this machine of these runtimes: containers, control groups, folders, entries, half-built trees."""
    found = []
    for parent in set(cgroups.hierarchies().parents.values()):
        found += [f"group {path}" for path in parent.glob("justgoal-*") if int(path.name.split("-")[2]) in owned_by]
    folder = owners.runtime_folder()
    marked = [*(folder / "owned").glob("*"), *folder.glob("*/agents/*"), *folder.glob("*/agents/.*")]
    found += [f"file {path}" for path in marked if int(path.name.split("-")[1]) in owned_by]
    if engine == "docker":
        with closing(daemon.connect()) as client:
            for one in client.api.containers(all=True, filters={"label": daemon.OWNER}):
                if int(one["Labels"][daemon.OWNER].split("-")[1]) in owned_by:
                    found.append(f"container {one['Id']}")
    found += [f"file {path}" for path in staging.neutral_folder().glob("*/.building-*")]
    return found


def strays() -> list[str]:
    """Processes that run as the users of sandboxes, and are in none of a runtime that lives."""
    found = []
    for pid, _, command in processes():
        try:
            user = Path(f"/proc/{pid}").stat().st_uid
        except OSError:
            continue
        folder = group_of(pid, "memory")
        mark = folder.name.removeprefix("justgoal-").rpartition("-")[0] if folder else ""
        if command and user in (UID, JUDGE_UID) and (folder is None or owners.dead(mark)):
            found.append(f"{pid} {command}")
    return found


def kill_at_random(engine: str, folder: Path, times: int, longest: float) -> list[int]:
    """Start runs and kill each at a random moment of its first `longest` seconds; the numbers of their processes."""
    pids = []
    script = [say(text("."), use("toolu_1", command=WRITE), stop="tool_use") for _ in range(times * 3)]
    with MessagesServer(*script) as server:
        for number in range(times):
            words = ["run", str(SCALE_ADD), "--runs", str(folder), "--name", f"r{number}", "--engine", engine,
                     "--model", "m", "--base-url", server.url]  # fmt: skip
            environment = {**os.environ, "ANTHROPIC_API_KEY": "key", "NO_PROXY": "127.0.0.1"}
            with subprocess.Popen([sys.executable, "-c", PROGRAM, *words], env=environment, start_new_session=True,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:  # fmt: skip
                time.sleep(random.uniform(0.3, longest))
                os.killpg(process.pid, signal.SIGKILL)
            pids.append(process.pid)
    return pids


@pytest.mark.slow
def test_killed_at_random(engine: Engine, tmp_path: Path) -> None:
    """What all runtimes share is kept: this process uses it."""
    mounted = Path("/proc/self/mountinfo").read_text()
    pids = kill_at_random(engine.name, tmp_path, 3, 25.0)
    if engine.name == "docker":
        leftovers.clean()
    else:  # the next start
        engines.choose(engine.name).close()
    assert things(pids, engine.name) == []
    deadline = time.monotonic() + 10
    while strays() and time.monotonic() < deadline:
        time.sleep(0.05)  # a process that was killed takes a moment to go
    assert strays() == []
    assert Path("/proc/self/mountinfo").read_text() == mounted
    for link in tmp_path.glob("*/workspace"):
        link.unlink()
    leftovers.sweep()
    assert [note for note in workspaces().glob("*.run") if str(tmp_path) in note.read_text()] == []


def workspaces() -> Path:
    return staging.neutral_folder() / "workspaces"


# -------------------------------------------------------------------- justgoal clean


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A neutral folder of our own: what this machine has may be in use."""
    for module in (mounts, staging):
        monkeypatch.setattr(module, "neutral_folder", lambda: tmp_path / "neutral")
    return tmp_path / "neutral"


def test_what_is_staged_goes_when_nobody_uses_it(place: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    tree = mounts.stage_tree(tmp_path)
    (place / "stage" / ".building-x").mkdir(parents=True)
    program = f"""
import sys
from pathlib import Path
from justgoal.sandboxes import staging
staging.neutral_folder = lambda: Path({str(place)!r})
staging.use()
print(flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout and user.stdout.readline() == b"\n"
        assert leftovers.clean()[-1] == "staged packages: kept, somebody uses them"
        assert tree.is_dir()
        user.kill()
    assert leftovers.clean()[-1] == "staged packages: removed"
    assert not tree.exists() and not (place / "stage").exists()


def test_workspaces_of_removed_runs_go(place: Path, tmp_path: Path) -> None:
    folders = []
    for name in ("kept", "removed", "moved on"):
        run = tmp_path / name
        run.mkdir()
        folders.append(mounts.agent_folder(run, os.geteuid()))
        (folders[-1] / "outside").symlink_to(tmp_path)
    (tmp_path / "removed" / "workspace").unlink()
    (tmp_path / "moved on" / "workspace").unlink()
    mounts.agent_folder(tmp_path / "moved on", os.geteuid())
    assert mounts.sweep_workspaces() == 2
    assert [folder.exists() for folder in folders] == [True, False, False]
    assert (tmp_path / "kept").is_dir() and mounts.sweep_workspaces() == 0


def test_what_lives_is_left_alone(engine: Engine) -> None:
    """Another runtime's sweep takes nothing from a sandbox of ours, frozen or not."""
    spec = Spec("worker", ("/usr/bin/sleep", "1000"), Limits(128 << 20, 16, 1), UID)
    program = f"from justgoal.sandboxes import engines; engines.choose({engine.name!r})"
    with closing(engine.start(spec)) as thawed, closing(engine.start(spec)) as frozen:
        frozen.freezer.freeze()
        folder = owners.make_folder("test")
        subprocess.run([sys.executable, "-c", program], check=True)
        assert thawed.alive() and frozen.alive() and folder.is_dir() and frozen.freezer.frozen()
        owners.remove_folder(folder)


def test_lines(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(leftovers.Removed(2, 1, 0)) == "2 containers, 1 control group"
    assert str(leftovers.Removed(0, 0, 0)) == "nothing"
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    said = leftovers.clean()
    assert said[0].startswith("left by runs that were killed: ")
    assert said[1:] == ["no Docker Engine answers: containers were not looked for", "staged packages: removed"]


def test_the_lock_is_inherited_by_nobody(place: Path) -> None:
    lock = staging.use()
    assert fcntl.fcntl(lock, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(lock)
