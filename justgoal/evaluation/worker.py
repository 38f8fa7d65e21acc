"""Runs one solution for the judge, inside sandbox B. Imports torch and the standard library only.

Started with descriptor 3, a packet socket whose other end the judge holds. One setup message brings the solution's
tree (a tar file) and two pieces of the judge's memory: inputs, which the kernel makes read-only here, and outputs.
After that each one-byte order is answered by one packet: `c` calls the solution once and copies what it returned into
the output memory, `p` packs the tree with all that building has added. Nothing that this process says is believed:
the judge reads its own clock and the bytes in its own memory.
"""

import ctypes
import importlib.util
import inspect
import io
import json
import mmap
import os
import socket
import sys
import tarfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CORES = os.sched_getaffinity(0)
HOME = {max(CORES)}


def load_openmp() -> None:
    """Load torch's OpenMP before torch: it binds this thread to the last core, as OMP_PLACES says, and is unbound here.

    Importing torch takes two seconds, which both processes of a pair would otherwise spend on one core.
    """
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    for library in (*folder.glob("lib/libgomp*"), *folder.with_name("torch.libs").glob("libgomp*")):
        ctypes.CDLL(str(library))
    os.sched_setaffinity(0, CORES)


load_openmp()

import torch  # noqa: E402

SOLUTION = Path("/solution")
CALL, PACK = b"c", b"p"
OK = b"ok"


