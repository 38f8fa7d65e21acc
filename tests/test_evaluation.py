"""Verdicts of the real judge, on solutions that are honest, wrong or hostile; real sandboxes throughout.

The operator is tests/operators/scale_add: `out` = alpha x + y, and `total`, the sums of its rows. One judge serves
the whole module; where a test wants a champion, it crowns one.
"""

import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from solutions import (
    BUILDING,
    CHECKED,
    HONEST,
    SCALE_ADD,
    SECRET_LINE,
    after,
    descendants,
    descriptors,
    group_of,
    judges,
    on_hidden_inputs,
    sleeping,
    solution,
)

from justgoal.errors import EvaluatorFailed
from justgoal.evaluation import device as devices
from justgoal.evaluation.collect import Solution
from justgoal.evaluation.device import Device
from justgoal.evaluation.evaluator import Evaluator
from justgoal.evaluation.improvement import Rule
from justgoal.evaluation.verdict import ExpertReport, Verdict
from justgoal.sandboxes import JUDGE_UID, UID, Engine, Limits, Spec
from justgoal.tasks import contract

pytestmark = pytest.mark.docker("thorough")

PUBLIC = ", on public inputs"
TIMED_CHECKED = 5


class Bench:
    """One open evaluator; a fresh one where a test has cost it its judge."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.phases: list[str] = []
        self.reopen()

    def reopen(self) -> None:
        self.evaluator = Evaluator(contract.task(str(SCALE_ADD)), self._engine, self.phases.append)
        self.report = self.evaluator.open()
        [self.judge] = judges()

    def __call__(self, text: str | Solution, **others: str) -> Verdict:
        return self.evaluator.evaluate(text if isinstance(text, Solution) else solution(text, **others))

    def crown(self, text: str, mark: float = 0.0) -> None:
        self.evaluator.crown(solution(text), mark)


@pytest.fixture(scope="module")
def opened(engine: Engine) -> Iterator[Bench]:
    os.environ["ANTHROPIC_API_KEY"] = "sk-very-secret"
    bench = Bench(engine)
    yield bench
    bench.evaluator.close()
    del os.environ["ANTHROPIC_API_KEY"]


@pytest.fixture
def judged(opened: Bench) -> Bench:
    try:
        opened.evaluator.pause()
    except EvaluatorFailed:
        opened.evaluator.close()
        opened.reopen()
    return opened


def cases(fast: set[str], **every: Any) -> list[Any]:
    """Parameters by name; all but the `fast` ones are slow tests."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), id=name.replace("_", " ").strip(),
                     marks=() if name in fast else pytest.mark.slow)
        for name, case in every.items()
    ]  # fmt: skip


def everything(verdict: Verdict) -> str:
    return json.dumps(verdict.to_json()) + verdict.sentence()


# -------------------------------------------------------------------- correct


def test_expert_sentence(judged: Bench) -> None:
    """Its latency, and errors such as numpy makes in single precision."""
    said = re.fullmatch(r"expert \(eager\): (\d[\d.]* [um]?s), error (\S+) \(out\), (\S+) \(total\)",
                        judged.report.sentence())  # fmt: skip
    assert said
    random = np.random.default_rng(0)
    x, y = random.standard_normal((2, 512, 1024)).astype(np.float32)
    wide = x.astype(np.float64) + y
    narrow = x + y
    error = np.linalg.norm(narrow - wide) / np.linalg.norm(wide)
    assert float(said[2]) == pytest.approx(error, rel=0.7)
    assert 1e-9 < float(said[3]) < 1e-6
    assert judged.report.summary() == f"eager {said[1]}: eager is 1.0x"
    assert ExpertReport.from_json(json.loads(json.dumps(judged.report.to_json()))) == judged.report


@pytest.mark.docker
def test_correct(judged: Bench) -> None:
    verdict = judged(HONEST)
    assert verdict.latency and verdict.expert_latency and verdict.speedup and verdict.resolution
    assert re.fullmatch(r"correct, \d[\d.]* (us|ms), \d\.\d+x ± \d[\d.]* %", verdict.sentence())
    assert verdict.expert == "eager"
    assert {name for name, (error, allowed) in verdict.errors.items() if error <= allowed} == {"out", "total"}
    assert 0.2 < verdict.speedup < 5
    assert verdict.output == ""
    assert set(verdict.seconds) == {"build", "draws", "pairs"}


