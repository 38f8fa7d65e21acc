"""What an agent writes to this machine's disk: watched from outside, since a mounted folder has no size of its own.

A sandbox that has written too much is frozen at once, also while nobody waits for it: the model is told with the next
call (shell.py). What is in memory, /tmp and /dev/shm, the kernel limits by itself.
"""

import subprocess
import threading
import time
from pathlib import Path

from justgoal.freezer import Freezer

_EVERY = 1.0  # s between looks, ten times what a look takes if that is more
_SLICE = 0.05  # s


class DiskWatch:
    """Looks at `folder` now and then; once it holds more than `limit` bytes, `exceeded` is set and `freezer` frozen.

    `relieve` says that whoever wrote was killed: what is left may stay then, and may not become more.
    """

    def __init__(self, folder: Path, limit: int, freezer: Freezer) -> None:
        self.exceeded = threading.Event()
        self._folder = folder
        self._limit = limit
        self._freezer = freezer
        self._allowed: int | None = limit
        self._lock = threading.Lock()  # so that nothing is frozen after relief
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "DiskWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """The freezer may be closed from now on."""
        self._closed.set()
        self._thread.join()

    def relieve(self) -> None:
        with self._lock:
            self._allowed = None
            self.exceeded.clear()
            self._freezer.thaw()

    def _watch(self) -> None:
        pause = _EVERY
        while not self._closed.wait(pause):
            began = time.monotonic()
            used = self._used()
            pause = max(_EVERY, 10 * (time.monotonic() - began))
            with self._lock:
                if used is not None:
                    self._compare(used)
                if self.exceeded.is_set():  # again and again: whoever holds the device thaws everything afterwards
                    self._freezer.order(True)

    def _compare(self, used: int) -> None:
        if self._allowed is not None and used > self._allowed:
            self.exceeded.set()
        else:
            self._allowed = max(self._limit, used)

    def _used(self) -> int | None:
        """Bytes in the folder, by a program that follows no links and fears no depth; None while the sandbox is frozen,
        when nothing changes and others may be measuring."""
        if self._freezer.frozen():
            return None
        words = ["du", "--summarize", "--one-file-system", "--block-size=1", "--", str(self._folder)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            while process.poll() is None and not self._closed.wait(_SLICE):
                if self._freezer.frozen():
                    break
            process.kill()
            said = process.communicate()[0].partition("\t")[0]
        return int(said) if said.isdigit() else None