def mapped(memory: mmap.mmap) -> torch.Tensor:
    """All bytes of a mapping, which may be read-only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "the buffer is not writable": that is the point
        return torch.frombuffer(memory, dtype=torch.uint8)


def tensors(data: torch.Tensor, layout: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    """Tensors on these bytes as the layout says; a scalar is a one-element tensor there.

    Each has a storage of its own, by way of DLPack: torch.compile takes tensors with one storage for one.
    """
    made = []
    for item in layout:
        dtype = getattr(torch, item["dtype"])
        part = torch.utils.dlpack.from_dlpack(data[item["offset"] :][: item["count"] * dtype.itemsize])
        made.append(part.view(dtype).reshape(item["shape"]))
    return made


def unpack(descriptor: int) -> None:
    """Lay the tree out. The descriptor is shared with other workers, so its position means nothing: read by offset."""
    data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(SOLUTION, filter="fully_trusted")


def pack() -> int:
    """The tree as a tar file in memory: what the build made is found again by every later worker."""
    descriptor = os.memfd_create("tree")
    with os.fdopen(os.dup(descriptor), "wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(SOLUTION, arcname=".", filter=lambda item: None if item.isdev() else item)
    return descriptor


def load() -> Callable[..., Any]:
    """Import solution.py and return its `run`."""
    sys.path.insert(0, str(SOLUTION))
    spec = importlib.util.spec_from_file_location("solution", SOLUTION / "solution.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["solution"] = module
    spec.loader.exec_module(module)
    if not callable(getattr(module, "run", None)):
        raise AttributeError("solution.py defines no function `run`")
    run: Callable[..., Any] = module.run
    return run


def unbind() -> None:
    """Give all cores back to this thread, and to what was started while it was bound to one.

    Another OpenMP in the solution counts the cores of this thread, and threads of any other kind inherit them.
    """
    for thread in Path("/proc/self/task").iterdir():
        if os.sched_getaffinity(int(thread.name)) == HOME:
            os.sched_setaffinity(int(thread.name), CORES)


def order(channel: socket.socket) -> bytes:
    """The next one, waited for on the last core and carried out on any; nothing when there is no more.

    The judge waits on the first core. Whoever woke up there too was 50 us later than others, and found one of the
    OpenMP threads of this process on its core (measured).
    """
    os.sched_setaffinity(0, HOME)
    received = channel.recv(1)
    os.sched_setaffinity(0, CORES)
    return received


def takes_out(run: Callable[..., Any]) -> bool:
    try:
        return "out" in inspect.signature(run).parameters
    except (TypeError, ValueError):
        return False


def mismatch(returned: Any, expected: Sequence[torch.Tensor], names: Sequence[str]) -> str:
    """How what was returned differs in structure from the outputs, one clause; empty when it does not."""
    if len(returned) != len(expected):
        return f"returned {len(returned)} outputs instead of {len(expected)}"
    for index, (value, wanted) in enumerate(zip(returned, expected, strict=True)):
        label = f"output {index} ({names[index]})"
        if type(value) is not torch.Tensor:
            return f"{label} is a {type(value).__name__} instead of a torch.Tensor"
        if value.dtype != wanted.dtype:
            return f"{label} has dtype {value.dtype} instead of {wanted.dtype}"
        if value.shape != wanted.shape:
            return f"{label} has shape {tuple(value.shape)} instead of {tuple(wanted.shape)}"
        if value.device != wanted.device:
            return f"{label} is on {value.device} instead of {wanted.device}"
    return ""


def failure(stage: str, error: BaseException) -> bytes:
    """What the judge may pass on: the type of the exception and the last line of the solution that it went through."""
    sys.stdout.flush()
    traceback.print_exception(error)
    sys.stderr.flush()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename.startswith(str(SOLUTION))]
    return json.dumps({"failed": stage, "type": type(error).__name__, "line": lines[-1] if lines else None}).encode()


def solution(setup: dict[str, Any], results: Sequence[torch.Tensor]) -> Callable[[Sequence[Any]], bytes]:
    """The function that calls `run` with given arguments and copies the returned tensors into `results`."""
    unbind()
    run = load()
    unbind()
    # Whoever computes here can find this memory anyway; that it may be written to must be everybody's advantage.
    extra = {"out": tuple(results)} if takes_out(run) else {}
    names = [item["name"] for item in setup["outputs"]]

    def call(given: Sequence[Any]) -> bytes:
        returned = run(*given, **extra)
        if not isinstance(returned, (tuple, list)):
            returned = (returned,)
        wrong = mismatch(returned, results, names)
        if wrong:
            return json.dumps({"failed": "structure", "what": wrong}).encode()
        for result, value in zip(results, returned, strict=True):
            if value is not result:
                result.copy_(value)
        return OK

    return call


def caller(channel: socket.socket, setup: dict[str, Any], descriptors: Sequence[int]) -> Callable[[], bytes]:
    """The function that performs one call on what the judge's memory holds; what it returns is the answer."""
    inputs, outputs = descriptors
    arguments = tensors(mapped(mmap.mmap(inputs, 0, prot=mmap.PROT_READ)), setup["arguments"])
    scalars = [item["scalar"] for item in setup["arguments"]]
    run = solution(setup, tensors(mapped(mmap.mmap(outputs, 0)), setup["outputs"]))

    def call() -> bytes:
        return run([value.item() if scalar else value for value, scalar in zip(arguments, scalars, strict=True)])

    return call


def serve(channel: socket.socket, connect: Callable[..., Callable[[], bytes]] = caller) -> None:
    """Until the judge is gone. `connect` makes of the setup, and of the descriptors beside it, what performs a call."""
    message, descriptors, _, _ = socket.recv_fds(channel, 1 << 16, 4)
    setup, (tree, *memory) = json.loads(message), descriptors
    unpack(tree)
    os.chdir(SOLUTION)
    torch.set_num_threads(setup["threads"])
    torch.set_grad_enabled(False)
    try:
        call = connect(channel, setup, memory)
    except BaseException as error:
        channel.send(failure("import", error))
        return
    channel.send(OK)
    while asked := order(channel):
        try:
            if asked == PACK:
                socket.send_fds(channel, [OK], [pack()])
            else:
                channel.send(call())
        except BaseException as error:
            channel.send(failure("run", error))


if __name__ == "__main__":
    serve(socket.socket(fileno=3))