PRINTING = """
import sys

def run(x, y, alpha):
    print("x" * (1 << 20))
    print("y" * (1 << 20), file=sys.stderr)
    out = alpha * x + y
    return out, out.sum(1)
"""
FORKING = """
import os, subprocess, time

def run(x, y, alpha):
    if os.fork() == 0:
        time.sleep(1000)
        os._exit(0)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    out = alpha * x + y
    return out, out.sum(1)
"""
VIEWS = """
import torch

def run(x, y, alpha):
    out = (alpha * x + y).t().contiguous().t()
    total = torch.cat((out.sum(1), out.sum(1)))
    return [out, total[: len(total) // 2]]
"""


IN_PLACE = """
import torch

def run(x, y, alpha, *, out):
    torch.add(y, x, alpha=alpha, out=out[0])
    torch.sum(out[0], 1, out=out[1])
    return out
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [PRINTING, FORKING, VIEWS, IN_PLACE], ids=["prints", "forks", "returns views", "writes in place"]
)
def test_odd_but_honest(judged: Bench, text: str) -> None:
    assert judged(text).correct
    left = [command for command in descendants().values() if "sleep" in command]
    assert left == []


@pytest.mark.docker("slow")
@pytest.mark.slow
def test_builds_are_kept(judged: Bench) -> None:
    """What the build leaves in the folder is there in every later process; the judged files come from a copy."""
    text = f"""
    import pathlib, subprocess
    folder = pathlib.Path(__file__).parent
    if not (folder / "build" / "done").exists():
        assert not pathlib.Path("/tmp/again").exists()
        (folder / "build").mkdir()
        subprocess.run(["g++", "-shared", "-fPIC", "-o", folder / "build" / "k.so", folder / "kernel.cpp"], check=True)
        (folder / "build" / "done").touch()
        building = True
    else:
        building = False
    import ctypes
    factor = ctypes.CDLL(str(folder / "build" / "k.so")).one()
    calls = 0

    def run(x, y, alpha):
        global calls
        calls += 1
        assert calls <= {BUILDING} or not building
        out = alpha * x * factor + y
        return out, out.sum(1)
    """
    assert judged(text, kernel_cpp='extern "C" int one() { return 1; }\n').correct


# -------------------------------------------------------------------- wrong


def returning(out: str, total: str) -> str:
    return f"import torch\n\ndef run(x, y, alpha):\n    out = alpha * x + y\n    return {out}, {total}\n"


@pytest.mark.slow
def test_wrong_by_a_factor(judged: Bench) -> None:
    """Everything is 0.01 % too large: the errors are 1e-4, and the sentence says how many times that is too much."""
    verdict = judged(returning("1.0001 * out", "1.0001 * out.sum(1)"))
    assert verdict.kind == "wrong"
    errors = {name: (error, error / allowed) for name, (error, allowed) in verdict.errors.items()}
    assert [error for error, _ in errors.values()] == pytest.approx([1e-4, 1e-4], rel=0.02)
    said = re.fullmatch(
        r"wrong: output (0 \(out\)|1 \(total\)): (relative error|worst row|largest error) is (\S+)x the allowed "
        r"error, on 3 of [3-7] inputs; also wrong: output (0 \(out\)|1 \(total\))",
        verdict.sentence(),
    )
    assert said and said[1] != said[4]
    assert float(said[3]) >= max(factor for _, factor in errors.values()) * 0.99
    if said[2] == "relative error":
        assert float(said[3]) == pytest.approx(errors[said[1][3:-1]][1], rel=0.01)


@pytest.mark.slow
def test_wrong_second_output(judged: Bench) -> None:
    verdict = judged(returning("out", "1.01 * out.sum(1)"))
    assert re.fullmatch(
        r"wrong: output 1 \(total\): (relative|largest) error is \S+x the allowed error, on 3 of [3-7] inputs; "
        r"all other outputs pass",
        verdict.sentence(),
    )
    assert verdict.errors["total"][0] == pytest.approx(0.01, rel=0.02)


@pytest.mark.slow
def test_one_wrong_row_is_named(judged: Bench) -> None:
    """A 512th of the rows is 1e-5 off: too little for the whole, not for a row."""
    verdict = judged(returning("torch.cat((out[:1] * (1 + 1e-5), out[1:]))", "out.sum(1)"))
    assert re.fullmatch(
        r"wrong: output 0 \(out\): worst row is \S+x the allowed error, on 3 of [3-7] inputs; all other outputs pass",
        verdict.sentence(),
    )


@pytest.mark.slow
def test_wrong_in_an_edge_case_alone(judged: Bench) -> None:
    verdict = judged("def run(x, y, alpha):\n    out = min(alpha, 100.0) * x + y\n    return out, out.sum(1)\n")
    assert f"x the allowed error, on 1 of {CHECKED} inputs; also wrong: output " in verdict.sentence()
    assert "large" not in verdict.sentence()


FRESH_THEN_STALE = f"""
kept = []

