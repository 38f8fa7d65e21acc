"""A CUDA device under the judge: what is right is accepted, and what would cheat the clock is not. Needs a GPU."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from justgoal.evaluation.collect import Solution
from justgoal.evaluation.evaluator import Evaluator
from justgoal.evaluation.verdict import Verdict
from justgoal.sandboxes import UID, Engine, Limits, Spec, gpus
from justgoal.sandboxes.bubblewrap import Bubblewrap
from justgoal.tasks import contract

pytestmark = pytest.mark.skipif(not gpus.found(), reason="there is no NVIDIA GPU")

COPY = """
import torch
import triton
from triton import language as tl


@triton.jit
def copy(source, target, count, BLOCK: tl.constexpr):
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + here, tl.load(source + here, here < count), here < count)


def run(x, k):
    values, indices = torch.topk(x, k, dim=1, sorted=False)
    result = torch.empty_like(values)
    copy[(triton.cdiv(values.numel(), 1024),)](values, result, values.numel(), BLOCK=1024)
    return result, indices
"""
ASIDE = """
import torch

aside = torch.cuda.Stream()


def run(x, k, out):
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        values, indices = torch.topk(x, k, dim=1, sorted=False)
        out[0].copy_(values)
        out[1].copy_(indices)
        for tensor in (values, indices):
            tensor.record_stream(aside)
    return out
"""
EARLY = ASIDE.replace("    aside.wait_stream(torch.cuda.current_stream())\n", "")
LYING = """
import torch

said = torch.cuda.Event.elapsed_time
torch.cuda.Event.elapsed_time = lambda self, other: said(self, other) / 4


def run(x, k):
    return tuple(torch.topk(x, k, dim=1, sorted=False))
"""
HASTY = (
    ASIDE
    + """

torch.cuda.synchronize = lambda *_: torch.cuda.current_stream().synchronize()
"""
)
COMPILED = """
import subprocess

print(subprocess.run("id -u; nvcc --version; ls /dev", shell=True, capture_output=True, text=True, check=True).stdout)
source = "__global__ void k() {} int main() { k<<<1, 1>>>(); return cudaDeviceSynchronize(); }"
open("/tmp/a.cu", "w").write(source)
subprocess.run(["nvcc", "-arch=native", "/tmp/a.cu", "-o", "/tmp/a"], check=True)
print("ran:", subprocess.run("/tmp/a").returncode)
"""


@pytest.fixture(scope="module")
def bubblewrap() -> Iterator[Engine]:
    with closing(Bubblewrap()) as engine:
        yield engine


@pytest.fixture(scope="module")
def evaluator(bubblewrap: Engine) -> Iterator[Evaluator]:
    with closing(Evaluator(contract.task("top_k_select/b8_n131072"), bubblewrap, gpu=gpus.first())) as evaluator:
        report = evaluator.open("eager")
        print(report.summary())
        yield evaluator


def judged(evaluator: Evaluator, text: str) -> Verdict:
    verdict = evaluator.evaluate(Solution({"solution.py": text.encode()}))
    print(verdict)
    return verdict


def test_a_triton_solution_is_accepted_and_measured(evaluator: Evaluator) -> None:
    verdict = judged(evaluator, COPY)
    assert verdict.correct
    assert verdict.speedup is not None and 0.8 < verdict.speedup < 1.05  # torch.topk, and a small copy


def test_time_on_another_stream_is_not_hidden(evaluator: Evaluator) -> None:
    """The checksum does not wait for that stream, and where it happens to be right the clock does not fit."""
    verdict = judged(evaluator, ASIDE)
    assert verdict.kind == "wrong"
    assert verdict.reason.startswith(("its outputs changed after", "by the judge's clock a call takes "))


def test_events_that_say_less_than_the_clock_are_not_believed(evaluator: Evaluator) -> None:
    verdict = judged(evaluator, LYING)
    assert (verdict.kind, verdict.reason[:34]) == ("wrong", "by the judge's clock a call takes ")


def test_inputs_do_not_exist_before_the_window(evaluator: Evaluator) -> None:
    verdict = judged(evaluator, EARLY)
    assert verdict.kind == "wrong"
    assert "output" in verdict.reason


def test_outputs_are_final_when_the_window_ends(evaluator: Evaluator) -> None:
    """It says that the device is idle while the other stream still works."""
    verdict = judged(evaluator, HASTY)
    assert verdict.kind == "wrong"


def test_a_sandbox_compiles_and_runs_cuda_without_any_privilege(bubblewrap: Engine) -> None:
    limits = Limits(16 << 30, 512, 4)
    command = ("/opt/venv/bin/python", "-c", COMPILED)
    sandbox = bubblewrap.start(Spec("test", command, limits, UID, as_pid_1=True, gpus=(gpus.first().uuid,)))
    with closing(sandbox):
        assert sandbox.exit_status(60.0) == 0
