"""The judge: correct or not, how fast, and whether that is an improvement. A process of its own, which sees the task
and the secret inputs but no key, no network and no host; see workers.py for how it gets workers.

One evaluation: build in a sandbox that sees public inputs only; start the candidate beside the champion; compare its
outputs on every checked draw; time both, and the warm expert, in random order on contents that no party has seen,
some of which are checked too; and repeat with fresh pairs of processes while they all say that it is faster.
"""

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from justgoal import figures
from justgoal.errors import EvaluatorFailed
from justgoal.evaluation import improvement
from justgoal.evaluation.bounds import Errors
from justgoal.evaluation.clock import CallFailed, Flush, undisturbed
from justgoal.evaluation.draws import PUBLIC_SEED, Comparison, Draw, Draws, Problem, prepare
from justgoal.evaluation.improvement import MINIMUM_GAIN, PAIRS, Rounds
from justgoal.evaluation.memory import Field
from justgoal.evaluation.verdict import ExpertReport, Verdict
from justgoal.evaluation.workers import BUILD_LIMIT, IMPORT_LIMIT, Worker, Workers

FIRST_CALL_LIMIT = 60.0
FIRST_CORRECT_PAIRS = 2
NULL_PAIRS = 3
FINAL_PAIRS = 7
FINAL_DRAWS = 3
WARM_CALLS = 3
DRAWS_AT_CALIBRATION = 2