def run(x, y, alpha):
    if len(kept) >= {CHECKED}:
        return kept[0]
    out = alpha * x + y
    kept.append((out, out.sum(1)))
    return kept[-1]
"""


@pytest.mark.docker
def test_wrong_in_timed_calls_alone(judged: Bench) -> None:
    """Honest until the clock runs; then it returns what it returned before, which takes no time."""
    verdict = judged(FRESH_THEN_STALE)
    assert verdict.kind == "wrong"
    assert f"on {TIMED_CHECKED} of {CHECKED + TIMED_CHECKED} inputs" in verdict.sentence()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("out", "total", "sentence"),
    [
        ("out * float('nan')", "out.sum(1)", "wrong: output 0 (out): it cannot be compared: values that are not "
         "finite, or that no right answer has, on 3 of 3 inputs; all other outputs pass"),
        ("x", "y[:, 0]", None),
    ],
    ids=["NaN", "views of inputs"],
)  # fmt: skip
def test_wrong_values(judged: Bench, out: str, total: str, sentence: str | None) -> None:
    verdict = judged(returning(out, total))
    assert verdict.kind == "wrong"
    if sentence:
        assert verdict.sentence() == sentence


LAZY = """
import torch

class Lazy(torch.Tensor):
    pass

def run(x, y, alpha):
    out = alpha * x + y
    return out.as_subclass(Lazy), out.sum(1)
