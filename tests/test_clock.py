"""The judge's clock and the workers under it, driven as the judge drives them, without a task."""

import gc
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from solutions import descendants, solution

from justgoal.evaluation import workers as module
from justgoal.evaluation.clock import CallFailed, cost, undisturbed
from justgoal.evaluation.evaluator import BLANK, WorkerHost, threads
from justgoal.evaluation.memory import Field, sealed
from justgoal.evaluation.workers import Worker, Workers
from justgoal.sandboxes import Engine

ONE = [Field("x", "float32", (1,))]
SECONDS = [Field("seconds", "float64", (1,))]
Start = Callable[..., list[Worker]]


class Judge:
    """This process in the place of the judge; a thread starts the sandboxes, and outlives them."""

    def __init__(self, engine: Engine) -> None:
        ours, self.runtime = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        host = WorkerHost(engine)

        def serve() -> None:
            with ours:
                host.serve(ours)
            host.close()

        self._thread = threading.Thread(target=serve)
        self._thread.start()

    def start(self, *trees: str | int, arguments: list[Field] = ONE, outputs: list[Field] = ONE,
              role: str = "worker") -> list[Worker]:  # fmt: skip
        """Workers of these solutions, or of trees that were built before."""
        workers = Workers(self.runtime, arguments, outputs, threads())
        made = [sealed(solution(tree).tar()) if isinstance(tree, str) else os.dup(tree) for tree in trees]
        started = workers.start(made, role)
        for descriptor in made:
            os.close(descriptor)
        return started

    def close(self) -> None:
        self.runtime.close()
        self._thread.join()


@pytest.fixture(scope="module")
def judge(engine: Engine) -> Iterator[Judge]:
    judge = Judge(engine)
    yield judge
    judge.close()


@pytest.fixture
def start(judge: Judge) -> Iterator[Start]:
    started: list[Worker] = []

    def run(*trees: str | int, **options: object) -> list[Worker]:
        started.extend(judge.start(*trees, **options))  # type: ignore[arg-type]
        return started

    yield run
    for worker in started:
        worker.close()


FIELDS = [
    Field("x", "float32", (3, 5)),
    Field("half", "bfloat16", (7,)),
    Field("count", "int64", (1,), scalar=True),
    Field("none", "float32", (0, 4)),
    Field("flags", "bool", (2, 2)),
    Field("scale", "float32", (1,), scalar=True),
]
VALUES = [torch.randn(3, 5), torch.randn(7).bfloat16(), -(2**53) - 1, torch.empty(0, 4),
          torch.tensor([[True, False], [False, True]]), 0.375]  # fmt: skip
ECHO = """
import torch

def run(x, half, count, none, flags, scale):
    assert (type(count), type(scale)) == (int, float)
    assert all(type(value) is torch.Tensor for value in (x, half, none, flags))
    assert not torch.is_grad_enabled()
    return x, half, torch.tensor([count]), none, flags, torch.tensor([scale])
"""