class Rejected(Exception):
    """A solution is not accepted: kind and reason of its verdict, and what may be shown of its output."""

    def __init__(self, kind: str, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.kind, self.reason, self.output = kind, reason, output


@dataclass
class Contender:
    """A built solution: its tree, sealed."""

    tree: int


@dataclass
class Standing:
    """What judging one solution has gathered so far."""

    comparison: Comparison
    pairs: list[Rounds] = field(default_factory=list)

    def ratios(self) -> tuple[float, ...]:
        return tuple(improvement.ratio(p.champion, p.candidate) for p in self.pairs if p.champion)


class Judge:
    def __init__(self, problem: Problem, workers: Workers, noop: int, phase: Callable[[str], None]) -> None:
        self.problem = problem
        self.workers = workers
        self.phase = phase
        self.champion: Contender | None = None
        self.best = 0.0
        self.report: ExpertReport | None = None
        self._flush = Flush()
        self._calibrated: dict[str, list[Errors]] = {}
        self._preparing: Iterator[Draws | None] | None = None
        self._ready: Draws | None = None
        noop_fields = [Field("x", "float32", (1,))]
        [self._noop] = Workers(workers.runtime, noop_fields, noop_fields, workers.threads).start([noop])
        self._expert_tree: int = -1
        self._expert: Worker | None = None
        with self._trusted("the no-op"):
            self._noop.imported(IMPORT_LIMIT)
            self._noop.call(FIRST_CALL_LIMIT)

    # ---------------------------------------------------------------- the verdict

    def evaluate(self, source: int) -> Verdict:
        """The verdict on the solution whose files are in the tar file `source`."""
        started = time.monotonic()
        try:
            self.phase("building")
            candidate = Contender(self.build(source))
        except Rejected as rejected:
            return self._rejection(rejected, {"build": time.monotonic() - started})
        built = time.monotonic()
        draws = self.take_draws()
        standing = Standing(Comparison(self.problem))
        try:
            limit = PAIRS if self.champion else FIRST_CORRECT_PAIRS
            for number in range(limit):
                self._pair(candidate, self.champion, draws, standing, first=number == 0)
                if self.champion and standing.ratios()[-1] <= 1 + MINIMUM_GAIN:
                    break
            verdict = self._correct(candidate, standing)
        except Rejected as rejected:
            verdict = self._rejection(rejected, {})
        seconds = {"build": built - started, "judge": time.monotonic() - built}
        return Verdict(**{**vars(verdict), "seconds": seconds})

    def final(self, source: int) -> Verdict:
        """The champion judged afresh: fresh experts too, more draws, more pairs; what is reported comes from here."""
        started = time.monotonic()
        standing = Standing(Comparison(self.problem))
        try:
            self.phase("building")
            candidate = Contender(self.build(source))
            for number in range(FINAL_PAIRS):
                draws = self.take_draws() if number < FINAL_DRAWS else draws
                fresh = Contender(self._expert_tree)
                self._pair(candidate, fresh, draws, standing, first=number < FINAL_DRAWS)
        except Rejected as rejected:
            return self._rejection(rejected, {"judge": time.monotonic() - started})
        for pair in standing.pairs:
            pair.expert = pair.champion
        verdict = self._verdict(standing, fresh_expert=True)
        return Verdict(**{**vars(verdict), "seconds": {"judge": time.monotonic() - started}})

    def _correct(self, candidate: Contender, standing: Standing) -> Verdict:
        """Correct. Improved, when every pair says so and the best speedup of the run is exceeded too."""
        verdict = self._verdict(standing, fresh_expert=False)
        assert verdict.speedup is not None
        ratios = standing.ratios()
        faster = all(ratio > 1 + MINIMUM_GAIN for ratio in ratios)
        improved = faster and verdict.speedup > self.best
        reason = ""
        if not improved:
            reason = f"{figures.speedup(min(ratios))}" if not faster else (
                f"faster than the champion by {figures.speedup(min(ratios))}, yet not than the best speedup "
                f"of this run, {figures.speedup(self.best)}"
            )  # fmt: skip
        else:
            if self.champion is not None:
                os.close(self.champion.tree)
            self.champion = candidate
        self.best = max(self.best, verdict.speedup)
        return Verdict(**{**vars(verdict), "improved": improved, "reason": reason, "ratios": ratios})

    def _verdict(self, standing: Standing, *, fresh_expert: bool) -> Verdict:
        assert self.report is not None
        null = self.report.null
        return Verdict(
            "correct",
            latency=statistics.median(statistics.median(p.candidate) for p in standing.pairs),
            expert_latency=statistics.median(statistics.median(p.expert) for p in standing.pairs),
            expert=self.report.chosen,
            speedup=improvement.speedup(standing.pairs),
            resolution=improvement.resolution(standing.pairs, null, fresh_expert=fresh_expert),
            errors=self._named(standing.comparison),
        )

    def _rejection(self, rejected: Rejected, seconds: dict[str, float]) -> Verdict:
        return Verdict(rejected.kind, rejected.reason, output=rejected.output, seconds=seconds)

    def _named(self, comparison: Comparison) -> dict[str, tuple[float, float]]:
        return {self.problem.outputs[i].name: pair for i, pair in comparison.errors.items()}

    # ---------------------------------------------------------------- one pair of processes

    def _pair(
        self, candidate: Contender, opponent: Contender | None, draws: Draws, standing: Standing, *, first: bool
    ) -> None:
        """Start both side by side, give them the same calls, then time them in random order, round by round.

        In the first pair the calls before the clock are the checked draws. Raises Rejected for the candidate; an
        opponent that fails a call has lost the pair.
        """
        trees = [candidate.tree] + ([opponent.tree] if opponent else [])
        parties = self.workers.start(trees)
        try:
            with self._candidate(parties[0]):
                parties[0].imported(IMPORT_LIMIT)
            fit = [self._survives(other, lambda o=other: o.imported(IMPORT_LIMIT)) for other in parties[1:]]
            parties = parties[:1] + [other for other, alive in zip(parties[1:], fit, strict=True) if alive]
            warm = draws.checked if first else draws.checked[-WARM_CALLS:]
            self.phase("judging: correctness" if first else "judging: timing")
            for index, draw in enumerate(warm):
                limit = self._limit(first_call=index == 0)
                with self._candidate(parties[0]):
                    outputs = self._call(parties[0], draw, limit)
                if first:
                    standing.comparison.add(draw, outputs)
                parties = parties[:1] + [
                    o for o in parties[1:] if self._survives(o, lambda o=o, d=draw, s=limit: self._call(o, d, s))
                ]
            self._accept(standing.comparison)
            self.phase("judging: timing")
            standing.pairs.append(self._rounds(parties, draws, standing.comparison))
            if opponent and len(standing.pairs[-1].champion) < len(standing.pairs[-1].candidate):
                lost = standing.pairs[-1]
                lost.champion = [math.inf] * len(lost.candidate)
        finally:
            for party in parties:
                party.close()

    def _rounds(self, parties: Sequence[Worker], draws: Draws, comparison: Comparison) -> Rounds:
        """The timed part of a pair: in each round every party is called once, on the same contents."""
        assert self._expert is not None and self.report is not None
        measured = Rounds()
        named = [(parties[0], measured.candidate), (self._expert, measured.expert)]
        named += [(party, measured.champion) for party in parties[1:]]
        overhead: list[float] = []
        count = improvement.rounds(self.report.latency)
        outputs: list[tuple[Draw, list[torch.Tensor]]] = []
        with undisturbed():
            for draw in draws.timed[:count]:
                for party, times in random.sample(named, len(named)):
                    if party is parties[0]:
                        with self._candidate(party):
                            times.append(self._timed(party, draw))
                        if draw.reference:
                            outputs.append((draw, party.outputs.read()))
                    elif not self._survives(party, lambda p=party, d=draw, t=times: t.append(self._timed(p, d))):
                        named = [entry for entry in named if entry[0] is not party]
                overhead.append(self._timed(self._noop, None))
        for draw, found in outputs:
            comparison.add(draw, found)
        self._accept(comparison)
        subtracted = statistics.median(overhead)
        for times in (measured.candidate, measured.champion, measured.expert):
            times[:] = [max(t - subtracted, 1e-9) for t in times]
        return measured

    def _timed(self, party: Worker, draw: Draw | None) -> float:
        """One window. Inputs are written and outputs poisoned while everybody is frozen, then the caches flushed."""
        if draw is not None:
            party.inputs.write(draw.inputs)
            party.outputs.poison()
        self._flush()
        return party.call(self._limit())

    def _call(self, party: Worker, draw: Draw, limit: float) -> list[torch.Tensor]:
        """One call that nobody times."""
        party.inputs.write(draw.inputs)
        party.outputs.poison()
        party.call(limit)
        return party.outputs.read()

    def _limit(self, *, first_call: bool = False) -> float:
        """Seconds that a call may take: generous beside the expert, more for a first call, which may load caches."""
        usual = max(2.0, 50 * self.report.latency) if self.report else FIRST_CALL_LIMIT
        return max(FIRST_CALL_LIMIT, usual) if first_call else usual

    def _accept(self, comparison: Comparison) -> None:
        if reason := comparison.reason():
            raise Rejected("wrong", reason)

    @contextmanager
    def _candidate(self, worker: Worker) -> Iterator[None]:
        """A failed call inside is the solution's own fault."""
        try:
            yield
        except CallFailed as failure:
            detail = worker.ending() if failure.detail == "" else failure.detail
            kind = "crash" if failure.kind == "build" else failure.kind
            raise Rejected(kind, detail) from failure

    def _survives(self, worker: Worker, action: Callable[[], Any]) -> bool:
        """Whether an opponent passes; the warm expert is trusted, so its failure is nobody's fault."""
        if worker is self._expert:
            with self._trusted("the expert"):
                action()
            return True
        try:
            action()
        except CallFailed:
            worker.close()
            return False
        return True

    @contextmanager
    def _trusted(self, who: str) -> Iterator[None]:
        try:
            yield
        except CallFailed as failure:
            raise EvaluatorFailed(f"{who} failed: {failure.detail or 'its process ended'}") from failure

    # ---------------------------------------------------------------- building

    def build(self, source: int) -> int:
        """Import and call on public inputs in a build sandbox; returns the tree with all that this added to it.

        No hidden input exists for it, so everything that it prints, tracebacks included, may be shown.
        """
        [worker] = self.workers.start([source], role="build")
        try:
            try:
                worker.imported(BUILD_LIMIT)
                for seed in (PUBLIC_SEED, PUBLIC_SEED + 1):
                    draw = Draw("", self.problem.inputs(seed=seed))
                    self._call(worker, draw, BUILD_LIMIT if seed == PUBLIC_SEED else FIRST_CALL_LIMIT)
                return worker.packed()
            except CallFailed as failure:
                reason = failure.detail or worker.ending()
                raise Rejected(failure.kind, f"{reason} (on public inputs)" if failure.kind != "build" else reason,
                               worker.printed()) from failure  # fmt: skip
        finally:
            worker.close()

    # ---------------------------------------------------------------- experts

    def open(self, sources: dict[str, int]) -> ExpertReport:
        """Measure all experts beside each other, take the fastest that is exact enough, and keep it warm."""
        trees: dict[str, int] = {}
        failed: dict[str, str] = {}
        for name, source in sources.items():
            self.phase(f"building expert {name}")
            try:
                trees[name] = self.build(source)
            except Rejected as rejected:
                failed[name] = rejected.reason
        self.phase("measuring experts")
        latencies, errors = self._measure(trees, failed)
        if not latencies:
            raise EvaluatorFailed("no expert runs here: " + "; ".join(f"{n}: {w}" for n, w in failed.items()))
        chosen = min(latencies, key=lambda name: latencies[name])
        self._expert_tree = trees[chosen]
        self.report = ExpertReport(latencies, errors, chosen, (), failed)
        [self._expert] = self._fresh_experts(1)
        self._calibrate()
        null = tuple(self._null_pair() for _ in range(NULL_PAIRS))
        self.report = ExpertReport(latencies, errors, chosen, null, failed)
        self.start_preparing()
        return self.report

    def _measure(
        self, trees: dict[str, int], failed: dict[str, str]
    ) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """Median latency of each expert in interleaved rounds, and its worst relative error per output."""
        draws = [self.problem.draw() for _ in range(DRAWS_AT_CALIBRATION)]
        workers = dict(zip(trees, self.workers.start(list(trees.values())), strict=True))
        errors: dict[str, dict[str, float]] = {}
        times: dict[str, list[float]] = {name: [] for name in trees}
        try:
            for name, worker in workers.items():
                with self._trusted(f"expert {name}"):
                    worker.imported(IMPORT_LIMIT)
                    found = [self.problem.errors(d, self._call(worker, d, FIRST_CALL_LIMIT)) for d in draws]
                worst = [max(e[i].total for e in found) for i in range(len(found[0]))]
                errors[name] = {o.name: e for o, e in zip(self.problem.outputs, worst, strict=True)}
                if max(worst) > self.problem.policy.cap:
                    failed[name] = f"its error {figures.error(max(worst))} is above {self.problem.policy.cap:.0e}"
            overhead = []
            with undisturbed():
                for index in range(9):
                    for name in random.sample(list(workers), len(workers)):
                        with self._trusted(f"expert {name}"):
                            times[name].append(self._timed(workers[name], draws[index % len(draws)]))
                    overhead.append(self._timed(self._noop, None))
        finally:
            for worker in workers.values():
                worker.close()
        fit = [name for name in trees if name not in failed]
        cost = statistics.median(overhead)
        return {name: statistics.median(times[name]) - cost for name in fit}, errors

    def _fresh_experts(self, count: int) -> list[Worker]:
        experts = self.workers.start([self._expert_tree] * count)
        with self._trusted("the expert"):
            for expert in experts:
                expert.imported(IMPORT_LIMIT)
        return experts

    def _calibrate(self) -> None:
        """The expert's errors on every kind of draw: a bound is never tighter than these."""
        for case in [*self.problem.cases, ""]:
            self.phase("calibrating")
            for _ in range(DRAWS_AT_CALIBRATION):
                draw = self.problem.draw(case)
                found = self.problem.errors(draw, self._expert_outputs(draw.inputs))
                before = self._calibrated.get(case, found)
                self._calibrated[case] = [_larger(a, b) for a, b in zip(found, before, strict=True)]

    def _null_pair(self) -> float:
        """The expert against itself in two fresh processes: what a pair says when there is no difference."""
        self.phase("measuring the noise of this machine")
        pair = self._fresh_experts(2)
        assert self.report is not None
        times: list[list[float]] = [[], []]
        draws = [Draw("", self.problem.inputs()) for _ in range(improvement.rounds(self.report.latency))]
        try:
            with self._trusted("the expert"):
                for expert in pair:
                    self._call(expert, draws[0], FIRST_CALL_LIMIT)
                with undisturbed():
                    for draw in draws:
                        for index in random.sample((0, 1), 2):
                            times[index].append(self._timed(pair[index], draw))
        finally:
            for expert in pair:
                expert.close()
        return improvement.ratio(times[0], times[1])

    def _expert_outputs(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        assert self._expert is not None
        with self._trusted("the expert"):
            return self._call(self._expert, Draw("", inputs), FIRST_CALL_LIMIT)

    # ---------------------------------------------------------------- secret draws

    def start_preparing(self) -> None:
        """Begin the next evaluation's draws; each call of `step` then makes one."""
        self._preparing = prepare(self.problem, self._expert_outputs, self._calibrated)

    def step(self) -> bool:
        """Make one draw; False when all are there."""
        if self._ready is not None:
            return False
        if self._preparing is None:
            self.start_preparing()
        assert self._preparing is not None
        self._ready = next(self._preparing)
        return self._ready is None

    def take_draws(self) -> Draws:
        """The complete set, each used once; what has not been prepared is made now."""
        self.phase("preparing secret inputs")
        while self.step():
            pass
        draws, self._ready, self._preparing = self._ready, None, None
        assert draws is not None
        return draws

    def crown(self, source: int, best: float) -> None:
        """Take up the champion of an earlier process of this run."""
        self.champion = Contender(self.build(source))
        self.best = best


def _larger(a: Errors, b: Errors) -> Errors:
    return Errors(*(max(x, y) for x, y in zip(a.figures(), b.figures(), strict=True)))


