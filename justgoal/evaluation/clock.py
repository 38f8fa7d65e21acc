"""The judge's clock: how long one call of a frozen worker takes, and nothing that the worker says about it.

A window: inputs are written and caches flushed while the worker is frozen, the doorbell is rung, and only then does
the clock start, with the thaw; it stops when the worker has answered and is frozen again. So the inputs do not exist
for the worker before its window, and what is in the output memory at its end is final.
"""

import builtins
import gc
import json
import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from justgoal.evaluation.memory import Memory
from justgoal.evaluation.worker import CALL, OK
from justgoal.freezer import Freezer, timer_slack

WARM_SECONDS = 0.1


class CallFailed(Exception):
    """A call did not end with an answer of the expected form; `kind` is a verdict's kind.

    `detail` is empty when the process has ended, which only whoever started it can explain. `line` is a line of the
    solution, by the worker's own account.
    """

    def __init__(self, kind: str, detail: str, line: int | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.line = line


def private_cache_bytes() -> int:
    """Size of the largest cache that one core has for itself, 1 MiB where the kernel does not tell."""
    sizes = [
        int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")
        if (path / "level").read_text().strip() in ("1", "2")
        and (text := (path / "size").read_text().strip())[-1:] in ("K", "M")
    ]
    return max(sizes, default=1 << 20)


class Flush:
    """Evicts what the last party left in the private caches, by passing over twice their size on every core.

    The shared cache is left alone: flushing it as well takes the interpreter's own code with it, which added 100 us
    of noise to a call and 66 us of error to one of 0.2 ms (measured). What a party has there is as old as the turns of
    all others, and the inputs are as warm for everybody as writing them makes them.
    """

    def __init__(self, cores: int) -> None:
        self._buffer = torch.zeros(2 * cores * private_cache_bytes() // 4, dtype=torch.float32)

    def __call__(self) -> None:
        self._buffer.add_(1.0)


class Party:
    """Whoever is being timed: one worker, its memory, and its freezer. Frozen whenever no window is open on it."""

    def __init__(self, channel: socket.socket, freezer: Freezer, inputs: Memory, outputs: Memory) -> None:
        self.channel = channel
        self.freezer = freezer
        self.inputs = inputs
        self.outputs = outputs

    def setup(self, tree: int, threads: int) -> None:
        """Hand over the tree (a descriptor of a tar file) and the memory; the worker begins to import."""
        message, descriptors = self.messages()
        socket.send_fds(self.channel, [json.dumps({**message, "threads": threads}).encode()], [tree, *descriptors])

    def messages(self) -> tuple[dict[str, Any], list[int]]:
        """What the worker is told of the memory, and the descriptors of it."""
        message = {"arguments": self.inputs.layout, "outputs": self.outputs.layout}
        return message, [self.inputs.descriptor, self.outputs.descriptor]

    def imported(self, limit: float) -> None:
        """Wait until the solution is imported, and freeze.

        Raises CallFailed: "build" when importing fails, "timeout" after `limit` seconds.
        """
        answer, late = self.answer(limit)
        self.freezer.freeze()
        if late:
            raise CallFailed("timeout", f"importing had not ended after {limit:g} s")
        if answer != OK:
            failure = self.failed(answer)
            raise CallFailed("build", failure.detail, failure.line)

    def call(self, limit: float) -> float:
        """One call on what the input memory holds; seconds of the judge's clock, the window's own cost included."""
        self._ring()
        start = time.perf_counter_ns()
        self.freezer.order(False)
        answer, late = self.answer(limit)
        self.freezer.freeze()
        end = time.perf_counter_ns()
        if late:
            raise CallFailed("timeout", f"a call had not ended after {limit:g} s")
        if answer != OK:
            raise self.failed(answer)
        return (end - start) * 1e-9

    def answer(self, limit: float) -> tuple[bytes, bool]:
        """One packet from the worker (nothing when it has ended), and whether none came within `limit` seconds."""
        ready, _, _ = select.select([self.channel], [], [], limit)
        return (self._packet(), False) if ready else (b"", True)

    def failed(self, answer: bytes) -> CallFailed:
        """What a failed answer means. A worker that has seen hidden inputs can only choose among fixed words."""
        if not answer:
            return CallFailed("crash", "")
        try:
            report = json.loads(answer)
            stage, name, line = report["failed"], report.get("type"), report.get("line")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return CallFailed("crash", "the worker's answer has no known form")
        if stage == "structure":
            return CallFailed("wrong", self.structure(report))
        known = getattr(builtins, name, None) if isinstance(name, str) else None
        is_exception = isinstance(known, type) and issubclass(known, BaseException)
        return CallFailed("crash", name if is_exception else "an exception", line if type(line) is int else None)

    def structure(self, report: dict[str, Any]) -> str:
        return "it returned another number, type, dtype or shape of outputs than on public inputs"

    def _packet(self) -> bytes:
        try:
            return self.channel.recv(4096)
        except ConnectionError:
            return b""

    def _ring(self) -> None:
        """The doorbell, while the worker is frozen; what it says before has not been asked for."""
        ready, _, _ = select.select([self.channel], [], [], 0)
        if ready and self._packet():
            raise CallFailed("crash", "the worker answered before it was asked")
        try:
            self.channel.send(CALL)
        except OSError as error:
            raise CallFailed("crash", "") from error

    def close(self) -> None:
        self.channel.close()
        self.freezer.close()
        self.inputs.close()
        self.outputs.close()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Windows are open inside: the judge collects no garbage, stays on the first core, sleeps no longer than it says.

    The kernel would add up to 50 us to each sleep, and waiting for a freeze then took 25 or 90 us (measured).
    """
    cores = os.sched_getaffinity(0)
    gc.collect()
    gc.disable()
    os.sched_setaffinity(0, {min(cores)})
    timer_slack(1)
    try:
        yield
    finally:
        timer_slack(0)
        os.sched_setaffinity(0, cores)
        gc.enable()


def cost(blank: Party, seconds: float = 0.0) -> float:
    """Seconds that a window takes around a call of `seconds`: that of `blank`, who runs blank.py.

    It depends on how long the call takes: after 10 ms the judge's and the worker's own code has left the caches, and
    the same window takes 70 to 150 us longer (measured).
    """
    blank.inputs.write([torch.tensor([seconds], dtype=torch.float64)])
    took = blank.call(1.0 + seconds)
    return took - blank.outputs.read()[0].item()


def warm_up(blank: Party) -> None:
    """Open some windows: after a pause the first ones are up to 100 us longer (measured)."""
    end = time.monotonic() + WARM_SECONDS
    while time.monotonic() < end:
        cost(blank)
