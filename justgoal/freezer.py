"""Freezing a sandbox through its cgroup, from open descriptors alone.

The runtime opens the files and may hand the descriptors to the judge, who then needs neither a path nor root
(the kernel checks permissions when the file is opened).
"""

import errno
import os
import time
from dataclasses import dataclass

NAP = 5e-6  # s; the kernel adds its timer slack


@dataclass(frozen=True)
class Freezer:
    """One cgroup's freezer. `version` 1: freezer.state for both; 2: cgroup.freeze is written, cgroup.events read."""

    write_fd: int
    read_fd: int
    version: int

    def order(self, frozen: bool) -> None:
        """Ask the kernel; returns at once, the sandbox follows within about 0.1 ms."""
        thawed, freezing = (b"THAWED", b"FROZEN") if self.version == 1 else (b"0", b"1")
        try:
            os.pwrite(self.write_fd, freezing if frozen else thawed, 0)
        except OSError as error:
            if error.errno != errno.ENODEV:  # the group is gone with its last process, as a container's is
                raise

    def frozen(self) -> bool:
        return self._says() is True

    def freeze(self) -> None:
        """Freeze, and return when every task in the cgroup is frozen, or gone.

        Sleeps between reads. Spinning keeps the tasks that are to be frozen off their cores (4.7 ms, measured), and so
        does yielding: after a call of 10 ms the scheduler lets the one who yields go first for another 1 ms (measured).
        """
        self.order(True)
        while self._says() is False:
            time.sleep(NAP)

    def _says(self) -> bool | None:
        """Whether it is frozen; None when there is no such group any more."""
        try:
            state = os.pread(self.read_fd, 256, 0)
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
            return None
        return state.startswith(b"FROZEN") if self.version == 1 else b"frozen 1" in state

    def thaw(self) -> None:
        self.order(False)

    def close(self) -> None:
        for descriptor in {self.write_fd, self.read_fd}:
            os.close(descriptor)
