"""The runtime's end of the judge: starts its process and the workers that it asks for, and passes orders and verdicts.

Imports no torch: this runs in the runtime process, which holds the key and stays small.
"""

import json
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import justgoal
from justgoal import owners
from justgoal.errors import EvaluatorFailed, UsageError
from justgoal.evaluation import planting
from justgoal.evaluation.collect import Solution, collect
from justgoal.evaluation.improvement import DEFAULT_RULE, Rule
from justgoal.evaluation.verdict import ExpertReport, Verdict
from justgoal.sandboxes import JUDGE_UID, UID, Engine, Limits, Mount, Sandbox, Spec, mounts
from justgoal.sandboxes.gpus import Gpu
from justgoal.tasks.contract import Task

PYTHON = "/opt/venv/bin/python"
CACHE = "/solution/.cache"
BLANK = Path(__file__).with_name("blank.py").read_bytes()
CUDA_BLANK = Path(__file__).with_name("devices").joinpath("cuda_blank.py").read_bytes()
CUDA_WORKER = ("devices/cuda_worker.py", "devices/cuda_driver.py", "worker.py")
"""What a worker on a CUDA device gets of this folder; it is started with the first."""
TREE_ROOM = 1 << 30


def threads() -> int:
    """Cores that an operator may use."""
    return len(os.sched_getaffinity(0))


