"""What runs in sandbox B when a solution runs on a CUDA device: worker.py with the device's memory and its events.

The judge's inputs are masked; the key comes when the judge opens the gate. A call enqueues the gate, the unmasking, all
that `run` launches, and a checksum of the outputs under another key, which the device writes into the judge's page at
the end. Only then does it say so, and the judge opens the gate: the host's work is in nobody's time, and nothing can be
computed before the window. The answer is the device's time by the worker's own account.
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

ISSUED = b"issued"
ANSWER = struct.Struct("<2sd")
"""`ok`, seconds."""
PAGE = mmap.PAGESIZE
KEYS = 5
"""Words of the judge's keys: four of the inputs, one of the checksum."""


def caller(channel: socket.socket, setup: dict[str, Any], descriptors: Sequence[int]) -> Callable[[], bytes]:
    """The function that performs one call; see worker.caller."""
    inputs, outputs, shared = descriptors
    cuda = cuda_driver.Cuda()
    page = mmap.mmap(shared, PAGE)
    device_page = cuda.host(worker.mapped(page).data_ptr(), PAGE)
    masked = cuda.open(inputs, setup["input_size"], writable=False)
    written = cuda.open(outputs, setup["output_size"], writable=True)
    length = setup["input_bytes"]
    plain = torch.zeros(length, dtype=torch.uint8, device="cuda")
    key = torch.zeros(KEYS, dtype=torch.int64, device="cuda")
    state = torch.zeros(2, dtype=torch.int64, device="cuda")
    arguments = worker.tensors(plain, setup["arguments"])
    run = worker.solution(setup, worker.tensors(written.bytes(), setup["outputs"]))
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    number = 0

    def number_at(index: int, dtype: str) -> Any:
        """A scalar, from the page: reading it from the device would wait for the gate."""
        kind = "<d" if dtype.startswith("float") else "<q"
        return struct.unpack_from(kind, page, 8 * (cuda_driver.SCALARS + index))[0]

    def given() -> list[Any]:
        return [
            number_at(index, item["dtype"]) if item["scalar"] else arguments[index]
            for index, item in enumerate(setup["arguments"])
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
        cuda.checksum(written.address, setup["output_bytes"], key, state, device_page, number)
        channel.send(ISSUED)
        torch.cuda.synchronize()
        return ANSWER.pack(worker.OK, begun.elapsed_time(ended) * 1e-3)

    cuda.checksum(written.address, 0, key, state, device_page, 0)  # loads what the first call would load
    torch.cuda.synchronize()
    return call


if __name__ == "__main__":
    worker.serve(socket.socket(fileno=3), caller)
