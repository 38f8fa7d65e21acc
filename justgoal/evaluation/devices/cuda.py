"""Solutions on a CUDA device: the device's time behind a gate that the judge opens, borne out by the judge's clock.

A window: inputs are written, masked under a fresh key, and caches flushed while the worker is frozen; the doorbell is
rung, and the worker enqueues a gate, the unmasking, the whole call and a checksum of the outputs under another key.
When it has said so, or after ISSUE_LIMIT, the clock starts, and the gate is opened with both keys: nothing that depends
on the inputs can have happened before. The clock stops when the device has written the checksum into the judge's page,
for which no process has to wake up. It must be that of the outputs that the judge then finds, so they were final by
then. The window of a blank that spins on the device for about as long is subtracted.

The worker's events repeat better than the judge's clock, so they are the figure; a solution whose windows are longer
than its events say by more than the clock's tolerance is refused.
"""

import fcntl
import mmap
import os
import secrets
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from typing import Any

import torch

from justgoal.evaluation.clock import WARM_SECONDS, CallFailed
from justgoal.evaluation.devices import Reading, subtracted
from justgoal.evaluation.devices.cuda_driver import FINISHED, KEY, OPENED, SCALARS, SUM, SUM_KEY, Cuda
from justgoal.evaluation.devices.cuda_worker import ANSWER, ISSUED, PAGE
from justgoal.evaluation.memory import F_ADD_SEALS, SEALED_SIZE, Field, arrange
from justgoal.evaluation.worker import OK, tensors
from justgoal.evaluation.workers import Worker, Workers
from justgoal.freezer import Freezer

ISSUE_LIMIT = 0.02
"""Seconds after which a gate opens although the call is not enqueued: one that waits for the device needs that."""
SETTLED = 0.001
"""Seconds after the thaw before which no gate opens: the threads of the worker wake up one after the other."""
TOLERANCE = 10e-6, 0.005
"""By how much windows may be longer than events say: seconds, and a share of what they say."""
BLANK_LIMIT = 5.0
POLLS, GLANCE = 200, 1e-6
"""How often the judge looks at its page before it looks at the channel, and for how many seconds it looks there."""
FLUSHED = 4
"""How many times the size of the shared cache is written to flush it."""


