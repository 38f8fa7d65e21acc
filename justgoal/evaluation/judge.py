"""The judge: correct or not, how fast, and whether that is an improvement. This file is the whole verdict.

It runs in a process of its own, which sees the task and the secret inputs but no key, no network and no host. One
evaluation: build on public inputs; start the candidate beside the champion, in fresh processes; compare its outputs
on every checked draw; time both, and the warm expert, in random order on contents that no party has seen, a secret
few of which are checked too; and go on with fresh pairs of processes while they all say that it is faster.
"""

import math
import os
import random
import statistics
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from justgoal import figures
from justgoal.errors import EvaluatorFailed
from justgoal.evaluation import improvement
from justgoal.evaluation.bench import CANDIDATE, CHAMPION, EXPERT, Bench, Lost, Party, Rejected, Stopwatch
from justgoal.evaluation.draws import Comparison, Draw, Draws, prepare
from justgoal.evaluation.experts import Expert
from justgoal.evaluation.improvement import Ratchet, Rounds, Rule
from justgoal.evaluation.verdict import Verdict

PAIRS_WITHOUT_CHAMPION = 2
FINAL_PAIRS = 7
FINAL_DRAWS = 3
ENOUGH_WRONG = 3


@dataclass
class Standing:
    """What judging one solution has gathered so far."""

    comparison: Comparison
    pairs: list[Rounds] = field(default_factory=list)

    def ratios(self) -> tuple[float, ...]:
        """The champion's time over the candidate's in each pair; infinite where the champion failed a call."""
        return tuple(
            math.inf if pair.lost else improvement.ratio(pair.champion, pair.candidate)
            for pair in self.pairs
            if pair.lost or pair.champion
        )