"""


@pytest.mark.parametrize(
    ("text", "sentence"),
    cases(
        {"lazy"},
        one=("def run(x, y, alpha):\n    return alpha * x + y\n", "wrong: returned 1 outputs instead of 2"),
        none=("def run(x, y, alpha):\n    return None\n", "wrong: returned 1 outputs instead of 2"),
        three=(returning("out", "out.sum(1), out"), "wrong: returned 3 outputs instead of 2"),
        dtype=(returning("out.double()", "out.sum(1)"),
               "wrong: output 0 (out) has dtype torch.float64 instead of torch.float32"),
        shape=(returning("out", "out.sum(1, keepdim=True)"),
               "wrong: output 1 (total) has shape (512, 1) instead of (512,)"),
        array=(returning("out.numpy()", "out.sum(1)"), "wrong: output 0 (out) is a ndarray instead of a torch.Tensor"),
        device=(returning("out.to('meta')", "out.sum(1)"), "wrong: output 0 (out) is on meta instead of cpu"),
        lazy=(LAZY, "wrong: output 0 (out) is a Lazy instead of a torch.Tensor"),
    ),
)  # fmt: skip
def test_structure(judged: Bench, text: str, sentence: str) -> None:
    assert judged(text).sentence() == sentence + PUBLIC


# -------------------------------------------------------------------- does not build, crashes


@pytest.mark.parametrize(
    ("text", "sentence", "shown"),
    cases(
        {"ends"},
        import_=("x = 1\nimport torhc\n", "did not build: ModuleNotFoundError at line 2 of the solution",
                 "ModuleNotFoundError: No module named 'torhc'"),
        syntax=("def run(:\n", "did not build: SyntaxError", "SyntaxError: "),
        no_run=("x = 1\n", "did not build: AttributeError", "solution.py defines no function `run`"),
        exit=("import sys\nprint('bye')\nsys.exit(0)\n", "did not build: SystemExit at line 3 of the solution", "bye"),
        ends=("import os\nprint('bye', flush=True)\nos._exit(0)\n",
              "did not build: the process ended by itself with exit code 0", "bye"),
    ),
)  # fmt: skip
def test_does_not_build(judged: Bench, text: str, sentence: str, shown: str) -> None:
    verdict = judged(text)
    assert verdict.sentence() == sentence
    assert shown in verdict.output


def test_compiler_errors_are_shown(judged: Bench) -> None:
    verdict = judged("""
    import pathlib, subprocess
    source = pathlib.Path(__file__).with_name("kernel.cpp")
    subprocess.run(["g++", "-shared", "-o", "/tmp/k.so", source], check=True)
    """, kernel_cpp="int x = nonsense;\n")  # fmt: skip
    assert verdict.sentence() == "did not build: an exception at line 4 of the solution"
    assert "kernel.cpp:1:9: error: \u2018nonsense\u2019 was not declared in this scope" in verdict.output
    assert "CalledProcessError" in verdict.output


@pytest.mark.docker("slow")
@pytest.mark.slow
def test_output_of_a_build_is_cut(judged: Bench) -> None:
    verdict = judged("print('first\\n' + 'x' * (1 << 20) + '\\nlast')\nraise OSError\n")
    assert verdict.output.startswith("first\nxxx")
    assert "xxx\nlast\nTraceback" in verdict.output
    assert verdict.output.endswith("OSError\n")
    assert len(verdict.output) <= 4096


@pytest.mark.docker
def test_crash_on_public_inputs_shows_the_traceback(judged: Bench) -> None:
    verdict = judged("def run(x, y, alpha):\n    raise KeyError(f'{x.dtype} is what came')\n")
    assert verdict.sentence() == "crashed: KeyError at line 2 of the solution" + PUBLIC
    assert "KeyError: 'torch.float32 is what came'" in verdict.output
    assert 'File "/solution/solution.py", line 2, in run' in verdict.output


@pytest.mark.parametrize(
    ("action", "sentence"),
    cases(
        {"writes"},
        writes=("x[0, 0] = 1.0", "crashed: the process died of SIGSEGV (or aborted); inputs are read-only" + PUBLIC),
        ends=("os._exit(0)", "crashed: the process ended by itself with exit code 0" + PUBLIC),
        odd_code=("os._exit(160)", "crashed: the process ended by itself with exit code 160" + PUBLIC),
        exits=("sys.exit(3)", "crashed: SystemExit at line 5 of the solution" + PUBLIC),
    ),
)
def test_ends_in_a_call(judged: Bench, action: str, sentence: str) -> None:
    assert judged(f"import os, sys\n\n\ndef run(x, y, alpha):\n    {action}\n").sentence() == sentence


# -------------------------------------------------------------------- nothing about hidden inputs comes out

SEND = "socket.socket(fileno=os.dup(3)).send"


@pytest.mark.parametrize(
    ("action", "sentence"),
    cases(
        {"forged_structure"},
        message=("raise ValueError(f'LEAK {x[0, :4].tolist()}')",
                 f"crashed: ValueError at line {SECRET_LINE} of the solution"),
        class_=("raise type('LEAK' + str(int(x[0, 0] * 1e9)), (Exception,), {})",
                f"crashed: an exception at line {SECRET_LINE} of the solution"),
        class_of_a_known_name=("raise type('int', (Exception,), {})",
                               f"crashed: an exception at line {SECRET_LINE} of the solution"),
        line=("exec(compile(chr(10) * int(1e5 + abs(x[0, 0]) * 1e4) + '1 / 0', '/solution/solution.py', 'exec'))",
              "crashed: ZeroDivisionError"),
        type_of_output=("return out.as_subclass(type('LEAK1', (torch.Tensor,), {})), total", None),
        shape=("return out.new_zeros(int(1e4 * abs(x[0, 0])), 7), total", None),
        count=("return (out,) * int(3 + abs(x[0, 0]) * 100)", None),
        forged_structure=(SEND + "(b'{\"failed\": \"structure\", \"what\": \"LEAK\"}')",
                          "wrong: it returned another number, type, dtype or shape of outputs than on public inputs"),
        forged_crash=(SEND + "(b'{\"failed\": \"run\", \"type\": \"LEAK\", \"line\": 777777}')",
                      "crashed: an exception"),
        forged_import=(SEND + "(b'{\"failed\": \"import\", \"type\": \"LEAK\", \"line\": 1}')", None),
        no_form=(SEND + "(b'LEAK')", "crashed: the worker's answer has no known form"),
        no_object=(SEND + "(b'[1, 2]')", "crashed: the worker's answer has no known form"),
        deep=(SEND + "(b'[' * 4000)", "crashed: the worker's answer has no known form"),
        exit_code=("os._exit(37)", "crashed: the process ended by itself"),
        odd_exit_code=("os._exit(160)", "crashed: the process ended by itself"),
        segmentation_fault=("ctypes.string_at(0)",
                            "crashed: the process died of SIGSEGV (or aborted); inputs are read-only"),
    ),
)  # fmt: skip
def test_hidden_inputs_stay_hidden(judged: Bench, action: str, sentence: str | None) -> None:
    verdict = judged(on_hidden_inputs(action))
    assert not verdict.correct
    assert verdict.output == ""
    assert "LEAK" not in everything(verdict)
    assert not set("\n").intersection(verdict.sentence())
    numbers = {n for n in re.findall(r"\d+", verdict.reason) if n not in ("0", "1", "2", "10", "512", "1024", "32")}
    assert numbers == set()
    if sentence is not None:
        assert verdict.sentence() == sentence


# -------------------------------------------------------------------- tricks


@pytest.mark.parametrize(
    "text",
    cases(
        {"computed_later"},
        keyed_by_address="""
        kept = {}

        def run(x, y, alpha):
            key = x.data_ptr(), y.data_ptr()
            if key not in kept:
                out = alpha * x + y
                kept[key] = out, out.sum(1)
            return kept[key]
        """,
        keyed_by_identity="""
        kept = []

        def run(x, y, alpha):
            if not any(one is x for one, _ in kept):
                out = alpha * x + y
                kept.append((x, (out, out.sum(1))))
            return kept[0][1]
        """,
        computed_later="""
        import threading, torch

        def fill(x, y, alpha, out, total):
            out.copy_(alpha * x + y)
            total.copy_(out.sum(1))

        def run(x, y, alpha):
            out, total = torch.zeros_like(x), torch.zeros(len(x))
            threading.Timer(0.002, fill, (x, y, alpha, out, total)).start()
            return out, total
        """,
        answers_early=f"""
        import os, socket
        calls = 0

        def run(x, y, alpha):
            global calls
            calls += 1
            if calls > {BUILDING}:
                socket.socket(fileno=os.dup(3)).send(b"ok")
            out = alpha * x + y
            return out, out.sum(1)
        """,
        answers_for_all_to_come=f"""
        import os, socket
        calls = 0

        def run(x, y, alpha):
            global calls
            calls += 1
            if calls > {BUILDING}:
                channel = socket.socket(fileno=os.dup(3))
                for _ in range(100):
                    channel.send(b"ok")
            out = alpha * x + y
            return out, out.sum(1)
        """,
        returns_the_place_alone="""
        def run(x, y, alpha, out):
            return out
        """,
        writes_to_the_place_later="""
        import threading, time, torch

        def fill(x, y, alpha, out):
            time.sleep(0.002)
            torch.add(y, x, alpha=alpha, out=out[0])
            torch.sum(out[0], 1, out=out[1])

        def run(x, y, alpha, out):
            threading.Thread(target=fill, args=(x, y, alpha, out)).start()
            return out
        """,
    ),
)
def test_tricks_do_not_pay(judged: Bench, text: str) -> None:
    verdict = judged(text)
    assert verdict.kind in ("wrong", "crash")


ENDS = "__import__('socket').socket(fileno=3).send(b'ok'); __import__('os')._exit(0)"
ENDS_LATER = "__import__('threading').Timer(0.0002, __import__('os')._exit, (0,)).start()"
PACKS = "__import__('sys').modules['__main__'].pack = lambda: __import__('os')."


@pytest.mark.parametrize(
    ("calls", "action"),
    cases(
        {"answers_and_ends"},
        answers_and_ends=(0, ENDS),
        ends_between_calls=(0, ENDS_LATER),
        packs_a_pipe=(0, PACKS + "pipe()[0]"),
        packs_a_device=(0, PACKS + "open('/dev/zero', 0)"),
        packs_a_folder=(0, PACKS + "open('/', 0)"),
        answers_and_ends_when_judged=(CHECKED - 1, ENDS),
        ends_between_calls_when_judged=(CHECKED - 1, ENDS_LATER),
        ends_between_timed_calls=(CHECKED + 2, ENDS),
    ),
)
def test_the_judge_survives(judged: Bench, calls: int, action: str) -> None:
    """Whatever a worker sends and whenever it ends, it is the solution's verdict."""
    assert judged(after(calls, action)).kind in ("crash", "build", "wrong")
    assert judges() == [judged.judge]


