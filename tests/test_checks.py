"""`justgoal tasks check` and `tasks new`: strong tasks pass, weak ones do not run, malformed ones are told where.

The operator is the toy of `justgoal tasks new`, made smaller, in real sandboxes.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from justgoal import checks
from justgoal.errors import UsageError
from justgoal.evaluation import strength
from justgoal.evaluation.checking import drawn, spread
from justgoal.evaluation.draws import Problem
from justgoal.evaluation.evaluator import Evaluator
from justgoal.evaluation.strength import Planted, Strength
from justgoal.sandboxes import Engine
from justgoal.tasks import contract, new

PROGRAM = "from justgoal.cli import main; main()"
OPERATORS = Path(__file__).parents[1] / "docs" / "operators"
BUBBLEWRAP = ("--engine", "bubblewrap")
WORKLOADS = """
[[workloads]]
name = "small"
title = "130 rows of 257"
axes = { N = 130, M = 257 }
"""
TABLE = r"""toy/small
kinds of inputs
  1  random inputs
  2  another scale
  3  large numbers
  4  only the last column
experts
  product  accepted
  summed   accepted
outputs on random inputs
  output 0 \(y\)  -\d[\d.]* to \d[\d.]*, another seed changes \d+ %
planted errors
                                            caught by  allclose\(1e-2\)
  bug 'float16_sums'                        all        passes
  mutant 'constant'                         all        fails           trivial, not counted
  mutant 'mean'                             all        fails           trivial, not counted
  mutant 'copy of an input'                 all        fails           trivial, not counted
  mutant 'inputs in lower precision'        all        passes          as bug 'float16_sums', not counted
  mutant 'accumulation in lower precision'  all        passes          as bug 'float16_sums', not counted
  mutant 'last row tile dropped'            all        fails           trivial, not counted
  mutant 'sum over row truncated'           all        fails           trivial, not counted
  mutant 'sum over column truncated'        all        fails           trivial, not counted
  mutant 'x ignored'                        all        fails           trivial, not counted
  mutant 'weight ignored'                   all        fails           trivial, not counted
  mutant 'scale ignored'                    2          passes
  mutant 'output of the previous call'      all        fails           trivial, not counted
  mutant 'partial write'                    all        fails           trivial, not counted
2 of 2 planted errors are caught; allclose\(1e-2\) on one random input catches 0

