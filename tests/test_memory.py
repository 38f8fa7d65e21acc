"""Sealed memory, attacked from a second process as a worker would."""

import contextlib
import ctypes
import errno
import json
import math
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from solutions import descriptors

from justgoal.evaluation.memory import PAGE, Block, Field, sealed

FIELDS = [
    Field("x", "float32", (3, 5)),
    Field("half", "bfloat16", (7,)),
    Field("count", "int64", (1,), scalar=True),
    Field("none", "float32", (0, 4)),
    Field("flags", "bool", (2, 2)),
    Field("scale", "float32", (1,), scalar=True),
]
VALUES = [
    torch.arange(15, dtype=torch.float32).reshape(3, 5),
    torch.arange(7, dtype=torch.bfloat16),
    -(2**40),
    torch.empty(0, 4),
    torch.tensor([[True, False], [False, True]]),
    0.375,
]

ATTACK = """
import ctypes, errno, fcntl, json, mmap, os, socket
channel = socket.socket(fileno=0)
message, (block,), _, _ = socket.recv_fds(channel, 100, 1)
size = os.fstat(block).st_size
libc = ctypes.CDLL(None, use_errno=True)

def outcome(action):
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"

def reopened():
    descriptor = os.open(f"/proc/self/fd/{block}", os.O_RDWR)
    try:
        mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)

def mprotect():
    view = mmap.mmap(block, size, prot=mmap.PROT_READ)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, ctypes.c_size_t(size), 1, mmap.MAP_SHARED, block, ctypes.c_long(0))
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), 3):
        raise OSError(ctypes.get_errno(), "")

def punch():
    if libc.fallocate(block, 3, ctypes.c_long(0), ctypes.c_long(4096)):
        raise OSError(ctypes.get_errno(), "")

print(json.dumps({
    "map": outcome(lambda: mmap.mmap(block, size)),
    "map again": outcome(reopened),
    "mprotect": outcome(mprotect),
    "write": outcome(lambda: os.pwrite(block, b"\\1", 0)),
    "punch": outcome(punch),
    "shrink": outcome(lambda: os.ftruncate(block, 0)),
    "shorten": outcome(lambda: os.ftruncate(block, size - 1)),
    "grow": outcome(lambda: os.ftruncate(block, size + 4096)),
    "seal": outcome(lambda: fcntl.fcntl(block, 1033, 8)),
    "read": outcome(lambda: mmap.mmap(block, size, prot=mmap.PROT_READ)[0]),
}))
"""


@pytest.fixture
def inputs() -> Iterator[Block]:
    block = Block(FIELDS, writable_by_worker=False)
    yield block
    block.close()


@pytest.fixture
def outputs() -> Iterator[Block]:
    block = Block(FIELDS, writable_by_worker=True)
    yield block
    block.close()


def attack(descriptor: int) -> dict[str, str]:
    """What a second process that was handed this descriptor can do with it."""
    here, there = socket.socketpair()
    with here, there:
        process = subprocess.Popen([sys.executable, "-c", ATTACK], stdin=there, stdout=subprocess.PIPE, text=True)
        socket.send_fds(here, [b"x"], [descriptor])
        printed, _ = process.communicate(timeout=60)
    outcomes: dict[str, str] = json.loads(printed)
    return outcomes


SIZES = dict.fromkeys(("shrink", "shorten", "grow", "seal"), "EPERM")


def test_inputs_are_read_only_in_another_process(inputs: Block) -> None:
    inputs.write(VALUES)
    assert attack(inputs.descriptor) == {
        **SIZES, "map": "EPERM", "map again": "EPERM", "mprotect": "EACCES", "write": "EPERM", "punch": "EPERM",
        "read": "done",
    }  # fmt: skip
    assert torch.equal(inputs.views[0], VALUES[0])


def test_inputs_stay_writable_here(inputs: Block) -> None:
    attack(inputs.descriptor)
    inputs.write(VALUES)
    assert [view.flatten().tolist() for view in inputs.views] == [
        list(range(15)), list(range(7)), [-(2**40)], [], [True, False, False, True], [0.375],
    ]  # fmt: skip