@pytest.mark.docker("slow")
@pytest.mark.slow
def test_hanging_call(judged: Bench) -> None:
    verdict = judged(after(BUILDING, "import time; time.sleep(1000)"))
    assert verdict.sentence() == "timed out: a call had not ended after 2 s"


@pytest.mark.docker("slow")
@pytest.mark.slow
def test_leaves_nothing_behind(judged: Bench) -> None:
    """Descriptors and sandboxes are as many after some evaluations as before."""

    def counts() -> tuple[int, int, int]:
        return len(descriptors(judged.judge)), len(descriptors()), len(groups())

    judged.crown(sleeping(0.001))
    judged("import nothing_of_that_name\n")
    before = counts()
    for text in ("import nothing_of_that_name\n", returning("y", "out.sum(1)"), sleeping(0.02)):
        assert not judged(text).improved
    assert counts() == before


@pytest.mark.docker("slow")
@pytest.mark.slow
def test_eats_memory(judged: Bench) -> None:
    verdict = judged("import torch\nx = torch.ones(1 << 40, dtype=torch.uint8)\ndef run(x, y, alpha): pass\n")
    assert verdict.sentence() == "did not build: RuntimeError at line 2 of the solution"
    text = "kept = []\nwhile True:\n    kept.append(b'x' * (64 << 20))\n"
    share = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8
    assert judged(text).sentence() == (f"did not build: it was killed for using more than {share >> 20} MB of memory")


