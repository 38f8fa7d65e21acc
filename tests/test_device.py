"""The lock of a device and the registry of what is frozen under it, with real processes and real sandboxes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from solutions import descriptors

from justgoal.evaluation import device as module
from justgoal.evaluation.device import Device
from justgoal.freezer import find
from justgoal.sandboxes import UID, Engine, Limits, Sandbox, Spec

MIB = 1 << 20
COUNT = "import sys, time\nwhile True:\n    sys.stdout.write('.'); sys.stdout.flush(); time.sleep(0.005)"
HOLD = """
import sys
from pathlib import Path
from justgoal.evaluation import device
device.runtime_folder = lambda: Path(sys.argv[1])
with device.Device("cpu").exclusive():
    print("held", flush=True)
    sys.stdin.readline()
print("let go", flush=True)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A registry of our own: the host's may have real agents in it."""
    monkeypatch.setattr(module, "runtime_folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def device(place: Path) -> Device:
    return Device("cpu")


@pytest.fixture
def agent(engine: Engine) -> Iterator[Callable[[], Sandbox]]:
    """Starts sandboxes that show by their output whether they are frozen."""
    started = []

    def start() -> Sandbox:
        spec = Spec("agent", ("/opt/venv/bin/python", "-c", COUNT), Limits(256 * MIB, 64, 2), UID)
        started.append(engine.start(spec))
        until(lambda: printed(started[-1]) > 0)
        return started[-1]

    yield start
    for sandbox in started:
        sandbox.close()


@contextlib.contextmanager
def holder(place: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the device until a line is sent to it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def printed(sandbox: Sandbox) -> int:
    """How much it has printed since the last look."""
    with contextlib.suppress(BlockingIOError):
        return len(os.read(sandbox.output, 1 << 20))
    return 0


def runs(sandbox: Sandbox) -> bool:
    """Whether it does anything within 0.2 s."""
    printed(sandbox)
    time.sleep(0.2)
    return printed(sandbox) > 0


def test_one_process_at_a_time(device: Device, place: Path) -> None:
    order = []
    with holder(place) as other:
        assert line(other) == "held"

        def take() -> None:
            with device.exclusive():
                order.append("mine")

        taking = threading.Thread(target=take)
        taking.start()
        time.sleep(0.3)
        order.append("still his")
        assert other.stdin
        other.stdin.write("\n")
        other.stdin.flush()
        assert line(other) == "let go"
        taking.join(20)
    assert order == ["still his", "mine"]


def test_lock_of_a_killed_process_is_free(device: Device, place: Path) -> None:
    with holder(place) as other:
        assert line(other) == "held"
        other.kill()
        with device.exclusive():
            pass


def test_devices_are_apart(device: Device) -> None:
    with device.exclusive(), Device("cuda-0").exclusive():
        pass


def test_it_can_be_taken_again(device: Device) -> None:
    before = descriptors()
    for _ in range(3):
        with device.exclusive():
            pass
    with pytest.raises(ZeroDivisionError), device.exclusive():
        _ = 1 / 0
    with device.exclusive():
        pass
    assert descriptors() == before


def test_agents_are_frozen_inside(device: Device, agent: Callable[[], Sandbox]) -> None:
    mine, other, stranger = agent(), agent(), agent()
    entries = [device.register(sandbox.freezer) for sandbox in (mine, other)]
    assert len(set(entries)) == 2
    with device.exclusive():
        assert [sandbox.freezer.frozen() for sandbox in (mine, other, stranger)] == [True, True, False]
        assert [runs(sandbox) for sandbox in (mine, other, stranger)] == [False, False, True]
    assert [sandbox.freezer.frozen() for sandbox in (mine, other)] == [False, False]
    assert [runs(sandbox) for sandbox in (mine, other)] == [True, True]


def test_agents_are_thawed_after_an_error(device: Device, agent: Callable[[], Sandbox]) -> None:
    sandbox = agent()
    device.register(sandbox.freezer)
    with pytest.raises(ZeroDivisionError), device.exclusive():
        _ = 1 / 0
    assert runs(sandbox)


def test_other_processes_freeze_it_too(device: Device, place: Path, agent: Callable[[], Sandbox]) -> None:
    sandbox = agent()
    device.register(sandbox.freezer)
    with holder(place) as other:
        assert line(other) == "held"
        assert not runs(sandbox)
        assert other.stdin
        other.stdin.write("\n")
        other.stdin.flush()
        assert line(other) == "let go"
    assert runs(sandbox)


def test_an_unregistered_agent_is_left_alone(device: Device, agent: Callable[[], Sandbox]) -> None:
    sandbox = agent()
    device.register(sandbox.freezer).unlink()
    with device.exclusive():
        assert runs(sandbox)


def test_entries_of_gone_sandboxes_vanish(device: Device, place: Path, agent: Callable[[], Sandbox]) -> None:
    gone, here = agent(), agent()
    for sandbox in (gone, here):
        device.register(sandbox.freezer)
    gone.close()
    with device.exclusive():
        assert here.freezer.frozen()
    assert len(list((place / "cpu" / "agents").iterdir())) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"kind": "control groups version 1", "write": 3, "read": 4}',
        '{"kind": "signals", "process": 1}',
        '"x"',
        "null",
    ],
)
def test_a_damaged_entry_is_removed(device: Device, place: Path, text: str) -> None:
    """A torn or foreign file in the registry costs nobody an evaluation."""
    (place / "cpu" / "agents" / "1-2").write_text(text)
    with device.exclusive():
        pass
    assert not list((place / "cpu" / "agents").iterdir())


