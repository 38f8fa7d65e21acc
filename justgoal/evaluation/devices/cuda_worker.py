"""What runs in sandbox B when a solution runs on a CUDA device: worker.py with the device's memory and its events.

The judge's inputs are masked; the key comes when the judge opens the gate. A call enqueues the gate, the unmasking and
all that `run` launches, and says so; only then does the judge open the gate, so that the host's work is not in the
device's time, and nothing can be computed before the window. After that it answers twice: when the device is idle, and
with the checksum of the outputs under a second key, and the device's time by its own account.
"""

import mmap
import socket
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING or __package__:  # the judge reads what it says
    from justgoal.evaluation import worker
    from justgoal.evaluation.devices import cuda_driver
else:
    import cuda_driver
    import worker

ISSUED, DONE = b"issued", b"done"
ANSWER = struct.Struct("<2sdQ")
"""`ok`, seconds, checksum."""
PAGE = mmap.PAGESIZE
OPENED, KEY, ASKED, SUM_KEY, SCALARS = 0, 1, 5, 6, 8
"""Places in the judge's page, in words: the number of the call whose gate is open, the key of its inputs (4 words),
the number of the call whose checksum is asked for, the key of that, the values of scalars."""


def caller(channel: socket.socket, setup: dict[str, Any], descriptors: Sequence[int]) -> Callable[[], bytes]:
    """The function that performs one call; see worker.caller."""
    inputs, outputs, shared = descriptors
    cuda = cuda_driver.Cuda()
    page = mmap.mmap(shared, PAGE)
    words = memoryview(page).cast("Q")
    view = worker.mapped(page)
    device_page = cuda.host(view.data_ptr(), PAGE)
    masked = cuda.open(inputs, setup["input_size"], writable=False)
    written = cuda.open(outputs, setup["output_size"], writable=True)
    length = setup["input_bytes"]
    plain = torch.zeros(length, dtype=torch.uint8, device="cuda")
    key = torch.zeros(4, dtype=torch.int64, device="cuda")
    total = torch.zeros(1, dtype=torch.int64, device="cuda")
    arguments = worker.tensors(plain, setup["arguments"])
    run = worker.solution(setup, worker.tensors(written.bytes(), setup["outputs"]))
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    number = 0

    def given() -> list[Any]:
        return [
            struct.unpack_from("<d" if item["dtype"].startswith("float") else "<q", page, 8 * (SCALARS + index))[0]
            if item["scalar"]
            else argument
            for index, (argument, item) in enumerate(zip(arguments, setup["arguments"], strict=True))
        ]

    def call() -> bytes:
        nonlocal number
        number += 1
        cuda.gate(device_page, number, key)
        cuda.mask(masked.address, plain.data_ptr(), length, key)
        begun.record()
        answer = run(given())
        ended.record()
        if answer != worker.OK:
            return answer
        channel.send(ISSUED)
        torch.cuda.synchronize()
        channel.send(DONE)
        while words[ASKED] != number:
            pass
        cuda.checksum(written.address, setup["output_bytes"], words[SUM_KEY], total)
        found = int(total.item()) & (1 << 64) - 1
        return ANSWER.pack(worker.OK, begun.elapsed_time(ended) * 1e-3, found)

    cuda.checksum(written.address, setup["output_bytes"], 0, total)  # loads what the first call would load
    torch.cuda.synchronize()
    return call


if __name__ == "__main__":
    worker.serve(socket.socket(fileno=3), caller)