# -------------------------------------------------------------------- improvement


@pytest.mark.docker("slow")
def test_improvement(judged: Bench) -> None:
    """The same work again is none; half of it is, in every pair, by a factor of 2."""
    judged.crown(sleeping(0.016))
    same = judged(sleeping(0.016, "again"))
    assert (same.correct, same.improved) == (True, False)
    assert same.ratios[-1] == pytest.approx(1.0, abs=0.1)
    assert re.fullmatch(r"no improvement: \d\.\d+x beside the champion", same.standing())
    half = judged(sleeping(0.008))
    assert (half.correct, half.improved, half.standing()) == (True, True, "champion")
    assert len(half.ratios) == 5
    assert [ratio for ratio in half.ratios if not 1.5 < ratio < 2.5] == []
    assert same.latency and half.latency
    assert same.latency / half.latency == pytest.approx(2.0, rel=0.25)


STARTS_EARLY = """
import threading, time, torch

seen = {}
ready = threading.Event()
results = {}

def watch():
    while True:
        before = seen["sample"]
        while seen["x"][0, :8].tolist() == before:
            time.sleep(0.0001)
        seen["sample"] = seen["x"][0, :8].tolist()
        time.sleep(0.016)
        ready.set()

def run(x, y, alpha):
    if not seen:
        seen["x"], seen["sample"] = x, x[0, :8].tolist()
        threading.Thread(target=watch, daemon=True).start()
        time.sleep(0.016)
    else:
        ready.wait(0.05)
        ready.clear()
    out = alpha * x + y
    return out, out.sum(1)
"""


@pytest.mark.docker("slow")
@pytest.mark.slow
def test_starting_before_the_call_gains_nothing(judged: Bench) -> None:
    """It watches the input memory and begins to work when something new is there: not before its window opens."""
    judged.crown(sleeping(0.016))
    verdict = judged(STARTS_EARLY)
    assert (verdict.correct, verdict.improved) == (True, False)
    assert verdict.ratios[0] < 1.1


@pytest.mark.slow
def test_ratchet(judged: Bench) -> None:
    """Faster than the champion in every pair, but then it should be far faster than the expert: no champion."""
    judged.crown(sleeping(0.016), mark=1000.0)
    verdict = judged(sleeping(0.008))
    assert (verdict.correct, verdict.improved) == (True, False)
    said = r"no improvement: \d\.\d+x beside the champion, which should be \d{4}x over the expert and is not"
    assert re.fullmatch(said, verdict.standing())


@pytest.mark.slow
def test_a_champion_that_fails_has_lost(judged: Bench) -> None:
    judged.crown(after(BUILDING, "1 / 0"))
    verdict = judged(sleeping(0.016))
    assert (verdict.correct, verdict.improved) == (True, True)
    assert verdict.ratios == (math.inf,) * 5
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict


@pytest.mark.slow
def test_judged_afresh(judged: Bench) -> None:
    honest = judged.evaluator.final(solution(sleeping(0.016)))
    assert honest.correct and honest.speedup and honest.resolution
    assert honest.speedup < 0.5
    assert judged.evaluator.final(solution(returning("out", "1.01 * out.sum(1)"))).kind == "wrong"