def test_a_sandbox_that_goes_while_it_is_frozen(device: Device, agent: Callable[[], Sandbox]) -> None:
    gone, here = agent(), agent()
    for sandbox in (gone, here):
        device.register(sandbox.freezer)
    with device.exclusive():
        gone.close()
    assert runs(here)


def test_a_sandbox_that_goes_between_two_looks(
    device: Device, agent: Callable[[], Sandbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another runtime closes its sandbox just after we have opened its freezer."""
    gone, here = agent(), agent()
    first, _ = [device.register(sandbox.freezer) for sandbox in (gone, here)]
    opened = module._open

    def open_and_lose(entry: Path) -> object:
        freezer = opened(entry)
        if not gone._closed and entry == first:
            gone.close()
        return freezer

    monkeypatch.setattr(module, "_open", open_and_lose)
    with device.exclusive():
        assert here.freezer.frozen()
    assert runs(here)


def frozen_by_a_killed_process(device: Device, place: Path, sandbox: Sandbox) -> None:
    device.register(sandbox.freezer)
    with holder(place) as other:
        assert line(other) == "held"
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert not runs(sandbox)


def test_the_next_holder_thaws_what_a_killed_one_froze(
    device: Device, place: Path, agent: Callable[[], Sandbox]
) -> None:
    sandbox = agent()
    frozen_by_a_killed_process(device, place, sandbox)
    with device.exclusive():
        pass
    assert runs(sandbox)


def test_release_of_what_a_killed_process_froze(device: Device, place: Path, agent: Callable[[], Sandbox]) -> None:
    sandbox = agent()
    frozen_by_a_killed_process(device, place, sandbox)
    device.release_stale(sandbox.freezer)
    assert runs(sandbox)


def test_no_release_while_somebody_evaluates(device: Device, place: Path, agent: Callable[[], Sandbox]) -> None:
    sandbox = agent()
    device.register(sandbox.freezer)
    with holder(place) as other:
        assert line(other) == "held"
        device.release_stale(sandbox.freezer)
        assert not runs(sandbox)


def test_entry_says_where_the_freezer_is(device: Device, agent: Callable[[], Sandbox]) -> None:
    sandbox = agent()
    found = find(json.loads(device.register(sandbox.freezer).read_text()))
    assert found.kind == sandbox.freezer.kind
    found.freeze()
    assert sandbox.freezer.frozen() and not runs(sandbox)
    sandbox.freezer.thaw()
    assert not found.frozen() and runs(sandbox)
    found.close()