class Judge:
    def __init__(self, bench: Bench, expert: Expert, rule: Rule) -> None:
        self._bench = bench
        self._expert = expert
        self._rule = rule
        self._champion: int | None = None
        self._ratchet = Ratchet()
        self._preparing: Iterator[Draws | None] | None = None
        self._ready: Draws | None = None

    def evaluate(self, source: int) -> Verdict:
        """The verdict on the solution whose files are in the tar file `source`."""
        watch = Stopwatch()
        standing = Standing(Comparison(self._bench.problem))
        candidate = None
        try:
            self._bench.phase("building")
            candidate = self._bench.build(source, self.step)
            watch.lap("build")
            draws = self.take_draws()
            watch.lap("draws")
            for number in range(PAIRS_WITHOUT_CHAMPION if self._champion is None else self._rule.pairs):
                self._pair(candidate, self._champion, CHAMPION, draws, standing, check=number == 0)
                watch.lap("pairs")
                if self._champion is not None and not self._rule.affirmed(standing.ratios()[-1]):
                    break
            verdict = self._correct(candidate, standing)
        except Rejected as rejected:
            verdict = self._rejection(rejected, standing)
            watch.lap("build" if candidate is None else "pairs")
        finally:
            if candidate is not None and candidate != self._champion:
                os.close(candidate)
        return replace(verdict, seconds=watch.seconds)

    def _correct(self, candidate: int, standing: Standing) -> Verdict:
        """Correct. An improvement, if every pair says so and the speedup over the expert does not belie it."""
        verdict = self._measured(standing, fresh_expert=False)
        assert verdict.speedup is not None and verdict.resolution is not None
        ratios = standing.ratios()
        gain = improvement.gain(ratios)
        faster = all(map(self._rule.affirmed, ratios))
        improved = faster and self._ratchet.allows(verdict.speedup, verdict.resolution, gain)
        reason = ""
        if not faster:
            reason = f"{figures.speedup(ratios[-1])} beside the champion"
        elif not improved:
            demanded = figures.speedup(self._ratchet.demanded(gain))
            reason = (
                f"{figures.speedup(gain)} beside the champion, which should be {demanded} over the expert and is not"
            )
        if improved:
            if self._champion is not None:
                os.close(self._champion)
            self._champion = candidate
            self._ratchet = self._ratchet.after(verdict.speedup, verdict.resolution, gain)
        return replace(verdict, improved=improved, reason=reason, ratios=ratios)

    def final(self, source: int) -> Verdict:
        """A champion judged afresh: beside fresh experts, on more draws, in more pairs, by nothing measured before."""
        watch = Stopwatch()
        standing = Standing(Comparison(self._bench.problem))
        candidate = None
        try:
            self._bench.phase("building")
            candidate = self._bench.build(source, self.step)
            draws = self.take_draws()
            for number in range(FINAL_PAIRS):
                if 0 < number < FINAL_DRAWS:
                    draws = self.take_draws()
                self._pair(candidate, self._expert.tree, EXPERT, draws, standing, check=number < FINAL_DRAWS)
        except Rejected as rejected:
            return self._rejection(rejected, standing)
        finally:
            if candidate is not None:
                os.close(candidate)
        for pair in standing.pairs:
            pair.expert, pair.champion = pair.champion, []
        watch.lap("final")
        return replace(self._measured(standing, fresh_expert=True), seconds=watch.seconds)

    def _measured(self, standing: Standing, *, fresh_expert: bool) -> Verdict:
        report = self._expert.report
        pairs = standing.pairs
        return Verdict(
            "correct",
            latency=statistics.median(statistics.median(pair.candidate) for pair in pairs),
            expert_latency=statistics.median(statistics.median(pair.expert) for pair in pairs),
            expert=report.chosen,
            speedup=improvement.speedup(pairs),
            resolution=improvement.resolution(pairs, report.null, fresh_expert=fresh_expert),
            errors=standing.comparison.named(),
        )

    def _rejection(self, rejected: Rejected, standing: Standing) -> Verdict:
        errors = standing.comparison.named()
        return Verdict(rejected.kind, rejected.reason, errors=errors, output=rejected.output)

    def _pair(
        self, candidate: int, opponent: int | None, role: str, draws: Draws, standing: Standing, *, check: bool
    ) -> None:
        """One pair of fresh processes; an opponent that fails has lost it, and the candidate is timed alone."""
        try:
            standing.pairs.append(self._processes(candidate, opponent, role, draws, standing, check))
        except Lost:
            alone = self._processes(candidate, None, role, draws, standing, check)
            standing.pairs.append(replace(alone, lost=True))

    def _processes(
        self, candidate: int, opponent: int | None, role: str, draws: Draws, standing: Standing, check: bool
    ) -> Rounds:
        """Both get the same calls before the clock, the checked draws if `check`, so that they are of equal age."""
        trees = [(CANDIDATE, candidate)] + ([(role, opponent)] if opponent is not None else [])
        with self._bench.parties(trees) as parties:
            self._bench.phase("judging: correctness")
            checked = draws.checked if check else []
            for number, draw in enumerate(checked):
                outputs = self._bench.call(parties[0], draw, first=number == 0)
                self._bench.warm_up(parties[1:], draws.checked, range(number, number + 1))
                standing.comparison.add(draw, outputs)
                if standing.comparison.failed >= ENOUGH_WRONG:
                    break
            self._accept(standing.comparison)
            self._bench.phase("judging: timing")
            warm = improvement.warm_calls(self._expert.report.latency)
            self._bench.warm_up(parties, draws.checked, range(len(checked), warm))
            return self._timed(parties, draws, standing.comparison)

    def _timed(self, parties: list[Party], draws: Draws, comparison: Comparison) -> Rounds:
        """The rounds of a pair. Timed calls are checked calls: the candidate's outputs on a secret few are judged."""
        kept = []

        def keep(party: Party, draw: Draw) -> None:
            outputs = party.worker.outputs.read()
            if party is parties[0] and draw.reference:
                kept.append((draw, outputs))

        order = random.sample(draws.timed, len(draws.timed))
        times = self._bench.rounds([*parties, self._expert.party], order, keep)
        for draw, outputs in kept:
            comparison.add(draw, outputs)
        self._accept(comparison)
        return Rounds(times[0], times[1] if len(parties) > 1 else [], times[-1])

    def _accept(self, comparison: Comparison) -> None:
        if reason := comparison.reason():
            raise Rejected("wrong", reason)

    def step(self) -> bool:
        """Make one of the next evaluation's secret draws; False when all are there."""
        if self._ready is None:
            if self._preparing is None:
                rounds = improvement.rounds(self._expert.report.latency)
                expert = self._expert
                self._preparing = prepare(self._bench.problem, expert.outputs, expert.calibrated, rounds)
            self._ready = next(self._preparing)
        return self._ready is None

    def take_draws(self) -> Draws:
        """A complete set, each used once; what has not been prepared is made now."""
        self._bench.phase("preparing secret inputs")
        while self.step():
            pass
        draws, self._ready, self._preparing = self._ready, None, None
        if draws is None:
            raise EvaluatorFailed("no secret draws could be made")
        return draws

    def crown(self, source: int, mark: float) -> None:
        """Take up the champion of an earlier process of this run, and the ratchet's mark."""
        self._ratchet = Ratchet(mark)
        with suppress(Rejected):  # then the next correct solution that the ratchet allows takes its place
            self._champion = self._bench.build(source)