def test_values_arrive_and_return_to_the_bit(start: Start) -> None:
    [worker] = start(ECHO, arguments=FIELDS, outputs=FIELDS)
    worker.imported(60)
    for values in (VALUES, [*VALUES[:2], 7, *VALUES[3:5], math.inf]):
        worker.inputs.write(values)
        worker.outputs.poison()
        worker.call(60)
        found = worker.outputs.read()
        wanted = [value if isinstance(value, torch.Tensor) else torch.tensor([value]) for value in values]
        assert [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * 6


def test_work_is_done_while_a_build_is_waited_for(start: Start) -> None:
    """Until none is left; what the build prints meanwhile, more than a pipe holds, does not stop it."""
    [worker] = start("print('x' * (1 << 20), flush=True)\n\ndef run(x):\n    return x\n", role="build")
    left = [True, True, False]
    worker.meanwhile = lambda: left.pop(0)
    worker.imported(60)
    assert (left, worker.meanwhile, worker.printed()) == ([], None, "x" * 4095 + "\n")


BOUND = """
import ctypes, os, subprocess, torch

with open("procs.c", "w") as file:
    file.write("#include <omp.h>\\nint procs(void) { return omp_get_num_procs(); }\\n")
subprocess.run(["g++", "-x", "c", "-fopenmp", "-shared", "-fPIC", "procs.c", "-o", "procs.so"], check=True)
procs = ctypes.CDLL("./procs.so").procs

def run(x):
    torch.ones(1 << 20).exp()
    mine = os.sched_getaffinity(0)
    others = [os.sched_getaffinity(int(one)) for one in os.listdir("/proc/self/task") if int(one) != os.getpid()]
    bound = {min(cores) for cores in others if len(cores) == 1}
    return torch.tensor([float(procs()), float(len(mine)), float(len(bound))])
"""


def test_threads_are_spread_over_the_cores(start: Start) -> None:
    """Those of torch's OpenMP are bound to one core each; another OpenMP, and the thread that calls, have them all."""
    [worker] = start(BOUND, outputs=[Field("y", "float32", (3,))])
    worker.imported(60)
    worker.inputs.write([torch.zeros(1)])
    worker.outputs.poison()
    worker.call(60)
    cores = len(os.sched_getaffinity(0))
    assert worker.outputs.read()[0].tolist() == [cores, cores, cores - 1]


LEAVING = """
import os, torch

def run(x):
    found = left = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if "memfd:tree" not in os.readlink(f"/proc/self/fd/{name}"):
                continue
            found += 1
            left += len(os.listxattr(int(name))) + os.lseek(int(name), 0, os.SEEK_CUR)
            os.lseek(int(name), 1, os.SEEK_SET)
            os.setxattr(int(name), "user.x", b"x")
        except OSError:
            pass
    return torch.tensor([float(found > 0), float(left)])
"""


def test_a_process_leaves_nothing_for_the_next(start: Start) -> None:
    """What it was unpacked from is a file of its own: no attribute, no position is found by another worker."""
    [builder] = start(LEAVING, outputs=[Field("y", "float32", (2,))], role="build")
    builder.imported(60)
    tree = builder.packed()
    for _ in range(2):
        worker = start(tree, outputs=[Field("y", "float32", (2,))])[-1]
        worker.imported(60)
        worker.inputs.write([torch.zeros(1)])
        worker.call(60)
        assert worker.outputs.read()[0].tolist() == [1, 0]
    os.close(tree)


IMPORTING = """
import os, sys

class Watch:
    def find_spec(name, path, target=None):
        if name == "torch.functional":
            print(sorted(os.sched_getaffinity(0)))

sys.meta_path.insert(0, Watch)
import justgoal.evaluation.worker
"""


def test_torch_is_imported_on_any_core() -> None:
    """Its OpenMP, which binds the thread that loads it, is there before: else both processes of a pair share a core."""
    cores = sorted(os.sched_getaffinity(0))
    places = ",".join(f"{{{core}}}" for core in reversed(cores))
    environment = {**os.environ, "OMP_PROC_BIND": "spread", "OMP_PLACES": places}
    command = [sys.executable, "-c", IMPORTING]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert told == f"{cores}\n"


BUSY = """
import threading, time, torch

def spin():
    while True:
        pass

threading.Thread(target=spin, daemon=True).start()

def run(x):
    if x.item() == 1:
        time.sleep(1000)
    return x
"""


def cpu_seconds() -> float:
    """Of all our workers together."""
    used = 0.0
    for pid, command in descendants().items():
        if "/opt/justgoal/worker.py" in command:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


def test_frozen_outside_its_windows(start: Start) -> None:
    """A thread that never rests gets no time but in a window, and time runs out in one only."""
    [worker] = start(BUSY)

    def rests() -> bool:
        before = cpu_seconds()
        time.sleep(0.3)
        return worker.freezer.frozen() and cpu_seconds() - before < 0.1

    worker.imported(60)
    assert rests()
    worker.inputs.write([0.0])
    worker.call(60)
    assert rests()
    worker.inputs.write([1.0])
    with pytest.raises(CallFailed) as failure:
        worker.call(0.5)
    assert (failure.value.kind, str(failure.value)) == ("timeout", "a call had not ended after 0.5 s")
    assert rests()


ENDING = """
import os, socket

def run(x):
    if x.item() == 1:
        socket.socket(fileno=os.dup(3)).send(b"ok")
        os._exit(0)
    return x
"""


def test_a_worker_that_has_ended_fails_every_call(start: Start) -> None:
    [worker] = start(ENDING)
    worker.imported(60)
    worker.inputs.write([1.0])
    worker.call(60)
    for _ in range(3):
        with pytest.raises(CallFailed) as failure:
            worker.call(60)
        assert (failure.value.kind, failure.value.detail) == ("crash", "")
    assert worker.ending() == "the process ended by itself"


@pytest.mark.slow
def test_a_build_that_prints_for_ever_is_late_all_the_same(start: Start) -> None:
    [worker] = start("import time\nprint('begin')\nwhile True:\n    print('.', flush=True)\n    time.sleep(0.01)\n",
                     role="build")  # fmt: skip
    begun = time.monotonic()
    with pytest.raises(CallFailed, match=r"^importing had not ended after 4 s$"):
        worker.imported(4)
    assert time.monotonic() - begun < 60
    assert worker.printed().startswith("begin\n.\n.\n")


BUILDS = """
import os, pathlib

here = pathlib.Path("/solution")
files = sorted(set(os.listdir(here)) - {"__pycache__"})

def run(x):
    if x.item() == 0:
        (here / "made").write_bytes(b"made")
        os.link(here / "made", here / "again")
        os.symlink("made", here / "link")
        os.mkfifo(here / "fifo")
    elif x.item() == 1:
        (here / "big").write_bytes(bytes(5 << 20))
    else:
        assert files == ["again", "link", "made", "solution.py"], files
        assert (here / "again").read_text() == (here / "link").read_text() == "made"
    return x
"""


@pytest.mark.slow
def test_what_a_build_may_leave(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and links as they are, up to a size; what is neither stays behind."""
    monkeypatch.setattr(module, "TREE_CAP", 4 << 20)
    [building] = start(BUILDS, role="build")
    building.imported(60)
    building.inputs.write([0.0])
    building.call(60)
    tree = building.packed()
    building.freezer.freeze()
    building.inputs.write([1.0])
    building.call(60)
    with pytest.raises(CallFailed, match=r"^its files take more than 4 MB after the build$"):
        building.packed()
    later = start(tree)[-1]
    os.close(tree)
    later.imported(60)
    later.inputs.write([2.0])
    later.call(60)


SPIN = """
import time

def run(x):
    end = time.monotonic() + {seconds}
    while time.monotonic() < end:
        pass
    return x
"""


@pytest.mark.slow
def test_time_is_that_of_the_solution(start: Start) -> None:
    """Twice the time is twice the figure, once that of nothing is taken off."""
    seconds = (0.0, 0.02, 0.04)
    parties = start(*(SPIN.format(seconds=one) for one in seconds))
    times: dict[Worker, list[float]] = {worker: [] for worker in parties}
    for worker in parties:
        worker.imported(60)
        worker.call(60)
    with undisturbed():
        for _ in range(9):
            for worker in random.sample(parties, 3):
                worker.inputs.write([1.0])
                times[worker].append(worker.call(60))
    nothing, one, two = (statistics.median(times[worker]) for worker in parties)
    assert min(times[parties[1]]) > 0.02
    assert (two - nothing) / (one - nothing) == pytest.approx(2.0, rel=0.15)
    assert nothing < one / 4


def test_undisturbed() -> None:
    """No garbage collection, one core and short sleeps inside."""
    cores, slack = os.sched_getaffinity(0), timer_slack()
    with undisturbed():
        assert (gc.isenabled(), os.sched_getaffinity(0), timer_slack()) == (False, {min(cores)}, 1)
    assert (gc.isenabled(), os.sched_getaffinity(0), timer_slack()) == (True, cores, slack)
    with pytest.raises(ZeroDivisionError), undisturbed():
        _ = 1 / 0
    assert (gc.isenabled(), os.sched_getaffinity(0), timer_slack()) == (True, cores, slack)


def timer_slack() -> int:
    """Nanoseconds, of this thread."""
    return int(Path(f"/proc/{threading.get_native_id()}/timerslack_ns").read_text())


WAITING = """
import os, torch

def run(x):
    core = int(open("/proc/thread-self/stat").read().rpartition(")")[2].split()[36])
    return torch.tensor([float(len(os.sched_getaffinity(0))), float(core)])
"""


def test_workers_wait_on_the_last_core(start: Start) -> None:
    """The judge's is the first one. A solution begins there and may go anywhere."""
    cores = os.sched_getaffinity(0)
    [worker] = start(WAITING, outputs=[Field("y", "float32", (2,))])
    worker.imported(60)
    for _ in range(5):
        worker.inputs.write([torch.zeros(1)])
        worker.call(60)
        assert worker.outputs.read()[0].tolist() == [len(cores), max(cores)]


def test_the_blank_says_how_long_it_has_spun(judge: Judge) -> None:
    """What is left of its window is the window's own cost: it hardly depends on how long the call is."""
    [blank] = Workers(judge.runtime, SECONDS, SECONDS, threads()).start([sealed(solution(BLANK.decode()).tar())])
    blank.imported(60)
    spun = []
    for seconds in (0.0, 0.05):
        assert 0 < cost(blank, seconds) < 0.05
        spun.append(blank.outputs.read()[0].item())
    blank.close()
    assert 0 <= spun[0] < 0.05 <= spun[1]