def compute_environment() -> dict[str, str]:
    """The same for every party, and for the agent who tries things out before. All of it measured:

    A spinning OpenMP pool beside one busy process cost 12x at the 90th percentile; one that never spins pays a wake-up
    in every small operator, which made torch's experts 1.4 to 2.4x slower. So it spins for some microseconds.
    Eager torch's big temporaries fault their pages in anew on every call unless malloc keeps them. torch.compile
    keeps precompiled headers outside of its cache, so that every process would make them again, in 7 s.
    """
    return {
        "OMP_NUM_THREADS": str(threads()),
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "3000",
        "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "MALLOC_TOP_PAD_": str(64 << 20),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }


def memory(share: int) -> int:
    """Bytes: one `share`-th of what the machine has. Judge and agent get a quarter each, four workers an eighth."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // share


class WorkerHost:
    """Starts the workers that a judge asks for, hands their descriptors over, and ends them."""

    def __init__(
        self, engine: Engine, on_phase: Callable[[str], None] = lambda _: None, gpu: Gpu | None = None
    ) -> None:
        self._engine = engine
        self._gpu = gpu
        self._on_phase = on_phase
        self._workers: dict[int, Sandbox] = {}
        self._started = 0
        self._files = ("worker.py",) if gpu is None else CUDA_WORKER
        self._mount = Mount(_stage_alone(*self._files), "/opt/justgoal")

    def serve(self, channel: socket.socket) -> dict[str, Any] | None:
        """Give the judge at the other end what it asks for until it is done; None when it has gone."""
        while message := channel.recv(1 << 17):
            asked: dict[str, Any] = json.loads(message)
            match asked["op"]:
                case "start":
                    answer, descriptors = self._start(asked["role"])
                    socket.send_fds(channel, [json.dumps(answer).encode()], descriptors)
                case "ended":
                    channel.send(json.dumps(self._ending(self._workers[asked["id"]])).encode())
                case "close":
                    self._workers.pop(asked["id"]).close()
                case "phase":
                    self._on_phase(asked["text"])
                case "done" | "failed":
                    return asked
        return None

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def _start(self, role: str) -> tuple[dict[str, Any], list[int]]:
        sandbox = self._engine.start(_awake_spec() if role == "awake" else self._spec(role))
        self._started += 1
        self._workers[self._started] = sandbox
        descriptors = [sandbox.channel.fileno(), *sandbox.freezer.descriptors]
        if printed := not sandbox.spec.quiet:
            descriptors.append(sandbox.output)
        return {"id": self._started, "freezer": sandbox.freezer.kind, "printed": printed}, descriptors

    def _ending(self, sandbox: Sandbox) -> dict[str, Any]:
        sandbox.freezer.thaw()
        return {
            "exit": sandbox.exit_status(2.0),
            "memory_kills": sandbox.memory_kills(),
            "memory": sandbox.spec.limits.memory,
        }

    def _spec(self, role: str) -> Spec:
        """The same for every party in everything that a solution could look at; a build also shows what it prints.

        OpenMP threads are bound to cores, the first one to the last core, where worker.py waits: a scheduler that packs
        short-lived load leaves two threads on one core until its next tick, 4 ms later (docs/decisions.md).
        """
        variables = {
            "OMP_PROC_BIND": "spread",
            "OMP_PLACES": ",".join(f"{{{core}}}" for core in sorted(os.sched_getaffinity(0), reverse=True)),
            "XDG_CACHE_HOME": CACHE,
            "TORCHINDUCTOR_CACHE_DIR": f"{CACHE}/inductor",
            "TRITON_CACHE_DIR": f"{CACHE}/triton",
            "NUMBA_CACHE_DIR": f"{CACHE}/numba",
            "CUDA_CACHE_PATH": f"{CACHE}/cuda",
            "TORCH_EXTENSIONS_DIR": f"{CACHE}/extensions",
        }
        return Spec(
            role, (PYTHON, f"/opt/justgoal/{Path(self._files[0]).name}"), Limits(memory(8), 1024, threads()), UID,
            mounts=(self._mount,), tmpfs={"/solution": TREE_ROOM},
            environment={**compute_environment(), **variables}, as_pid_1=True, packets=True, quiet=role != "build",
            gpus=_uuids(self._gpu),
        )  # fmt: skip


class Evaluator:
    """One judge on one task. Orders are made one at a time, from one thread."""

    def __init__(
        self,
        task: Task,
        engine: Engine,
        on_phase: Callable[[str], None] = lambda _: None,
        gpu: Gpu | None = None,
    ) -> None:
        self._task = task
        self._gpu = gpu
        self._blank = Solution({"solution.py": BLANK if gpu is None else CUDA_BLANK})
        self._host = WorkerHost(engine, on_phase, gpu)
        self._judge = engine.start(self._judge_spec())
        self._finished()

    def open(self, only: str | None = None, rule: Rule = DEFAULT_RULE) -> ExpertReport:
        """Build and measure the experts; about a minute where one of them compiles.

        `only` names the one that counts already, when a run goes on. What improves on a champion is decided by `rule`.
        """
        listed = [expert for expert in self._task.operator.experts if only in (None, expert.name)]
        experts = {expert.name: collect(expert.folder) for expert in listed}
        trees = [self._blank, *experts.values()]
        answer = self._order({"op": "open", "experts": list(experts), "rule": asdict(rule)}, trees)
        return ExpertReport.from_json(answer["report"])

    def probe(self, spins: Mapping[float, Solution]) -> dict[str, list[float]]:
        """Instead of `open`: measure noise with the task's only expert and solutions that spin for so many seconds.

        See probing.py for what comes back.
        """
        [expert] = self._task.operator.experts
        trees = [self._blank, collect(expert.folder), *spins.values()]
        answer = self._order({"op": "probe", "spins": list(spins)}, trees)
        readings: dict[str, list[float]] = answer["readings"]
        return readings

    def check(self) -> dict[str, Any]:
        """How the task's judge fares with what is known to be wrong or right; see checking.py for what comes back."""
        names = {
            "experts": [one.name for one in self._task.operator.experts],
            "bugs": [bug.name for bug in self._task.bugs],
        }
        found: dict[str, Any] = self._order({"op": "check", **names}, planting.lineups(self._task))["check"]
        return found

    def evaluate(self, solution: Solution) -> Verdict:
        return Verdict.from_json(self._order({"op": "evaluate"}, [solution])["verdict"])

    def final(self, solution: Solution) -> Verdict:
        """Judge a champion afresh, with more draws and more pairs."""
        return Verdict.from_json(self._order({"op": "final"}, [solution])["verdict"])

    def crown(self, solution: Solution, mark: float) -> None:
        """Take up the champion of an earlier process of this run; `mark` is that of the ratchet (improvement.py)."""
        self._order({"op": "crown", "mark": mark}, [solution])

    def prepare(self) -> None:
        """Nobody needs the machine: make secret draws, at idle priority, until `pause`."""
        self._judge.background(True)
        try:
            self._judge.channel.send(b'{"op": "prepare"}')
        except OSError as error:
            raise EvaluatorFailed(f"the judge cannot be reached: {error.strerror}") from error

    def pause(self) -> None:
        """Stop preparing; returns when it has stopped, within the time of one draw."""
        self._judge.background(False)
        self._order({"op": "pause"}, [])

    def close(self) -> None:
        self._host.close()
        self._judge.close()

    def _order(self, order: dict[str, Any], solutions: Sequence[Solution]) -> dict[str, Any]:
        descriptors = [_memory_file(solution.tar()) for solution in solutions]
        try:
            socket.send_fds(self._judge.channel, [json.dumps(order).encode()], descriptors)
        except OSError as error:
            raise EvaluatorFailed(f"the judge cannot be reached: {error.strerror}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return self._finished()

    def _finished(self) -> dict[str, Any]:
        answer = None
        with suppress(ConnectionError):  # it may end with our last message unread
            answer = self._host.serve(self._judge.channel)
        if answer is None:
            raise EvaluatorFailed(f"the judge ended: {self._last_words()}")
        if answer["op"] == "failed":
            raise (UsageError if answer["usage"] else EvaluatorFailed)(answer["error"])
        return answer

    def _last_words(self) -> str:
        try:
            text = os.read(self._judge.output, 1 << 16).decode(errors="replace")
        except BlockingIOError:
            text = ""
        lines = text.strip().splitlines()
        return lines[-1] if lines else f"exit status {self._judge.exit_status(1.0)}"

    def _judge_spec(self) -> Spec:
        operator = self._task.operator.folder
        home = f"/opt/judge/operators/{operator.name}"
        package = Path(justgoal.__file__).parent
        return Spec(
            "judge",
            (PYTHON, "-m", "justgoal.evaluation.service", f"{home}/{self._task.workload.name}", str(threads()),
             "cuda" if self._gpu else "cpu"),
            Limits(memory(4), 1024, threads()), JUDGE_UID,
            mounts=(Mount(mounts.stage_tree(package), "/opt/judge/justgoal"), Mount(mounts.stage_tree(operator), home)),
            environment={**compute_environment(), "PYTHONPATH": "/opt/judge"}, packets=True, gpus=_uuids(self._gpu),
        )  # fmt: skip


def _awake_spec() -> Spec:
    """See awake.py; it yields to everything, and the judge has it frozen when no window is open."""
    mount = Mount(_stage_alone("awake.py"), "/opt/justgoal")
    command = (PYTHON, "-ES", "/opt/justgoal/awake.py")
    return Spec("awake", command, Limits(64 << 20, 64 + threads(), threads()), UID, mounts=(mount,), as_pid_1=True,
                packets=True, quiet=True, idle=True)  # fmt: skip


def _uuids(gpu: Gpu | None) -> tuple[str, ...]:
    return (gpu.uuid,) if gpu else ()


def _stage_alone(*names: str) -> Path:
    """A few files of this folder by themselves: a sandbox sees nothing else of justgoal."""
    folder = owners.make_folder("alone")
    try:
        for name in names:
            shutil.copy(Path(__file__).parent / name, folder)
        return mounts.stage_tree(folder)
    finally:
        owners.remove_folder(folder)


def _memory_file(data: bytes) -> int:
    descriptor = os.memfd_create("tree", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    return descriptor
