"""Sandboxes that are frozen by signals: run as somebody who is not root and has no control group (test_somebody.py)."""

import json
import os
from contextlib import closing
from pathlib import Path

import pytest
from test_sandbox import COUNT, Start, moves, printed, start

from justgoal import freezer, owners
from justgoal.errors import Fatal
from justgoal.freezer import RemoteFreezer, SignalFreezer, received
from justgoal.sandboxes import JUDGE_UID, UID, Engine, staging

__all__ = ["start"]

WAKING = """
import ctypes, fcntl, signal, socket, subprocess
channel = socket.socket(fileno=3)
libc = ctypes.CDLL(None, use_errno=True)
event = (ctypes.c_int * 16)(0, 0, signal.SIGCONT, 0)
libc.syscall(222, 1, event, ctypes.byref(ctypes.c_int()))
print(ctypes.get_errno())
try:
    fcntl.fcntl(channel, 10, signal.SIGCONT)
except OSError as error:
    print(error.errno)
print(fcntl.fcntl(channel, fcntl.F_GETFL) & 2, subprocess.run(["timeout", "0.2", "sleep", "5"]).returncode)
"""


def test_engine(engine: Engine) -> None:
    """Nothing here can limit a sandbox as a whole, and the user inside is the one outside."""
    assert not engine.limited
    assert JUDGE_UID == UID == os.geteuid() != 0


def test_nobody_can_have_himself_woken_up(start: Start) -> None:
    """Neither by a timer (ENOSYS) nor by what comes over a socket (EPERM); `timeout` does without."""
    assert printed(start(WAKING)) == "38\n1\n2 124\n"


def test_handed_over(start: Start) -> None:
    """The judge's end gives orders, as does whoever started the sandbox."""
    sandbox = start(COUNT)
    sandbox.channel.recv(1)
    remote = received(sandbox.freezer.kind, [os.dup(number) for number in sandbox.freezer.descriptors])
    assert isinstance(sandbox.freezer, SignalFreezer) and isinstance(remote, RemoteFreezer)
    with closing(remote):
        assert not remote.frozen() and moves(sandbox)
        remote.freeze()
        assert remote.frozen() and sandbox.freezer.frozen() and not moves(sandbox)
        remote.thaw()
        assert moves(sandbox) and not remote.frozen()
        remote.order(True)
        assert not moves(sandbox)
        sandbox.close()
        remote.freeze()  # what is gone can be told to freeze, and to thaw, at no one's cost
        remote.thaw()
        assert not remote.frozen()


def test_only_a_namespace_of_its_own(start: Start) -> None:
    """Our own processes cannot be taken for a sandbox's: they would all be stopped."""
    with pytest.raises(ProcessLookupError, match=r"^process \d+ has no /proc of its own namespace$"):
        SignalFreezer(os.getpid())


def test_found_by_its_place(start: Start) -> None:
    """Not when the number belongs to another process by now."""
    sandbox = start("import time; time.sleep(1000)")
    place = json.loads(json.dumps(sandbox.freezer.place()))
    freezer.find(place).close()
    with pytest.raises(ProcessLookupError, match=rf"^process {place['process']} is another one$"):
        freezer.find({**place, "started": place["started"] - 1})
    sandbox.close()
    with pytest.raises(OSError):
        freezer.find(place)


def test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where this user's runtimes meet, and what sandboxes are made of: at paths that say no more than a number."""
    assert owners.runtime_folder() == Path(os.environ["XDG_RUNTIME_DIR"]) / "justgoal"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert owners.runtime_folder() == Path(f"/tmp/justgoal-{UID}")
    assert staging.neutral_folder() == Path(f"/var/tmp/justgoal-{UID}")
    assert owners.private_folder(tmp_path).stat().st_mode & 0o777 == 0o700
    (tmp_path / f"justgoal-{UID}").chmod(0o777)
    with pytest.raises(Fatal, match=rf"^{tmp_path}/justgoal-{UID} is not yours alone: remove it, or have it removed$"):
        owners.private_folder(tmp_path)
    Path(f"/tmp/justgoal-{UID}").rmdir()
