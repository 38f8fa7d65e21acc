"""The noise certificate of a device: what can be told apart on this machine today.

It is measured with a judge's own means on two tiny operators, one bound by memory and one by arithmetic, in about a
minute, and used for a day. A run takes its rule of improvement from it and keeps it in run.json.
"""

import json
import time
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from justgoal import __version__, figures, machine
from justgoal.errors import UsageError
from justgoal.evaluation import noise
from justgoal.evaluation.collect import Solution
from justgoal.evaluation.evaluator import Evaluator, threads
from justgoal.evaluation.improvement import DEFAULT_RULE, Rule
from justgoal.evaluation.verdict import ExpertReport
from justgoal.sandboxes import Engine
from justgoal.sandboxes.gpus import Gpu
from justgoal.storage import cache_folder, write_json
from justgoal.tasks import contract

PROBES = [Path(contract.__file__).parent / "probes" / name for name in ("softmax", "product")]
"""One bound by memory, one by arithmetic."""
SPINS = (0.0002, 0.001)
SPIN = """
import time


def run(*arguments, out):
    end = time.clock_gettime(time.CLOCK_MONOTONIC) + {seconds}
    while time.clock_gettime(time.CLOCK_MONOTONIC) < end:
        pass
    return out
"""
CUDA_SPIN = """
import triton
from triton.language.extra.cuda import globaltimer


@triton.jit
def spin(nanoseconds):
    end = globaltimer() + nanoseconds
    now = globaltimer()
    while now < end:
        now = globaltimer()


def run(*arguments, out):
    spin[(1,)](round({seconds} * 1e9))
    return out
"""
VALID = 24 * 3600.0


@dataclass(frozen=True)
class Kit:
    """What the noise of a kind of device is measured with: a solution that spins, and a workload of each probe.

    `bare`: what a call takes beyond what it does, whoever wrote it, is not the clock's error: a kernel's launch. It is
    what spinning for no time takes.
    """

    spin: str
    workloads: tuple[str, str]
    bare: bool

    def spins(self) -> dict[float, Solution]:
        lengths = (0.0, *SPINS) if self.bare else SPINS
        return {length: Solution({"solution.py": self.spin.format(seconds=length).encode()}) for length in lengths}

    def clock(self, errors: list[float]) -> list[float]:
        """The clock's errors, of readings of all spins in turns."""
        if not self.bare:
            return errors
        blocks = zip(*[iter(errors)] * (1 + len(SPINS)), strict=True)
        return [error - launch for launch, *rest in blocks for error in rest]


CPU = Kit(SPIN, ("r1024_c4096", "m512"), bare=False)
CUDA = Kit(CUDA_SPIN, ("r4096_c4096", "m2048"), bare=True)


@dataclass(frozen=True)
class Certificate:
    """Gains are fractions, times seconds; `made` is a time of day since the epoch.

    `null` and `clock` are what was measured (see probing.py), by probe; the figures below them follow from these.
    """

    device: str
    made: float
    null: dict[str, list[float]]
    clock: dict[str, list[float]]
    spread: float
    bias: float
    pairs: int
    minimum_gain: float
    false_rate: float
    smallest_gain: float
    shortest_latency: float

    @staticmethod
    def of(device: str, null: dict[str, list[float]], clock: dict[str, list[float]]) -> "Certificate":
        rule = noise.certified(null, DEFAULT_RULE.minimum_gain)
        gain = noise.smallest_gain(null, rule)
        return Certificate(
            device, time.time(), null, clock, noise.spread(null), noise.bias(null), rule.pairs, rule.minimum_gain,
            noise.false_rate(null, rule), gain, noise.shortest_latency(clock, gain),
        )  # fmt: skip

    @property
    def rule(self) -> Rule:
        return Rule(self.pairs, self.minimum_gain)

    @property
    def clock_error(self) -> float:
        return self.smallest_gain * self.shortest_latency

    def sentence(self) -> str:
        """`gains from 1.8 % are found here, calls from 430 us (certificate of 14:02)`."""
        gain, latency = figures.percent(self.smallest_gain), figures.latency(self.shortest_latency)
        at = datetime.fromtimestamp(self.made)
        return f"gains from {gain} are found here, calls from {latency} (certificate of {at:%H:%M})"

    def admit(self, task: str, expert: ExpertReport) -> None:
        """Raises UsageError when the task's calls are too short to be compared here."""
        if expert.latency < self.shortest_latency:
            takes, shortest = figures.latency(expert.latency), figures.latency(self.shortest_latency)
            raise UsageError(
                f"{task} is too short for this machine: its expert takes {takes}, and calls can be told apart from"
                f" {shortest} (justgoal doctor)"
            )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def file(device: str) -> Path:
    """Where the certificate of a device is kept from one command to the next."""
    return cache_folder() / f"noise-{device}.json"


def stored(device: str) -> Certificate | None:
    """The one that was measured before, if it still holds: within a day, since the same boot, on the same machine."""
    try:
        kept = json.loads(file(device).read_text())
        certificate = Certificate(**kept.pop("certificate"))
        holds = kept == _circumstances() and 0 <= time.time() - certificate.made < VALID
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return certificate if holds else None


def current(engine: Engine, device: str, gpu: Gpu | None = None) -> Certificate:
    """The one that holds, measured now unless there is one. The caller holds the device."""
    certificate = stored(device)
    if certificate is None:
        certificate = measure(engine, device, gpu)
        with suppress(OSError):  # a machine without such a folder measures each time
            file(device).parent.mkdir(parents=True, exist_ok=True)
            write_json(file(device), {**_circumstances(), "certificate": certificate.to_json()})
    return certificate


def measure(engine: Engine, device: str, gpu: Gpu | None = None) -> Certificate:
    """About a minute; see probing.py and noise.py."""
    kit = CUDA if gpu else CPU
    null, clock = {}, {}
    for probe, workload in zip(PROBES, kit.workloads, strict=True):
        with closing(Evaluator(contract.task(f"{probe}/{workload}"), engine, gpu=gpu)) as evaluator:
            readings = evaluator.probe(kit.spins())
        null[probe.name], clock[probe.name] = readings["null"], kit.clock(readings["clock"])
    return Certificate.of(device, null, clock)


def _circumstances() -> dict[str, Any]:
    """What a certificate does not outlive a change of."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"justgoal": __version__, "boot": boot, "processor": machine.processor()[0], "cores": threads()}
