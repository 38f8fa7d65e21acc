"""What came out of one evaluation. The model, the terminal, `--json` and the transcript all read this one shape."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from justgoal import figures

WORDS = {
    "correct": "correct",
    "wrong": "wrong",
    "crash": "crashed",
    "timeout": "timed out",
    "build": "did not build",
    "invalid": "invalid",
}
"""The kinds of a verdict, each with the word that its sentence begins with."""


@dataclass(frozen=True)
class Verdict:
    """Times are seconds. `speedup` is over the expert as measured beside the solution, `resolution` its half-width as
    a fraction. `ratios` has the champion's time over the solution's, one median for each pair of processes.
    `errors` maps an output's name to its worst (error, allowed) as relative L2. `output` is what building
    printed, or a traceback on public inputs; it is untrusted text. `solution` is the hash of the files.
    """

    kind: str
    reason: str = ""
    latency: float | None = None
    expert_latency: float | None = None
    expert: str = ""
    speedup: float | None = None
    resolution: float | None = None
    improved: bool = False
    ratios: tuple[float, ...] = ()
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    output: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    number: int | None = None
    solution: str = ""
    repeat_of: int | None = None
    counts: bool = True

    @property
    def correct(self) -> bool:
        return self.kind == "correct"

    def sentence(self) -> str:
        """`correct, 22.4 ms, 2.76x ± 0.9 %`, or the word of the kind and the reason."""
        if not self.correct:
            return f"{WORDS[self.kind]}: {self.reason}"
        assert self.latency is not None and self.speedup is not None
        return f"correct, {figures.latency(self.latency)}, {figures.speedup(self.speedup, self.resolution)}"

    def standing(self) -> str:
        """How a correct solution compares with the champion; empty when there is nothing to compare."""
        if not self.correct:
            return ""
        if self.improved:
            return "champion"
        return f"no improvement: {self.reason}" if self.reason else "no improvement"

    def accuracy(self) -> str:
        """`output 3.3e-07 (allowed 2.2e-06), state 1.1e-07 (allowed 9.0e-07)`, on the worst of the inputs."""
        return ", ".join(
            f"{name} {figures.error(found)} (allowed {figures.error(allowed)})"
            for name, (found, allowed) in self.errors.items()
        )

    def to_json(self) -> dict[str, Any]:
        """JSON knows no infinity: an infinite error or ratio becomes None."""
        value: dict[str, Any] = _finite(dataclasses.asdict(self))
        return value

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Verdict":
        errors = {name: (_number(pair[0]), _number(pair[1])) for name, pair in value["errors"].items()}
        ratios = tuple(_number(ratio) for ratio in value["ratios"])
        return Verdict(**{**value, "ratios": ratios, "errors": errors})


@dataclass(frozen=True)
class ExpertReport:
    """The experts as measured here at the start of a run: name to latency (s) and to error per output."""

    latencies: dict[str, float]
    errors: dict[str, dict[str, float]]
    chosen: str
    null: tuple[float, ...]
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def latency(self) -> float:
        return self.latencies[self.chosen]

    def summary(self) -> str:
        """`compiled 61.8 ms, eager 74.0 ms: compiled is 1.0x`, and whatever did not run."""
        order = sorted(self.latencies, key=lambda name: self.latencies[name])
        listed = ", ".join(f"{name} {figures.latency(self.latencies[name])}" for name in order)
        missing = "".join(f"; {name} did not run: {why}" for name, why in sorted(self.failed.items()))
        return f"{listed}: {self.chosen} is 1.0x{missing}"

    def sentence(self) -> str:
        """`expert (compiled): 61.8 ms, error 2.1e-07 (output), 1.9e-07 (state)`."""
        errors = ", ".join(f"{figures.error(e)} ({name})" for name, e in self.errors[self.chosen].items())
        return f"expert ({self.chosen}): {figures.latency(self.latency)}, error {errors}"

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = _finite(dataclasses.asdict(self))
        return value

    @staticmethod
    def from_json(value: dict[str, Any]) -> "ExpertReport":
        return ExpertReport(**{**value, "null": tuple(value["null"])})


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _number(value: float | None) -> float:
    return math.inf if value is None else value
