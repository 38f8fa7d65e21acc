"""What the judge needs of the hardware that solutions run on. A new kind is a module here and a line in `of`.

A kind brings the memory that crosses the border and the window of a call (`worker`), what is done between windows, and
what a figure is: on a CPU the judge's clock alone, on a GPU the device's time as far as the judge's clock bears it out.
"""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from justgoal.evaluation.workers import Worker, Workers


class Reading(NamedTuple):
    """One timed call: what is claimed for it, and how long the judge's window was. Seconds."""

    seconds: float
    window: float


class Hardware(Protocol):
    @property
    def worker(self) -> type[Worker]:
        """The judge's end of a worker: its memory, and how a window is opened on it."""

    def blank(self, workers: Workers, tree: int) -> Worker:
        """Start the party that does nothing, from the tree of blank.py or its like; it is still to be imported."""

    def resident(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """The same where writing them is quickest: each is written once for every party."""

    def flush(self) -> None:
        """Evict what the last party left in the caches; everybody is frozen meanwhile."""

    def warm_up(self, blank: Worker) -> None:
        """Open some windows after a pause."""

    def cost(self, blank: Worker, seconds: float) -> Reading:
        """What a window takes, and claims, around a call of about `seconds`."""

    def read(self, worker: Worker, window: float) -> Reading:
        """The reading of the call that has just ended on `worker`."""

    def settle(self, readings: Sequence[Reading], costs: Sequence[Reading]) -> list[float]:
        """Seconds of each call, the cost of a window subtracted; CallFailed when the readings belie each other."""


def subtracted(readings: Sequence[Reading], costs: Sequence[Reading]) -> list[float]:
    """Seconds of each call without what a window costs at the median."""
    cost = statistics.median(cost.seconds for cost in costs)
    return [max(reading.seconds - cost, 1e-9) for reading in readings]


def of(name: str, threads: int) -> Hardware:
    """The kind that a workload's device names; only the one that is asked for is imported."""
    if name == "cuda":
        from justgoal.evaluation.devices.cuda import CudaHardware

        return CudaHardware()
    from justgoal.evaluation.devices.cpu import CpuHardware

    return CpuHardware(threads)