"""


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ANTHROPIC_API_KEY": "key"}
    return subprocess.run([sys.executable, "-c", PROGRAM, *words], cwd=folder, env=environment, capture_output=True,
                          text=True, timeout=300, check=False)  # fmt: skip


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    list(new.lay_out("toy"))
    (tmp_path / "toy" / "workloads.toml").write_text(WORKLOADS)
    return tmp_path / "toy"


def change(path: Path, old: str, text: str) -> None:
    source = path.read_text()
    assert old in source
    path.write_text(source.replace(old, text))


def measured(folder: Path, engine: Engine) -> Strength:
    task = contract.task(str(folder))
    with closing(Evaluator(task, engine)) as judge:
        return strength.measure(task, judge)


# -------------------------------------------------------------------- tasks new


def test_what_is_said_of_a_new_folder(tmp_path: Path) -> None:
    done = command(tmp_path, "tasks", "new", "row_sums")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "row_sums/ is a toy that already passes. Replace, in this order:\n"
        "  operator.toml   what it takes and returns\n"
        "  workloads.toml  on which sizes\n"
        "  reference.py    the definition, the usual data, and the edge cases\n"
        "  experts/        honest implementations, at least two\n"
        "  bugs/           wrong ones that the judge must catch\n"
        "then: justgoal tasks check row_sums\n"
    )
    assert [one.name for one in contract.load(str(tmp_path / "row_sums")).workloads] == ["large", "odd"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("row-sums", "'row-sums' must be letters, digits and underscores: it names the folder and the operator"),
        ("top_k_select", "there is an operator top_k_select already (justgoal tasks show top_k_select): "
                         "give another name"),
        ("here", "here exists: give another name, or remove it"),
    ],
)  # fmt: skip
def test_names_that_are_refused(tmp_path: Path, name: str, line: str) -> None:
    (tmp_path / "here").mkdir()
    done = command(tmp_path, "tasks", "new", name)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {line}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


# -------------------------------------------------------------------- tasks check


@pytest.mark.slow
def test_the_toy_passes(toy: Path) -> None:
    done = command(toy.parent, "tasks", "check", "toy", *BUBBLEWRAP)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(TABLE, done.stdout), done.stdout


@pytest.mark.slow
def test_a_task_with_a_survivor_does_not_run(toy: Path) -> None:
    """The first command checks it, the second knows."""
    change(toy / "reference.py", '"another scale": another_scale, ', "")
    for _ in range(2):
        done = command(toy.parent, "run", "toy", "--model", "m", "--base-url", "http://127.0.0.1:9", "--runs", "runs",
                       *BUBBLEWRAP)  # fmt: skip
        assert done.returncode == 2
        assert done.stderr == (
            "error: toy/small is too weak to run: mutant 'scale ignored' is not caught: a case is missing with another"
            " scale (justgoal tasks check toy)\n"
        )
        assert not (toy.parent / "runs").exists()
    assert strength.stored(contract.task("toy")) is not None
    change(toy / "experts" / "summed" / "solution.py", ".sum(1)", ".sum(dim=1)")
    assert strength.stored(contract.task("toy")) is None


@pytest.mark.slow
def test_bugs_that_end_their_process_are_caught_and_others_still_judged(toy: Path, engine: Engine) -> None:
    arguments = "x, weight, scale"
    for name, source in {
        "a_killed": f"import os\n\n\ndef run({arguments}):\n    os.kill(os.getpid(), 9)\n",
        "b_raises": f"def run({arguments}):\n    raise ValueError\n",
        "c_without_import": f"import nothing_of_this_name\n\n\ndef run({arguments}):\n    pass\n",
        "d_shape": f"def run({arguments}):\n    return x\n",
        "e_right": f"# Is right.\nfrom common import right\n\n\ndef run({arguments}):\n    return right({arguments})\n",
    }.items():
        (toy / "bugs" / name).mkdir()
        (toy / "bugs" / name / "solution.py").write_text(source)
    (toy / "bugs" / "common.py").write_text(f"def right({arguments}):\n    return scale * (x @ weight)\n")
    found = measured(toy, engine)
    failing = {one.name: one.failing for one in found.planted if one.bug}
    every = (0, 1, 2, 3)
    assert failing == {
        "a_killed": every, "b_raises": every, "c_without_import": every, "d_shape": every, "e_right": (),
        "float16_sums": every,
    }  # fmt: skip
    assert [one.loose for one in found.planted if one.bug] == [False, False, False, False, True, True]
    assert found.weaknesses == [
        "bug 'e_right' is not caught: a case is missing in which this shows: \"Is right.\"",
    ]


@pytest.mark.slow
def test_experts_that_are_wrong(toy: Path, engine: Engine) -> None:
    change(toy / "experts" / "summed" / "solution.py", "return scale", "return 1.1 * scale")
    assert measured(toy, engine).weaknesses == [
        "a second honest implementation is missing beside expert product; summed: its error 1.0e-01 is above 1.0e-05"
    ]
    change(toy / "experts" / "product" / "solution.py", "return scale", "return nothing")
    with pytest.raises(UsageError) as error:
        measured(toy, engine)
    assert str(error.value) == (
        "toy: no expert is right here: product: it fails: NameError; summed: its error 1.0e-01 is above 1.0e-05"
    )


@pytest.mark.slow
def test_an_operator_with_sizes_masks_and_one_kind_of_answer(engine: Engine) -> None:
    """`buckets` can only be the size of an axis: nothing that ignores it is planted."""
    found = measured(OPERATORS / "row_histogram", engine)
    names = [one.name for one in found.planted]
    assert "numbers ignored" in names and "numbers shifted" in names and "buckets ignored" not in names
    assert found.weaknesses == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["residual_rms_norm", "row_histogram"])
def test_the_examples_of_the_documentation_pass(tmp_path: Path, name: str) -> None:
    done = command(tmp_path, "tasks", "check", str(OPERATORS / name), *BUBBLEWRAP)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.mark.thorough
def test_nothing_survives_in_the_catalogue(tmp_path: Path) -> None:
    done = command(tmp_path, "tasks", "check", *BUBBLEWRAP)
    assert " none " not in done.stdout and "weak: mutant" not in done.stdout


# -------------------------------------------------------------------- what follows from what was found


def planted(name: str, *failing: int, bug: bool = False, loose: bool = False) -> Planted:
    return Planted(name, bug, f"with {name}", failing, loose)


FOUND = Strength(
    "op/w", ("random inputs", "a", "b"), {"one": "", "two": ""}, (),
    (
        planted("everywhere", 0, 1, 2), planted("narrow", 0, 1, 2, loose=True), planted("one", 1, bug=True),
        planted("same", 1), planted("other", 0, 2),
    ),
    (),
)  # fmt: skip


def test_what_counts() -> None:
    """Neither what every look finds nor what the same kinds of inputs catch as something else."""
    assert [one.name for one in FOUND.counted] == ["narrow", "one", "other"]
    assert FOUND.summary() == {"planted": 3, "caught": 3, "allclose": 2}
    assert Strength.from_json(json.loads(json.dumps(FOUND.to_json()))) == FOUND


def test_refusals_name_the_first_weakness() -> None:
    FOUND.admit("op")
    weak = dataclasses.replace(FOUND, planted=(*FOUND.planted, planted("x"), planted("y")), doubts=("z",))
    assert weak.summary() == {"planted": 5, "caught": 3, "allclose": 4}
    with pytest.raises(UsageError) as error:
        weak.admit("here/op")
    assert str(error.value) == (
        "op/w is too weak to run: mutant 'x' is not caught: a case is missing with x, and 2 more"
        " (justgoal tasks check here/op)"
    )


def test_bugs_that_are_alike_on_every_workload() -> None:
    def on(*planted: Planted) -> Strength:
        return dataclasses.replace(FOUND, planted=planted)

    a, b, c = (planted(name, 1, bug=True) for name in "abc")
    apart = dataclasses.replace(b, failing=(2,))
    everywhere = [planted(name, 0, 1, 2, bug=True) for name in "de"]
    assert list(strength.alike([on(a, b, *everywhere)])) == [
        "bugs 'a' and 'b' are caught by the same kinds of inputs: keep one of them"
    ]
    assert list(strength.alike([on(a, b, c), on(a, apart, c)])) == [
        "bugs 'a' and 'c' are caught by the same kinds of inputs: keep one of them"
    ]
    assert list(strength.alike([on(a, apart)])) == []


@pytest.mark.parametrize(
    ("indices", "text"), [([], ""), ([0], "1"), ([0, 1], "1-2"), ([3, 0, 1, 5, 6, 7], "1-2 4 6-8")]
)
def test_ranges(indices: list[int], text: str) -> None:
    assert checks.ranges(indices) == text


# -------------------------------------------------------------------- data that does not fit what is declared


@pytest.mark.parametrize(
    ("old", "text", "message"),
    [
        ("return x, weight, 0.5", "return x, weight", "make_inputs returns 2 values for 3 arguments"),
        ("return x, weight, 0.5", "return x, weight, 1",
         "make_inputs returns scale as a int instead of a Python float"),
        ("return x, weight, 0.5", "return x.double(), weight, 0.5",
         "make_inputs returns x as float64 instead of float32"),
        ("return x, weight, 0.5", "return x, x, 0.5",
         "make_inputs returns weight as shape (130, 257) instead of (257,)"),
        ("return x, weight, 0.5", "return x, 3, 0.5", "make_inputs returns weight as a int instead of a tensor"),
        ("return x, weight, 0.5", "return torch.rand(130, 257), weight, 0.5",
         "make_inputs returns another x for the same seed: use the generator"),
        ('workload.axes["N"], workload.axes["M"]', 'workload.axes["N"], workload.axes["L"]',
         "make_inputs fails: KeyError: 'L'"),
        (".sum(1)", ".sum(0)", "reference returns y as shape (257,) instead of (130,)"),
        (".sum(1)", ".sum(2)", "reference fails: IndexError: Dimension out of range (expected to be in range of"
                               " [-2, 1], but got 2)"),
        ("return scale *", "return 0, scale *", "reference returns 2 values for 1 outputs"),
    ],
)  # fmt: skip
def test_data_that_does_not_fit(toy: Path, old: str, text: str, message: str) -> None:
    change(toy / "reference.py", old, text)
    problem = Problem(contract.task("toy"))
    with pytest.raises(UsageError) as error:
        drawn(problem, "", 0)
    assert str(error.value) == f"toy/reference.py: {message}"


def test_an_edge_case_is_named(toy: Path) -> None:
    change(toy / "reference.py", "return x, weight, -3.0", "return x, weight, -3")
    with pytest.raises(UsageError) as error:
        drawn(Problem(contract.task("toy")), "another scale", 0)
    assert str(error.value) == (
        "toy/reference.py: edge case 'another scale' returns scale as a int instead of a Python float"
    )


@pytest.mark.parametrize(
    ("old", "text", "message"),
    [
        ("def edge_cases(workload):", "def edge_cases(workload):\n    raise OSError(2)",
         "toy/reference.py: edge_cases fails: OSError: 2"),
        ("import torch", "import torch\nimport nothing_of_this_name",
         "toy/reference.py: cannot be imported: ModuleNotFoundError: No module named 'nothing_of_this_name'"),
    ],
)  # fmt: skip
def test_a_reference_that_fails(toy: Path, old: str, text: str, message: str) -> None:
    change(toy / "reference.py", old, text)
    with pytest.raises(UsageError) as error:
        Problem(contract.task("toy"))
    assert str(error.value) == message


@pytest.mark.slow
def test_what_the_judge_finds_malformed_is_a_usage_error(toy: Path) -> None:
    change(toy / "reference.py", "return x, weight, 0.5", "return x, weight")
    done = command(toy.parent, "tasks", "check", "toy", *BUBBLEWRAP)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: toy/reference.py: make_inputs returns 2 values for 3 arguments\n"


@pytest.mark.parametrize(
    ("make", "doubt"),
    [
        (lambda y, other: 0 * y, "output 0 (y) is zero everywhere, on random inputs"),
        (lambda y, other: y / 0, "output 0 (y) is not finite in most places, on random inputs"),
        (lambda y, other: y if other else y + 1e-6, "output 0 (y) differs by 0.00 % only under another seed, on "
                                                   "random inputs"),
    ],
)  # fmt: skip
def test_outputs_that_say_little(toy: Path, make: Callable[[torch.Tensor, bool], torch.Tensor], doubt: str) -> None:
    problem = Problem(contract.task("toy"))
    y = torch.randn(130, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    draws = [problem.draw(), problem.draw()]
    for other, draw in enumerate(draws):
        draw.reference = [make(y, bool(other))]
    assert spread(problem, *draws)[1] == [doubt]


def test_outputs_that_are_the_same_along_an_axis(toy: Path) -> None:
    problem = Problem(contract.task("toy"))
    one, other = problem.draw(), problem.draw()
    one.reference = [5 + 0.01 * torch.rand(130, generator=torch.Generator().manual_seed(1))]
    found, doubts = spread(problem, one, other)
    assert doubts == ["output 0 (y) varies by 0.06 % only from row to row, on random inputs"]
    assert found[0]["differs"] > 0.5
