"""Memory of the judge that workers map: sealed, so that a worker can neither change inputs nor shrink outputs.

Inputs carry F_SEAL_FUTURE_WRITE: the judge's own mapping stays writable, every later one is read-only to the kernel.
Outputs carry F_SEAL_SHRINK and F_SEAL_GROW: without them a worker's ftruncate ends the judge by SIGBUS (measured).
"""

import fcntl
import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from justgoal.evaluation.worker import tensors

# Linux's fcntl numbers that Python 3.11's fcntl module does not name yet.
F_ADD_SEALS = 1033
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE, F_SEAL_FUTURE_WRITE = 1, 2, 4, 8, 16
SEALED_SIZE = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL
PAGE = 4096


@dataclass(frozen=True)
class Field:
    """One tensor's place: `dtype` is torch's name, `scalar` says that a solution receives a Python number."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    scalar: bool = False


def arrange(fields: Sequence[Field]) -> tuple[list[dict[str, Any]], int]:
    """Where each tensor lies in one piece of memory, each on its own page, as a worker is told; and how long it is."""
    layout = []
    end = 0
    for field in fields:
        count = math.prod(field.shape)
        size = count * getattr(torch, field.dtype).itemsize
        layout.append(
            {"name": field.name, "dtype": field.dtype, "shape": field.shape, "scalar": field.scalar,
             "count": count, "offset": end}
        )  # fmt: skip
        end += -(-size // PAGE) * PAGE
    return layout, end


class Memory(Protocol):
    """Tensors of the judge that a worker maps: by `descriptor`, as `layout` says. See Block."""

    layout: list[dict[str, Any]]
    descriptor: int

    def __init__(self, fields: Sequence[Field], *, writable_by_worker: bool) -> None: ...

    def write(self, values: Sequence[Any]) -> None: ...

    def poison(self) -> None: ...

    def read(self) -> list[torch.Tensor]: ...

    def close(self) -> None: ...


class Block:
    """Tensors laid out in one sealed memfd; `views` are the judge's writable views."""

    def __init__(self, fields: Sequence[Field], *, writable_by_worker: bool) -> None:
        self.layout, end = arrange(fields)
        self.descriptor = os.memfd_create("block", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, max(end, PAGE))
        self._map = mmap.mmap(self.descriptor, 0)
        seals = SEALED_SIZE | (0 if writable_by_worker else F_SEAL_FUTURE_WRITE)
        fcntl.fcntl(self.descriptor, F_ADD_SEALS, seals)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.views = tensors(self._bytes, self.layout)

    def write(self, values: Sequence[Any]) -> None:
        for view, value in zip(self.views, values, strict=True):
            view.copy_(value) if isinstance(value, torch.Tensor) else view.fill_(value)

    def poison(self) -> None:
        """Fill with 0xFF bytes: NaN in every float format, -1 in the signed integer ones."""
        self._bytes.fill_(0xFF)

    def read(self) -> list[torch.Tensor]:
        """Private copies: a worker that goes on writing changes nothing that was read."""
        return [view.clone() for view in self.views]

    def close(self) -> None:
        self.views = []
        del self._bytes
        self._map.close()
        os.close(self.descriptor)


def own_copy(descriptor: int) -> int:
    """The same sealed bytes in a file of its own, open for reading only.

    Workers that shared one could leave each other more than bytes: extended attributes, locks, the position in it.
    """
    copy = sealed(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    try:
        os.fchmod(copy, 0o400)
        return os.open(f"/proc/self/fd/{copy}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(copy)


def sealed(data: bytes) -> int:
    """A memfd with these bytes that nobody can change any more."""
    descriptor = os.memfd_create("tree", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    fcntl.fcntl(descriptor, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)
    return descriptor
