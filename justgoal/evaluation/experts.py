"""The experts on this machine: which one counts, how exact it is on every kind of input, and how noisy a pair is."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from justgoal import figures
from justgoal.errors import EvaluatorFailed
from justgoal.evaluation import improvement
from justgoal.evaluation.bench import EXPERT, Bench, Party, Rejected
from justgoal.evaluation.bounds import Errors
from justgoal.evaluation.draws import Draw
from justgoal.evaluation.verdict import ExpertReport

MEASURED_ROUNDS = 9
DRAWS_PER_CASE = 2
NULL_PAIRS = 3


class Expert:
    """The one that counts: warm from the start of a run to its end, and trusted."""

    def __init__(self, bench: Bench, sources: dict[str, int]) -> None:
        """Build and measure all of `sources` (name to tar file); raises EvaluatorFailed when none runs."""
        self._bench = bench
        self._failed: dict[str, str] = {}
        trees = self._build(sources)
        latencies, errors = self._measure(trees)
        chosen = min(latencies, key=lambda name: latencies[name])
        self.tree = trees[chosen]
        bench.call_limit = max(2.0, 50 * latencies[chosen])
        [self.party] = bench.start([(EXPERT, self.tree)])
        bench.call(self.party, Draw("", bench.problem.inputs()), first=True)
        self.calibrated = {case: self._calibrate(case) for case in [*bench.problem.cases, ""]}
        null = tuple(self._null_pair(latencies[chosen]) for _ in range(NULL_PAIRS))
        self.report = ExpertReport(latencies, errors, chosen, null, self._failed)

    def outputs(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        return self._bench.call(self.party, Draw("", inputs))

    def _build(self, sources: dict[str, int]) -> dict[str, int]:
        trees = {}
        for name, source in sources.items():
            self._bench.phase(f"building expert {name}")
            try:
                trees[name] = self._bench.build(source)
            except Rejected as rejected:
                self._failed[name] = rejected.reason
        if not trees:
            raise EvaluatorFailed(f"no expert runs here: {self._why()}")
        return trees

    def _why(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self._failed.items())

    def _measure(self, trees: dict[str, int]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """Median latency in interleaved rounds, and the worst relative error of each output, by expert.

        One whose error is above the cap of this workload does not count.
        """
        problem = self._bench.problem
        draws = [problem.draw() for _ in range(DRAWS_PER_CASE)]
        timed = [Draw("", problem.inputs()) for _ in range(MEASURED_ROUNDS)]
        errors: dict[str, dict[str, float]] = {}
        self._bench.phase("measuring experts")
        with self._bench.parties([(EXPERT, tree) for tree in trees.values()]) as parties:
            able = []
            for name, party in zip(trees, parties, strict=True):
                try:
                    errors[name] = self._errors(party, draws)
                except EvaluatorFailed as failure:
                    self._failed[name] = str(failure)
                    continue
                if max(errors[name].values()) > problem.policy.cap:
                    worst, cap = figures.error(max(errors[name].values())), figures.error(problem.policy.cap)
                    self._failed[name] = f"its error {worst} is above {cap}"
                    continue
                able.append((name, party))
            if not able:
                raise EvaluatorFailed(f"no expert runs and is exact enough here: {self._why()}")
            times = self._bench.rounds([party for _, party in able], timed)
        return {name: median(row) for (name, _), row in zip(able, times, strict=True)}, errors

    def _errors(self, party: Party, draws: Sequence[Draw]) -> dict[str, float]:
        found = [
            self._bench.problem.errors(draw, self._bench.call(party, draw, first=index == 0))
            for index, draw in enumerate(draws)
        ]
        names = [output.name for output in self._bench.problem.outputs]
        return {name: max(one[i].total for one in found) for i, name in enumerate(names)}

    def _calibrate(self, case: str) -> list[Errors]:
        """The expert's errors on this kind of draw: a bound is never tighter than these."""
        self._bench.phase("calibrating")
        worst: list[Errors] = []
        for _ in range(DRAWS_PER_CASE):
            draw = self._bench.problem.draw(case)
            found = self._bench.problem.errors(draw, self.outputs(draw.inputs))
            worst = [a.larger(b) for a, b in zip(found, worst or found, strict=True)]
        return worst

    def _null_pair(self, latency: float) -> float:
        """The expert against itself in two fresh processes: what a pair says when there is no difference."""
        self._bench.phase("measuring the noise of this machine")
        draws = [Draw("", self._bench.problem.inputs()) for _ in range(improvement.rounds(latency))]
        with self._bench.parties([(EXPERT, self.tree)] * 2) as pair:
            self._bench.warm_up(pair, draws, range(improvement.warm_calls(latency)))
            one, other = self._bench.rounds(pair, draws)
        return improvement.ratio(one, other)
