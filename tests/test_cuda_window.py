"""A window on a CUDA device from the judge's side, without one: the other end of channel and page is played here."""

import json
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from justgoal.evaluation.clock import CallFailed
from justgoal.evaluation.devices import Reading, subtracted
from justgoal.evaluation.devices.cuda import TOLERANCE, CudaHardware, CudaWorker
from justgoal.evaluation.devices.cuda_driver import FINISHED, KEY, OPENED, SCALARS, SUM, SUM_KEY
from justgoal.evaluation.devices.cuda_worker import ANSWER, ISSUED, PAGE
from justgoal.evaluation.memory import Block, Field
from justgoal.evaluation.worker import CALL
from justgoal.evaluation.workers import Workers
from justgoal.freezer import GroupFreezer

SECRET = bytes(range(32))
FREEZER = 2  # its version: files that say nothing are frozen at once below


class Memory(Block):
    """Of the host, with what a block on the device has besides."""

    size = length = 4096
    key = SECRET
    scalars: Sequence[tuple[int, bytes]] = [(0, struct.pack("<q", 7))]

    def checksum(self, key: int) -> int:
        return key ^ 1


class HostWorker(CudaWorker):
    block = Memory  # type: ignore[assignment]


class Peer:
    """The worker and the device: `play` is what they do after the doorbell."""

    def __init__(self, channel: socket.socket, page: int) -> None:
        self.channel = channel
        self.page = mmap.mmap(page, PAGE)
        self.words = memoryview(self.page).cast("Q")

    def wait_for_gate(self, number: int) -> None:
        while self.words[OPENED] != number:
            time.sleep(1e-4)

    def finish(self, number: int) -> None:
        self.words[SUM] = self.words[SUM_KEY] ^ 1
        self.words[FINISHED] = number

    def answer(self, seconds: float = 1e-3) -> None:
        self.channel.send(ANSWER.pack(b"ok", seconds))

    def close(self) -> None:
        self.words.release()
        self.page.close()
        self.channel.close()


@pytest.fixture(params=["worker", "build"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[HostWorker, Peer]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    runtime, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    freezer = os.memfd_create("freezer")
    os.write(freezer, b"0 frozen 1")
    workers = Workers(runtime, [Field("k", "int64", (1,), True)], [Field("y", "float32", (1,))], 1)
    pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    printed = pipe[0] if request.param == "build" else None
    worker = HostWorker(workers, 1, GroupFreezer(freezer, os.dup(freezer), FREEZER), ours.detach(), printed)
    _, descriptors = worker.messages()
    peer = Peer(theirs, descriptors[-1])
    yield worker, peer
    worker.close()
    peer.close()
    runtime.close()
    other.close()
    for end in pipe[request.param == "build" :]:
        os.close(end)


def called(pair: tuple[HostWorker, Peer], play: Callable[[Peer], None], limit: float = 5.0) -> float:
    worker, peer = pair

    def doorbell() -> None:
        assert peer.channel.recv(16) == CALL
        play(peer)

    thread = threading.Thread(target=doorbell)
    thread.start()
    try:
        return worker.call(limit)
    finally:
        thread.join()


def test_a_window_lasts_from_the_gate_to_the_checksum(pair: tuple[HostWorker, Peer]) -> None:
    seen: dict[str, Any] = {}

    def play(peer: Peer) -> None:
        time.sleep(0.01)
        seen["before"] = bytes(peer.page[8 * KEY : 8 * KEY + 48])
        seen["scalar"] = struct.unpack_from("<q", peer.page, 8 * SCALARS)[0]
        peer.channel.send(ISSUED)
        peer.wait_for_gate(1)
        seen["key"] = bytes(peer.page[8 * KEY : 8 * KEY + 32])
        time.sleep(0.05)
        peer.finish(1)
        time.sleep(0.05)
        peer.answer(0.045)

    begun = time.monotonic()
    window = called(pair, play)
    whole = time.monotonic() - begun
    assert 0.05 <= window <= whole - 0.06  # neither the time before the gate nor that after the checksum
    assert pair[0].claimed == 0.045
    assert seen == {"before": bytes(48), "scalar": 7, "key": SECRET}


def test_an_answer_that_is_there_before_the_judge_has_looked_is_kept(pair: tuple[HostWorker, Peer]) -> None:
    def play(peer: Peer) -> None:
        peer.channel.send(ISSUED)
        peer.wait_for_gate(1)
        peer.answer()
        time.sleep(0.02)
        peer.finish(1)

    called(pair, play)
    assert pair[0].claimed == 1e-3


def test_a_gate_opens_for_a_call_that_waits_for_the_device(pair: tuple[HostWorker, Peer]) -> None:
    def play(peer: Peer) -> None:
        peer.wait_for_gate(1)
        time.sleep(0.01)
        peer.channel.send(ISSUED)
        peer.finish(1)
        peer.answer()

    assert called(pair, play) >= 0.01


def test_a_checksum_that_comes_after_its_word_does_not_count(pair: tuple[HostWorker, Peer]) -> None:
    def play(peer: Peer) -> None:
        peer.channel.send(ISSUED)
        peer.wait_for_gate(1)
        peer.words[FINISHED] = 1
        time.sleep(0.02)
        peer.finish(1)
        peer.answer()

    with pytest.raises(CallFailed, match=r"^its outputs changed after it had said that they were complete$"):
        called(pair, play)


def test_a_failure_is_told_at_any_time(pair: tuple[HostWorker, Peer]) -> None:
    failure = json.dumps({"failed": "run", "type": "ValueError", "line": 3}).encode()

    def play(peer: Peer) -> None:
        peer.channel.send(ISSUED)
        peer.wait_for_gate(1)
        peer.channel.send(failure)

    with pytest.raises(CallFailed, match=r"^ValueError$") as caught:
        called(pair, play)
    assert (caught.value.kind, caught.value.line) == ("crash", 3)


def test_a_device_that_does_not_end_is_not_waited_for(pair: tuple[HostWorker, Peer]) -> None:
    with pytest.raises(CallFailed, match=r"^a call had not ended after 0\.1 s$") as caught:
        called(pair, lambda peer: peer.channel.send(ISSUED) and None, limit=0.1)
    assert caught.value.kind == "timeout"


@pytest.mark.parametrize("seconds", [float("nan"), -1.0, float("inf")])
def test_no_time_is_no_time(pair: tuple[HostWorker, Peer], seconds: float) -> None:
    def play(peer: Peer) -> None:
        peer.channel.send(ISSUED)
        peer.wait_for_gate(1)
        peer.finish(1)
        peer.answer(seconds)

    with pytest.raises(CallFailed, match=r"^the device's time that it reports is no time$"):
        called(pair, play)


def test_windows_that_are_longer_than_what_is_claimed_are_refused() -> None:
    """A call that says 100 us, with windows that are `more` seconds longer than a blank's of its length."""
    hardware = CudaHardware.__new__(CudaHardware)  # without a device
    costs = [Reading(1e-6, 31e-6)] * 5
    allowed = TOLERANCE[0] + TOLERANCE[1] * 100e-6

    def readings(more: float) -> list[Reading]:
        return [Reading(100e-6, 130e-6 + more)] * 5

    assert hardware.settle(readings(0.9 * allowed), costs) == subtracted(readings(0.0), costs)
    assert hardware.settle(readings(-1e-3), costs) == pytest.approx([99e-6] * 5)
    with pytest.raises(CallFailed, match=r"^by the judge's clock a call takes 40 us longer than its events say$"):
        hardware.settle(readings(40e-6), costs)
