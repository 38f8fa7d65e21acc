"""Solutions on the CPU: sealed memory files, and nothing but the judge's clock (see clock.py)."""

from collections.abc import Sequence
from typing import Any

from justgoal.evaluation import clock
from justgoal.evaluation.devices import Reading, subtracted
from justgoal.evaluation.memory import Field
from justgoal.evaluation.workers import Worker, Workers


class CpuHardware:
    worker = Worker

    def __init__(self, threads: int) -> None:
        self.flush = clock.Flush(threads)

    def blank(self, workers: Workers, tree: int) -> Worker:
        seconds = [Field("seconds", "float64", (1,))]
        return Workers(workers.runtime, seconds, seconds, workers.threads).start([tree])[0]

    def resident(self, inputs: Sequence[Any]) -> Sequence[Any]:
        return inputs

    def warm_up(self, blank: Worker) -> None:
        clock.warm_up(blank)

    def cost(self, blank: Worker, seconds: float) -> Reading:
        window = clock.cost(blank, seconds)
        return Reading(window, window)

    def read(self, worker: Worker, window: float) -> Reading:
        return Reading(window, window)

    def settle(self, readings: Sequence[Reading], costs: Sequence[Reading]) -> list[float]:
        return subtracted(readings, costs)