@pytest.mark.slow
def test_the_first_correct_one_is_champion_whatever_its_speed(engine: Engine) -> None:
    evaluator = Evaluator(contract.task(str(SCALE_ADD)), engine)
    try:
        evaluator.open()
        assert not evaluator.evaluate(solution(returning("y", "out.sum(1)"))).improved
        first = evaluator.evaluate(solution(sleeping(0.016)))
        assert (first.correct, first.improved, first.ratios, first.standing()) == (True, True, (), "champion")
        assert first.speedup and first.speedup < 0.5
        assert not evaluator.evaluate(solution(sleeping(0.032))).improved
    finally:
        evaluator.close()


@pytest.mark.thorough
@pytest.mark.slow
def test_the_rule_is_the_one_that_was_opened_with(engine: Engine) -> None:
    """Two pairs that say more than 50 %: a gain of a third is none, one of the double is, after two pairs."""
    evaluator = Evaluator(contract.task(str(SCALE_ADD)), engine)
    try:
        evaluator.open(rule=Rule(pairs=2, minimum_gain=0.5))
        evaluator.crown(solution(sleeping(0.032)), 0.0)
        verdict = evaluator.evaluate(solution(sleeping(0.024)))
        assert (verdict.correct, verdict.improved, len(verdict.ratios)) == (True, False, 1)
        verdict = evaluator.evaluate(solution(sleeping(0.016)))
        assert (verdict.correct, verdict.improved, len(verdict.ratios)) == (True, True, 2)
    finally:
        evaluator.close()


# -------------------------------------------------------------------- what there is while a window is open


def groups() -> dict[str, tuple[str, list[str], float]]:
    """Our sandboxes by control group: state of the freezer, command lines, seconds of CPU used."""
    found: dict[str, tuple[str, list[str], float]] = {}
    for pid, command in descendants().items():
        folder = group_of(pid, "freezer")
        if folder is None or (folder / "inside").is_dir():
            continue
        try:
            if (folder / "freezer.state").exists():
                state = (folder / "freezer.state").read_text().strip()
            else:
                state = "FROZEN" if "frozen 1" in (folder / "cgroup.events").read_text() else "THAWED"
            _, commands, used = found.get(str(folder), ("", [], 0.0))
            found[str(folder)] = (state, sorted([*commands, command]), used + cpu_seconds(str(pid)))
        except OSError:
            continue
    return found


def cpu_seconds(pid: str) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def role(commands: list[str]) -> str:
    text = " ".join(commands)
    names = {"justgoal.evaluation.service": "judge", "worker.py": "worker", "awake.py": "awake", "sleep 1000": "agent"}
    return next((name for part, name in names.items() if part in text), "other")


@pytest.mark.docker
def test_who_is_frozen_while_a_window_is_open(
    judged: Bench, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The candidate's first timed call spins for 1.5 s, the next one ends it; we look on from outside."""
    monkeypatch.setattr(devices, "runtime_folder", lambda: tmp_path)
    judged.crown(HONEST)
    device, looks, closing = Device("cpu"), list[dict[str, tuple[str, list[str], float]]](), threading.Event()
    agent = engine.start(Spec("agent", ("/usr/bin/sleep", "1000"), Limits(256 << 20, 64, 2), UID))
    spin = (f"end = __import__('time').monotonic() + 1.5\n        while calls == {CHECKED + 1} and "
            "__import__('time').monotonic() < end: pass\n        "
            f"calls == {CHECKED + 2} and __import__('os')._exit(0)")  # fmt: skip

    def look() -> None:
        while not closing.wait(0.02):
            if judged.phases and judged.phases[-1] == "judging: timing":
                looks.append(groups())

    looking = threading.Thread(target=look)
    try:
        device.register(agent.freezer)
        looking.start()
        with device.exclusive():
            verdict = judged(after(CHECKED, spin))
    finally:
        closing.set()
        looking.join()
        agent.close()
    assert verdict.kind == "crash"
    windows: dict[str, list[dict[str, tuple[str, list[str], float]]]] = {}  # by the worker that alone is thawed
    for one in looks:
        thawed = [name for name, (state, c, _) in one.items() if role(c) == "worker" and state == "THAWED"]
        if len(thawed) == 1:
            windows.setdefault(thawed[0], []).append(one)
    spinner, in_window = max(windows.items(), key=lambda item: len(item[1]))
    assert len(in_window) > 10
    assert in_window[-1][spinner][2] - in_window[0][spinner][2] > 0.5, "the thawed one is not the one that spins"
    for one in in_window:
        roles = sorted((role(commands), state) for state, commands, _ in one.values() if role(commands) != "awake")
        assert roles == [
            ("agent", "FROZEN"), ("judge", "THAWED"), ("worker", "FROZEN"), ("worker", "FROZEN"),
            ("worker", "FROZEN"), ("worker", "THAWED"),
        ]  # fmt: skip


# -------------------------------------------------------------------- the judge itself


@pytest.mark.docker("slow")
def test_identity_of_the_judge(judged: Bench) -> None:
    """No key, no network, no root, no home; a worker's sandbox shows nothing of it."""
    folder = Path(f"/proc/{judged.judge}")
    environment = folder.joinpath("environ").read_bytes()
    assert b"sk-very-secret" not in environment
    assert b"ANTHROPIC" not in environment
    status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line)
    assert status["Uid"].split() == [str(JUDGE_UID)] * 4
    assert int(status["CapEff"], 16) == 0
    interfaces = folder.joinpath("net/dev").read_text().splitlines()[2:]
    assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]


