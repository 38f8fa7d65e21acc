"""Workers for the judge: asks the runtime for sandboxes, hands solutions over, and says how a worker ended.

The judge can start nothing itself. It asks over its channel to the runtime and receives descriptors: the worker's
socket, its open freezer files and, for a build, the pipe with what it prints.
"""

import fcntl
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from justgoal.errors import EvaluatorFailed
from justgoal.evaluation.clock import CallFailed, Party
from justgoal.evaluation.memory import Block, Field, Memory, own_copy, sealed
from justgoal.evaluation.worker import PACK
from justgoal.freezer import Freezer, received

IMPORT_LIMIT = 120.0
BUILD_LIMIT = 600.0
TREE_CAP = 256 << 20
PRINTED_CAP = 4096
DRAINS = 32  # reads of 64 KB: a pipe holds 1 MB at most, and its writer may go on writing


class Worker(Party):
    """One sandbox with one solution in it; `printed` keeps the first and last part of a build's output.

    `meanwhile`, which does a piece of work and says whether more is left, is called while a build is waited for.
    """

    block: type[Memory] = Block

    def __init__(
        self, workers: "Workers", number: int, freezer: Freezer, channel: int, pipe: int | None = None
    ) -> None:
        super().__init__(
            socket.socket(fileno=channel),
            freezer,
            self.block(workers.arguments, writable_by_worker=False),
            self.block(workers.outputs, writable_by_worker=True),
        )
        self._workers = workers
        self._number = number
        self._pipe = pipe
        self._head, self._tail = b"", b""
        self.meanwhile: Callable[[], bool] | None = None

    def answer(self, limit: float) -> tuple[bytes, bool]:
        if self._pipe is None:
            return super().answer(limit)
        poller = select.poll()
        poller.register(self.channel, select.POLLIN)
        poller.register(self._pipe, select.POLLIN)
        end = time.monotonic() + limit
        while (left := end - time.monotonic()) > 0:
            ready = [descriptor for descriptor, _ in poller.poll(0 if self.meanwhile else left * 1000)]
            if not ready and self.meanwhile and not self.meanwhile():
                self.meanwhile = None
            if self._pipe in ready and not self._drain():
                poller.unregister(self._pipe)
            if self.channel.fileno() in ready:
                return self._packet(), False
        return b"", True

    def structure(self, report: dict[str, Any]) -> str:
        """On public inputs the worker may say it in its own words."""
        return super().structure(report) if self._pipe is None else str(report.get("what"))[:300]

    def _drain(self) -> bool:
        """Read once of what has been printed; False when nothing is left for now or for ever."""
        assert self._pipe is not None
        try:
            data = os.read(self._pipe, 1 << 16)
        except BlockingIOError:
            return False
        room = max(PRINTED_CAP // 2 - len(self._head), 0)
        self._head += data[:room]
        self._tail = (self._tail + data[room:])[-PRINTED_CAP // 2 :]
        return bool(data)

    def printed(self) -> str:
        for _ in range(DRAINS):
            if self._pipe is None or not self._drain():
                break
        return (self._head + self._tail).decode(errors="replace").replace("\0", "")

    def packed(self) -> int:
        """The built tree as a sealed memfd; CallFailed("build") when there is none, or more than TREE_CAP of it."""
        self.freezer.thaw()
        try:
            self.channel.send(PACK)
            ready, _, _ = select.select([self.channel], [], [], IMPORT_LIMIT)
            descriptors = socket.recv_fds(self.channel, 4096, 1)[1] if ready else []
            if not descriptors:
                raise CallFailed("build", "its files could not be packed after the build")
            with os.fdopen(descriptors[0], "rb", closefd=True) as file:
                data = os.pread(file.fileno(), TREE_CAP + 1, 0)
        except OSError as error:
            raise CallFailed("build", "its files could not be packed after the build") from error
        if len(data) > TREE_CAP:
            raise CallFailed("build", f"its files take more than {TREE_CAP >> 20} MB after the build")
        return sealed(data)

    def ending(self) -> str:
        """How the process ended, in words; an exit code is told of a build only, since a solution can choose it."""
        status = self._workers.ask({"op": "ended", "id": self._number})[0]
        if status["memory_kills"]:
            return f"it was killed for using more than {status['memory'] >> 20} MB of memory"
        code = status["exit"]
        if code is None:
            return "it closed its channel to the judge"
        if -code in set(signal.Signals):
            hint = " (or aborted); inputs are read-only" if -code in (signal.SIGSEGV, signal.SIGBUS) else ""
            return f"the process died of {signal.Signals(-code).name}{hint}"
        told = code if code >= 0 else 128 - code  # no signal has that number, so it was an exit code
        return "the process ended by itself" + (f" with exit code {told}" if self._pipe is not None else "")

    def close(self) -> None:
        self._workers.tell({"op": "close", "id": self._number})
        super().close()
        if self._pipe is not None:
            os.close(self._pipe)


class Workers:
    """Starts workers for one workload: `arguments` and `outputs` say what crosses."""

    def __init__(
        self,
        runtime: socket.socket,
        arguments: Sequence[Field],
        outputs: Sequence[Field],
        threads: int,
        worker: type[Worker] = Worker,
    ) -> None:
        self._worker = worker
        self.runtime = runtime
        self.arguments = arguments
        self.outputs = outputs
        self.threads = threads

    def tell(self, message: dict[str, Any]) -> None:
        self.runtime.send(json.dumps(message).encode())

    def ask(self, message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        self.tell(message)
        answer, descriptors, _, _ = socket.recv_fds(self.runtime, 1 << 16, 4)
        if not answer:
            raise EvaluatorFailed("the runtime closed its channel to the judge")
        for descriptor in descriptors:
            fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        return json.loads(answer), descriptors

    def keep_awake(self) -> Freezer:
        """Start what keeps the cores awake (awake.py); it stays frozen until its freezer is thawed."""
        _, freezer, channel, *_ = self._ask_for("awake")
        os.close(channel)
        freezer.freeze()
        return freezer

    def start(self, trees: Sequence[int], role: str = "worker") -> list[Worker]:
        """Start one worker for each tree, side by side. Each is handed its solution; call `imported` on it next."""
        started = []
        for tree in trees:
            worker = self._worker(self, *self._ask_for(role))
            own = own_copy(tree)
            worker.setup(own, self.threads)
            os.close(own)
            started.append(worker)
        return started

    def _ask_for(self, role: str) -> tuple[int, Freezer, int, int | None]:
        """A new sandbox: its number, freezer and channel, and the pipe with what it prints where that is read."""
        answer, descriptors = self.ask({"op": "start", "role": role})
        channel, *rest = descriptors
        pipe = rest.pop() if answer["printed"] else None
        return answer["id"], received(answer["freezer"], rest), channel, pipe
