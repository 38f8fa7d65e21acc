"""One device of this host, which every run and every `justgoal evaluate` here shares: a lock, and a registry.

Whoever evaluates holds the lock, and while it does, every registered agent's sandbox is frozen: a busy
neighbour costs 2.3 % of spread on a GPU, a frozen one nothing (measured). The CPU is a device too.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from justgoal import owners
from justgoal.freezer import Freezer, find
from justgoal.owners import runtime_folder

_NUMBERS = count(1)


class Device:
    def __init__(self, name: str = "cpu") -> None:
        self._folder = runtime_folder() / name
        (self._folder / "agents").mkdir(parents=True, exist_ok=True)

    def register(self, freezer: Freezer) -> Path:
        """Tell everybody about an agent's sandbox; the returned entry is removed when the sandbox is closed."""
        entry = self._folder / "agents" / f"{owners.mark()}-{next(_NUMBERS)}"
        temporary = entry.with_name(f".{entry.name}")
        temporary.write_text(json.dumps(freezer.place()))
        temporary.rename(entry)
        return entry

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the device; all agents are frozen inside, and thawed afterwards.

        Thawing covers those too that a killed holder left frozen: only a holder of the lock may freeze.
        """
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        agents: list[Freezer] = []
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            agents = [freezer for entry in self._entries() if (freezer := _open(entry)) is not None]
            for freezer in agents:
                with suppress(OSError):  # its sandbox may be closed at any time
                    freezer.freeze()
            yield
        finally:
            for freezer in agents:
                with suppress(OSError):
                    freezer.thaw()
                freezer.close()
            os.close(lock)

    def release_stale(self, freezer: Freezer) -> None:
        """Thaw a sandbox that is frozen although nobody evaluates: the one who froze it was killed."""
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            freezer.thaw()
        except BlockingIOError:
            pass
        finally:
            os.close(lock)

    def _entries(self) -> list[Path]:
        return sorted(path for path in (self._folder / "agents").iterdir() if not path.name.startswith("."))


def _open(entry: Path) -> Freezer | None:
    """The freezer that an entry names; an entry whose sandbox is gone is removed."""
    try:
        return find(json.loads(entry.read_text()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        entry.unlink(missing_ok=True)
        return None
