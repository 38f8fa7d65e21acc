"""Where solutions are built, called and timed: the judge's hands. What it means is decided in judge.py.

Whoever is timed is one of four parties. A failed call is the candidate's own fault (Rejected), loses the pair for a
champion (Lost), and is nobody's fault when a trusted party fails (EvaluatorFailed).
"""

import io
import os
import random
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from justgoal.errors import EvaluatorFailed
from justgoal.evaluation.clock import CallFailed, undisturbed
from justgoal.evaluation.devices import Hardware, Reading, subtracted
from justgoal.evaluation.draws import PUBLIC_SEED, Draw, Problem
from justgoal.evaluation.workers import BUILD_LIMIT, IMPORT_LIMIT, Worker, Workers

CANDIDATE, CHAMPION, EXPERT, BLANK = "candidate", "champion", "expert", "blank"
FIRST_CALL_LIMIT = 60.0
BLANK_LIMIT = 0.01
"""Seconds that the blank spins at most: the cost of longer windows differs from it by less than 0.5 % of them."""


class Rejected(Exception):
    """A solution is not accepted: kind and reason of its verdict, and what may be shown of its output."""

    def __init__(self, kind: str, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.kind, self.reason, self.output = kind, reason, output


class Lost(Exception):
    """The champion failed a call: it has lost this pair."""


@dataclass(frozen=True)
class Party:
    """A worker and whose solution is in it."""

    role: str
    worker: Worker


class Bench:
    def __init__(
        self, problem: Problem, workers: Workers, blank: int, phase: Callable[[str], None], hardware: Hardware
    ) -> None:
        self.problem = problem
        self.phase = phase
        self.call_limit = FIRST_CALL_LIMIT
        self._lines = 0
        self._workers = workers
        self._hardware = hardware
        self._awake = workers.keep_awake()
        self._blank = Party(BLANK, hardware.blank(workers, blank))
        self._import(self._blank)

    def build(self, source: int, meanwhile: Callable[[], bool] | None = None) -> int:
        """Import and call on public inputs in a build sandbox; returns the tree with all that this added to it.

        It is given no hidden input, so everything that it prints, tracebacks included, may be shown. For `meanwhile`
        see Worker.
        """
        self._lines = _lines(source)
        [worker] = self._workers.start([source], role="build")
        worker.meanwhile = meanwhile
        try:
            worker.imported(BUILD_LIMIT)
            for seed, limit in ((PUBLIC_SEED, BUILD_LIMIT), (PUBLIC_SEED + 1, FIRST_CALL_LIMIT)):
                self._write(worker, Draw("", self.problem.inputs(seed=seed)))
                worker.call(limit)
            return worker.packed()
        except CallFailed as failure:
            where = "" if failure.kind == "build" else ", on public inputs"
            raise Rejected(failure.kind, self._reason(worker, failure) + where, worker.printed()) from failure
        finally:
            worker.close()

    def start(self, trees: Sequence[tuple[str, int]]) -> list[Party]:
        """Fresh processes, started side by side and all of the same age; whoever asked for them closes them."""
        workers = self._workers.start([tree for _, tree in trees])
        started = [Party(role, worker) for (role, _), worker in zip(trees, workers, strict=True)]
        try:
            for party in started:
                self._import(party)
        except BaseException:
            _close(started)
            raise
        return started

    @contextmanager
    def parties(self, trees: Sequence[tuple[str, int]]) -> Iterator[list[Party]]:
        """The same for as long as the context lasts, in which no core goes to sleep."""
        started = self.start(trees)
        self._awake.thaw()
        try:
            yield started
        finally:
            self._awake.freeze()
            _close(started)

    def call(self, party: Party, draw: Draw, *, first: bool = False) -> list[torch.Tensor]:
        """One call that nobody times; a first one may load caches and so may take longer."""
        self._write(party.worker, draw)
        with self._blame(party):
            party.worker.call(max(FIRST_CALL_LIMIT, self.call_limit) if first else self.call_limit)
        return party.worker.outputs.read()

    def warm_up(self, parties: Sequence[Party], draws: Sequence[Draw], calls: range) -> None:
        """Calls with these numbers in the lives of all parties: they stay of equal age."""
        for number in calls:
            for party in parties:
                self.call(party, draws[number % len(draws)], first=number == 0)

    def rounds(
        self, parties: Sequence[Party], draws: Sequence[Draw], seen: Callable[[Party, Draw], None] | None = None
    ) -> list[list[float]]:
        """Time every party on each draw, in random order; seconds by party and round, the cost of a window subtracted.

        Nothing of ours runs in a window, and all but the party being timed are frozen. `seen` is called after every
        call, so that a party cannot tell by the pause after it whether its outputs matter.
        """
        readings: list[list[Reading]] = [[] for _ in parties]
        costs: list[Reading] = []
        with undisturbed():
            self._hardware.warm_up(self._blank.worker)
            for draw in draws:
                here = replace(draw, inputs=self._hardware.resident(draw.inputs))
                for index in random.sample(range(len(parties)), len(parties)):
                    readings[index].append(self._timed(parties[index], here))
                    if seen is not None:
                        seen(parties[index], draw)
                costs.append(self._cost(parties[-1], here, min(row[-1].seconds for row in readings)))
        return [self._settled(party, row, costs) for party, row in zip(parties, readings, strict=True)]

    def _timed(self, party: Party, draw: Draw) -> Reading:
        self._write(party.worker, draw)
        self._hardware.flush()
        with self._blame(party):
            return self._hardware.read(party.worker, party.worker.call(self.call_limit))

    def _settled(self, party: Party, readings: Sequence[Reading], costs: Sequence[Reading]) -> list[float]:
        """Whoever is trusted is not held against the judge's clock."""
        if party.role == EXPERT:
            return subtracted(readings, costs)
        with self._blame(party):
            return self._hardware.settle(readings, costs)

    def _cost(self, party: Party, draw: Draw, seconds: float) -> Reading:
        """Of a window of about that length, after inputs were written as for `party`."""
        self._write(party.worker, draw)
        self._hardware.flush()
        with self._blame(self._blank):
            return self._hardware.cost(self._blank.worker, min(seconds, BLANK_LIMIT))

    def _write(self, worker: Worker, draw: Draw) -> None:
        """New contents in the same storage; whatever was there as output is gone."""
        worker.inputs.write(draw.inputs)
        worker.outputs.poison()

    def _import(self, party: Party) -> None:
        with self._blame(party):
            party.worker.imported(IMPORT_LIMIT)

    @contextmanager
    def _blame(self, party: Party) -> Iterator[Any]:
        try:
            yield
        except CallFailed as failure:
            if party.role == CHAMPION:
                raise Lost from failure
            reason = self._reason(party.worker, failure)
            if party.role == CANDIDATE:
                raise Rejected("crash" if failure.kind == "build" else failure.kind, reason) from failure
            raise EvaluatorFailed(f"the {party.role} failed: {reason}") from failure

    def _reason(self, worker: Worker, failure: CallFailed) -> str:
        """In words. A line is told only if solution.py has it: a solution that crashes on purpose can say little."""
        known = failure.line is not None and 0 < failure.line <= self._lines
        return (failure.detail or worker.ending()) + (f" at line {failure.line} of the solution" if known else "")


def _close(parties: Sequence[Party]) -> None:
    for party in parties:
        party.worker.close()


def _lines(source: int) -> int:
    """How many lines solution.py has."""
    data = os.pread(source, os.fstat(source).st_size, 0)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        file = archive.extractfile("solution.py")
        return len(file.read().splitlines()) if file else 0


class Stopwatch:
    """Seconds by phase of an evaluation, for its verdict."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + now - self._since, 3)
        self._since = now