@pytest.mark.docker("slow")
def test_a_worker_sees_nothing_of_the_judge(judged: Bench) -> None:
    verdict = judged("""
    import os, socket
    seen = {"opt": sorted(os.listdir("/opt")), "ours": sorted(os.listdir("/opt/justgoal")), "uid": os.getuid()}
    seen["processes"] = [pid for pid in os.listdir("/proc") if pid.isdigit()]
    seen["links"] = sorted(os.listdir("/sys/class/net")) if os.path.isdir("/sys/class/net") else []
    seen["files"] = sorted(set(os.listdir("/solution")) - {"__pycache__"})
    seen["tmp"] = sorted(os.listdir("/tmp"))
    raise RuntimeError(repr(seen))
    """)
    seen = {"opt": ["justgoal", "python", "venv"], "ours": ["worker.py"], "uid": UID, "processes": ["1"], "links": [],
            "files": ["solution.py"], "tmp": ["home"]}  # fmt: skip
    assert f"RuntimeError: {seen!r}" in verdict.output


@pytest.mark.docker("slow")
def test_priority_comes_back_after_preparing(judged: Bench) -> None:
    """Draws are prepared at idle priority; evaluations are not made at it."""
    folder = group_of(judged.judge, "cpu")
    assert folder
    idle = folder / "cpu.idle"
    if not idle.exists():
        pytest.skip("this kernel has no idle groups")
    judged.evaluator.prepare()
    assert idle.read_text() == "1\n"
    judged.evaluator.pause()
    assert idle.read_text() == "0\n"
    assert os.sched_getscheduler(judged.judge) == os.SCHED_OTHER


@pytest.mark.docker("slow")
def test_a_lost_judge_is_nobodys_fault(engine: Engine) -> None:
    evaluator = Evaluator(contract.task(str(SCALE_ADD)), engine)
    before = set(judges())
    try:
        [mine] = [pid for pid in before if str(SCALE_ADD.name) in descendants()[pid]][-1:]
        actions: list[Callable[[], object]] = [
            evaluator.open, evaluator.prepare, evaluator.pause, lambda: evaluator.evaluate(solution(HONEST)),
        ]  # fmt: skip
        os.kill(newest(before), 9)
        assert mine
        deadline = time.monotonic() + 10
        while set(judges()) == before and time.monotonic() < deadline:
            time.sleep(0.01)
        for action in actions:
            with pytest.raises(EvaluatorFailed, match="the judge"):
                action()
    finally:
        evaluator.close()


def newest(pids: set[int]) -> int:
    return max(pids, key=lambda pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]))


def operator(folder: Path, expert: str) -> Path:
    """A copy of scale_add with another expert."""
    target = folder / "scale_add"
    for path in SCALE_ADD.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            copy = target / path.relative_to(SCALE_ADD)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    (target / "experts" / "eager" / "solution.py").write_text(expert)
    return target


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expert", "reason"),
    [
        ("import nothing\n\ndef run(x, y, alpha):\n    pass\n",
         "no expert runs here: eager: ModuleNotFoundError at line 1 of the solution"),
        (returning("out * 1.01", "out.sum(1)"),
         "no expert runs and is exact enough here: eager: its error 1.0e-02 is above 1.0e-05"),
    ],
    ids=["broken", "inexact"],
)  # fmt: skip
def test_no_expert(engine: Engine, tmp_path: Path, expert: str, reason: str) -> None:
    evaluator = Evaluator(contract.task(str(operator(tmp_path, expert))), engine)
    try:
        with pytest.raises(EvaluatorFailed, match=f"^{re.escape(reason)}$"):
            evaluator.open()
    finally:
        evaluator.close()
