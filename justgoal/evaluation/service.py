"""The judge's process: takes one order after the other from the runtime, and prepares secret draws in between.

Its descriptor 3 is a packet socket to the runtime. Orders are JSON, descriptors of tar files travel beside them; every
order but `prepare` is answered once with `done` or `failed`. While it works it asks for workers over the same socket.
"""

import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from justgoal.errors import JustgoalError, UsageError
from justgoal.evaluation import devices
from justgoal.evaluation.bench import Bench
from justgoal.evaluation.checking import Check, Lineup
from justgoal.evaluation.draws import Problem
from justgoal.evaluation.experts import Expert
from justgoal.evaluation.improvement import Rule
from justgoal.evaluation.judge import Judge
from justgoal.evaluation.memory import Field
from justgoal.evaluation.probing import probe
from justgoal.evaluation.workers import Workers
from justgoal.tasks import contract


class Service:
    def __init__(self, runtime: socket.socket, task: str, threads: int, device: str) -> None:
        self._runtime = runtime
        self._judge: Judge | None = None
        self._problem = Problem(contract.task(task))
        arguments = self._problem.task.operator.arguments
        self._fields = [
            Field(s.name, s.dtype, s.shape or (1,), a.scalar)
            for s, a in zip(self._problem.arguments, arguments, strict=True)
        ]
        self._threads = threads
        self._hardware = devices.of(device, threads)
        self._workers = self._taking(self._fields)

    def serve(self) -> None:
        preparing = False
        while True:
            if preparing and not _waiting(self._runtime):
                assert self._judge is not None
                preparing = self._judge.step()
                continue
            message, descriptors, _, _ = socket.recv_fds(self._runtime, 1 << 16, 32)
            if not message:
                return
            order = json.loads(message)
            if order["op"] == "prepare":
                preparing = self._judge is not None
                continue
            preparing = False
            try:
                answer = {"op": "done", **self._carry_out(order, descriptors)}
            except JustgoalError as error:
                answer = failure(error)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            self._runtime.send(json.dumps(answer).encode())

    def _carry_out(self, order: dict[str, Any], trees: Sequence[int]) -> dict[str, Any]:
        if order["op"] == "open":
            blank, *experts = trees
            bench = self._bench(blank)
            expert = Expert(bench, dict(zip(order["experts"], experts, strict=True)))
            self._judge = Judge(bench, expert, Rule(**order["rule"]))
            return {"report": expert.report.to_json()}
        if order["op"] == "check":
            workers = self._taking([*self._fields, Field("number", "int64", (1,), scalar=True)])
            lineups = [Lineup(workers, tree) for tree in trees]
            try:
                check = Check(self._problem, lineups, order["experts"], order["bugs"], self._phase)
                return {"check": check.run()}
            finally:
                for lineup in lineups:
                    lineup.close()
        if order["op"] == "probe":
            blank, solution, *spinning = trees
            bench = self._bench(blank)
            return {"readings": probe(bench, solution, dict(zip(order["spins"], spinning, strict=True)))}
        assert self._judge is not None
        if order["op"] == "evaluate":
            return {"verdict": self._judge.evaluate(trees[0]).to_json()}
        if order["op"] == "final":
            return {"verdict": self._judge.final(trees[0]).to_json()}
        if order["op"] == "crown":
            self._judge.crown(trees[0], order["mark"])
        return {}

    def _taking(self, arguments: Sequence[Field]) -> Workers:
        """Workers of solutions that take these arguments, and return what the task does."""
        outputs = [Field(s.name, s.dtype, s.shape) for s in self._problem.outputs]
        return Workers(self._runtime, arguments, outputs, self._threads, self._hardware.worker)

    def _bench(self, blank: int) -> Bench:
        return Bench(self._problem, self._workers, blank, self._phase, self._hardware)

    def _phase(self, text: str) -> None:
        self._workers.tell({"op": "phase", "text": text})


def failure(error: JustgoalError) -> dict[str, Any]:
    return {"op": "failed", "error": str(error), "usage": isinstance(error, UsageError)}


def _waiting(channel: socket.socket) -> bool:
    with suppress(BlockingIOError):
        channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return True
    return False


def main() -> None:
    task, threads, device = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    runtime = socket.socket(fileno=3)
    try:
        service = Service(runtime, task, threads, device)
    except JustgoalError as error:
        runtime.send(json.dumps(failure(error)).encode())
        return
    runtime.send(json.dumps({"op": "done"}).encode())
    service.serve()


if __name__ == "__main__":
    main()