def test_outputs_keep_their_size(outputs: Block) -> None:
    assert attack(outputs.descriptor) == {
        **SIZES, "map": "done", "map again": "done", "mprotect": "done", "write": "done", "punch": "done",
        "read": "done",
    }  # fmt: skip
    outputs.poison()
    assert outputs.views[0].isnan().all()


def test_layout(inputs: Block) -> None:
    """Each tensor begins on a page of its own, and a reader finds it there."""
    inputs.write(VALUES)
    assert [item["offset"] for item in inputs.layout] == [0, PAGE, 2 * PAGE, 3 * PAGE, 3 * PAGE, 4 * PAGE]
    with mmap.mmap(inputs.descriptor, 0, prot=mmap.PROT_READ) as memory:
        assert np.frombuffer(memory[: 15 * 4], np.float32).tolist() == list(range(15))
        assert np.frombuffer(memory[2 * PAGE : 2 * PAGE + 8], np.int64).tolist() == [-(2**40)]
        assert memory[3 * PAGE : 3 * PAGE + 4] == b"\1\0\0\1"
        assert np.frombuffer(memory[4 * PAGE : 4 * PAGE + 4], np.float32).tolist() == [0.375]


def test_larger_than_a_page() -> None:
    block = Block([Field("a", "float64", (513,)), Field("b", "uint8", (1,))], writable_by_worker=False)
    assert [item["offset"] for item in block.layout] == [0, 2 * PAGE]
    assert os.fstat(block.descriptor).st_size == 3 * PAGE
    block.close()


def test_no_tensor_at_all_still_maps() -> None:
    block = Block([Field("none", "float32", (0,))], writable_by_worker=True)
    block.poison()
    assert block.read()[0].shape == (0,)
    block.close()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_poison_is_nan(dtype: str) -> None:
    block = Block([Field("y", dtype, (9,))], writable_by_worker=True)
    block.write([torch.zeros(9)])
    block.poison()
    assert all(math.isnan(value) for value in block.read()[0].tolist())
    block.close()


@pytest.mark.parametrize("dtype", ["int64", "int32", "int16", "int8"])
def test_poison_is_minus_one(dtype: str) -> None:
    block = Block([Field("y", dtype, (9,))], writable_by_worker=True)
    block.poison()
    assert block.read()[0].tolist() == [-1] * 9
    block.close()


def test_what_was_read_does_not_change(outputs: Block) -> None:
    outputs.write(VALUES)
    copies = outputs.read()
    with mmap.mmap(outputs.descriptor, 0) as other:
        other[:8] = b"\xff" * 8
    assert torch.equal(copies[0], VALUES[0])
    assert outputs.views[0][0, :2].isnan().all()


def test_nothing_stays_open() -> None:
    before = descriptors()
    for _ in range(3):
        block = Block(FIELDS, writable_by_worker=True)
        block.read()
        block.close()
    assert descriptors() == before


def test_sealed_bytes() -> None:
    descriptor = sealed(b"0123456789")
    assert os.pread(descriptor, 100, 0) == b"0123456789"
    for action in (
        lambda: os.pwrite(descriptor, b"x", 0),
        lambda: os.ftruncate(descriptor, 0),
        lambda: os.ftruncate(descriptor, 20),
        lambda: mmap.mmap(descriptor, 10),
    ):
        with pytest.raises(OSError) as problem:
            action()
        assert problem.value.errno == errno.EPERM
    os.close(descriptor)


def test_the_kernel_is_new_enough() -> None:
    """F_SEAL_FUTURE_WRITE is of Linux 5.1; without it nothing here would hold."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.memfd_create("probe", os.MFD_ALLOW_SEALING)
    with contextlib.closing(os.fdopen(descriptor, "wb")):
        assert libc.fcntl(descriptor, 1033, 16) == 0