class CudaBlock:
    """Memory of the judge on the device; see Block. What workers only read is masked, `key` being that of its contents.

    `scalars` are those of what was written, which a worker gets as numbers: reading them from the device would wait.
    """

    cuda: Cuda

    def __init__(self, fields: Sequence[Field], *, writable_by_worker: bool) -> None:
        self.layout, self.length = arrange(fields)
        self._shared = self.cuda.create(self.length)
        self.descriptor, self.size = self._shared.descriptor, self._shared.size
        self._masked = not writable_by_worker
        self._bytes = (
            torch.zeros(self.length, dtype=torch.uint8, device="cuda") if self._masked else self._shared.bytes()
        )
        self._views = tensors(self._bytes, self.layout)
        self.key = bytes(32)
        self.scalars: list[tuple[int, bytes]] = []

    def write(self, values: Sequence[Any]) -> None:
        self.scalars = []
        for index, (view, value, item) in enumerate(zip(self._views, values, self.layout, strict=True)):
            view.copy_(value) if isinstance(value, torch.Tensor) else view.fill_(value)
            if item["scalar"]:
                wide = torch.float64 if view.is_floating_point() else torch.int64
                self.scalars.append((index, view.cpu().to(wide).numpy().tobytes()))
        self.key = secrets.token_bytes(32)
        key = torch.frombuffer(bytearray(self.key), dtype=torch.int64).cuda()
        self.cuda.mask(self._bytes.data_ptr(), self._shared.address, self.length, key)
        torch.cuda.synchronize()

    def poison(self) -> None:
        self._bytes.fill_(0xFF)
        torch.cuda.synchronize()

    def read(self) -> list[torch.Tensor]:
        return [view.cpu() for view in self._views]

    def checksum(self, key: int) -> int:
        """As the device would write it."""
        keys = torch.frombuffer(bytearray(struct.pack("<4QQ", 0, 0, 0, 0, key)), dtype=torch.int64).cuda()
        state, page = (torch.zeros(PAGE // 8, dtype=torch.int64, device="cuda") for _ in range(2))
        self.cuda.checksum(self._shared.address, self.length, keys, state, page.data_ptr(), 0)
        return int(page[SUM].item()) & (1 << 64) - 1

    def close(self) -> None:
        del self._bytes, self._views
        torch.cuda.synchronize()
        self._shared.close()
        os.close(self.descriptor)


class CudaWorker(Worker):
    """`claimed`: seconds of the device for the last call, by the worker's own account."""

    block = CudaBlock
    inputs: CudaBlock
    outputs: CudaBlock

    def __init__(self, workers: Workers, number: int, freezer: Freezer, channel: int, pipe: int | None = None) -> None:
        super().__init__(workers, number, freezer, channel, pipe)
        self._page_file = os.memfd_create("page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._page_file, PAGE)
        fcntl.fcntl(self._page_file, F_ADD_SEALS, SEALED_SIZE)
        self._page = mmap.mmap(self._page_file, PAGE)
        self._words = memoryview(self._page).cast("Q")
        self._calls = 0
        self._heard: list[bytes] = []
        self.claimed = 0.0

    def messages(self) -> tuple[dict[str, Any], list[int]]:
        message, descriptors = super().messages()
        sizes = {
            "input_size": self.inputs.size,
            "input_bytes": self.inputs.length,
            "output_size": self.outputs.size,
            "output_bytes": self.outputs.length,
        }
        return {**message, **sizes}, [*descriptors, self._page_file]

    def call(self, limit: float) -> float:
        self._calls += 1
        key = secrets.randbits(64)
        for index, value in self.inputs.scalars:
            self._page[8 * (SCALARS + index) : 8 * (SCALARS + index) + 8] = value
        self._ring()
        self.freezer.order(False)
        settled = time.perf_counter() + SETTLED
        self._heard = []
        try:
            self._hear(ISSUE_LIMIT)
            while time.perf_counter() < settled:
                pass
            start = time.perf_counter_ns()
            self._page[8 * KEY : 8 * KEY + 32] = self.inputs.key
            self._words[SUM_KEY] = key
            self._words[OPENED] = self._calls
            found = self._finished(limit)
            end = time.perf_counter_ns()
            while len(self._heard) < 2:
                if not self._hear(limit):
                    raise CallFailed("timeout", f"a call had not ended after {limit:g} s")
        finally:
            self.freezer.freeze()
        if found != self.outputs.checksum(key):
            raise CallFailed("wrong", "its outputs changed after it had said that they were complete")
        self.claimed = ANSWER.unpack(self._heard[1])[1]
        if not 0 <= self.claimed < float("inf"):
            raise CallFailed("wrong", "the device's time that it reports is no time")
        return (end - start) * 1e-9

    def _finished(self, limit: float) -> int:
        """Wait for the device; the checksum that it has written. What comes later than this word does not count."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            for _ in range(POLLS):
                if self._words[FINISHED] == self._calls:
                    return self._words[SUM]
            self._hear(GLANCE)
        raise CallFailed("timeout", f"a call had not ended after {limit:g} s")

    def _hear(self, limit: float) -> bool:
        """Whether the worker said something within `limit` seconds; CallFailed when that is not what comes next."""
        said, late = self._spun(limit)
        if late:
            return False
        answered = len(self._heard) == 1 and len(said) == ANSWER.size and said.startswith(OK)
        if not answered and (self._heard or said != ISSUED):
            raise self.failed(said)
        self._heard.append(said)
        return True

    def _spun(self, limit: float) -> tuple[bytes, bool]:
        """As `answer`, without sleeping: a wake-up takes as long as a kernel. A build may take its time."""
        if self._pipe is not None:
            return self.answer(max(limit, 0.001))
        end = time.monotonic() + limit
        while True:
            try:
                return self.channel.recv(4096, socket.MSG_DONTWAIT), False
            except BlockingIOError:
                if time.monotonic() > end:
                    return b"", True
            except ConnectionError:
                return b"", False

    def close(self) -> None:
        super().close()
        self._words.release()
        self._page.close()
        os.close(self._page_file)


class CudaHardware:
    worker = CudaWorker

    def __init__(self) -> None:
        self._empty = 0.0
        CudaBlock.cuda = Cuda()
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        self._scratch = torch.zeros(FLUSHED * cache, dtype=torch.uint8, device="cuda")

    def blank(self, workers: Workers, tree: int) -> Worker:
        """With the memory of the workload, whose unmasking and summing up is part of every window, and its length."""
        arguments = [*workers.arguments, Field("seconds", "float64", (1,), scalar=True)]
        return Workers(workers.runtime, arguments, workers.outputs, workers.threads, CudaWorker).start([tree])[0]

    def resident(self, inputs: Sequence[Any]) -> Sequence[Any]:
        return [value.cuda() if isinstance(value, torch.Tensor) else value for value in inputs]

    def flush(self) -> None:
        self._scratch.add_(1)
        torch.cuda.synchronize()

    def warm_up(self, blank: Worker) -> None:
        """They also say how far two events are apart with nothing between them."""
        end = time.monotonic() + WARM_SECONDS
        claimed = []
        while time.monotonic() < end:
            claimed.append(self._call(blank, 0.0).seconds)
        self._empty = statistics.median(claimed)

    def cost(self, blank: Worker, seconds: float) -> Reading:
        reading = self._call(blank, seconds)
        return Reading(self._empty, reading.window - (reading.seconds - self._empty))

    def _call(self, blank: Worker, seconds: float) -> Reading:
        assert isinstance(blank, CudaWorker)
        blank.inputs.scalars = [(len(blank.inputs.layout) - 1, struct.pack("<d", seconds))]
        return self.read(blank, blank.call(BLANK_LIMIT))

    def read(self, worker: Worker, window: float) -> Reading:
        assert isinstance(worker, CudaWorker)
        return Reading(worker.claimed, window)

    def settle(self, readings: Sequence[Reading], costs: Sequence[Reading]) -> list[float]:
        own = statistics.median(reading.window - reading.seconds for reading in readings)
        hidden = own - statistics.median(cost.window - cost.seconds for cost in costs)
        claimed = statistics.median(reading.seconds for reading in readings)
        if hidden > TOLERANCE[0] + TOLERANCE[1] * claimed:
            raise CallFailed(
                "wrong", f"by the judge's clock a call takes {hidden * 1e6:.0f} us longer than its events say"
            )
        return subtracted(readings, costs)
