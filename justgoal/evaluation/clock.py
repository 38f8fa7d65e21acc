"""The judge's clock: how long one call of a frozen worker takes, and nothing that the worker says about it.

A window: inputs are written and caches flushed while the worker is frozen, the doorbell is rung, and only then does
the clock start, with the thaw; it stops when the worker has answered and is frozen again. So the inputs do not exist
for the worker before its window, and what is in the output memory at its end is final.
"""

import gc
import json
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from justgoal.evaluation.memory import Block
from justgoal.evaluation.worker import CALL, OK
from justgoal.freezer import Freezer


class CallFailed(Exception):
    """A call did not end with an answer of the expected form; `kind` is a verdict's kind."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


def cache_bytes() -> int:
    """Size of the largest cache of this CPU, 32 MiB where the kernel does not tell."""
    sizes = [
        int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        if (text := path.read_text().strip())[-1:] in ("K", "M")
    ]
    return max(sizes, default=32 << 20)


class Flush:
    """Evicts what the last party left in the caches, by passing over a buffer twice as large as the largest of them.

    All of the judge's threads take part, one a core, so that private caches are flushed as well as the shared one.
    """

    def __init__(self) -> None:
        self._buffer = torch.zeros(2 * cache_bytes() // 4, dtype=torch.float32)

    def __call__(self) -> None:
        self._buffer.add_(1.0)


class Party:
    """Whoever is being timed: one worker, its memory, and its freezer. Frozen whenever no window is open on it."""

    def __init__(self, channel: socket.socket, freezer: Freezer, inputs: Block, outputs: Block) -> None:
        self.channel = channel
        self.freezer = freezer
        self.inputs = inputs
        self.outputs = outputs

    def setup(self, tree: int, threads: int) -> None:
        """Hand over the tree (a descriptor of a tar file) and the memory; the worker begins to import."""
        message = {"arguments": self.inputs.layout, "outputs": self.outputs.layout, "threads": threads}
        descriptors = [tree, self.inputs.descriptor, self.outputs.descriptor]
        socket.send_fds(self.channel, [json.dumps(message).encode()], descriptors)

    def imported(self, limit: float) -> None:
        """Wait until the solution is imported, and freeze.

        Raises CallFailed("build") when importing fails, CallFailed("timeout") after `limit` seconds.
        """
        answer, late = self.answer(limit)
        self.freezer.freeze()
        if late:
            raise CallFailed("timeout", f"importing had not ended after {limit:g} s")
        if answer != OK:
            raise failed(answer)

    def call(self, limit: float) -> float:
        """One call on what the input memory holds; seconds of the judge's clock, the no-op's cost included."""
        self._nothing_unasked()
        self.channel.send(CALL)
        start = time.perf_counter_ns()
        self.freezer.order(False)
        answer, late = self.answer(limit)
        self.freezer.freeze()
        end = time.perf_counter_ns()
        if late:
            raise CallFailed("timeout", f"a call had not ended after {limit:g} s")
        if answer != OK:
            raise failed(answer)
        return (end - start) * 1e-9

    def answer(self, limit: float) -> tuple[bytes, bool]:
        """One packet from the worker, and whether it failed to come within `limit` seconds."""
        ready, _, _ = select.select([self.channel], [], [], limit)
        return (self.channel.recv(4096), False) if ready else (b"", True)

    def _nothing_unasked(self) -> None:
        ready, _, _ = select.select([self.channel], [], [], 0)
        if ready and self.channel.recv(4096, socket.MSG_PEEK):
            raise CallFailed("crash", "the worker answered before it was asked")

    def close(self) -> None:
        self.channel.close()
        self.freezer.close()
        self.inputs.close()
        self.outputs.close()


def failed(answer: bytes) -> CallFailed:
    """What a failed answer means, in words; only its known members are used, and only in a known form."""
    if not answer:
        return CallFailed("crash", "the process ended during a call")
    try:
        report: dict[str, Any] = json.loads(answer)
        stage = report["failed"]
    except (ValueError, KeyError, TypeError):
        return CallFailed("crash", "the worker's answer has no known form")
    if stage == "structure":
        return CallFailed("wrong", str(report.get("what", ""))[:300])
    name, line = report.get("type"), report.get("line")
    known = name if isinstance(name, str) and isinstance(getattr(__builtins__, name, None), type) else "an exception"
    where = f" at line {line} of the solution" if isinstance(line, int) and 0 < line < 1_000_000 else ""
    return CallFailed("build" if stage == "import" else "crash", f"{known}{where}")


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection of the judge inside: windows are open."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
