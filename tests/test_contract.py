"""Operator folders as people write them: what is read, and the one line that each mistake gets."""

import os
import shutil
from pathlib import Path

import pytest

from justgoal.errors import UsageError
from justgoal.tasks.contract import CATALOGUE, TensorShape, load, names, shapes, task

OPERATOR = """
title = "Scaled sum"
summary = "Adds two rows."
source = "none"
devices = ["cpu"]

[axes]
N = "entry"

[[arguments]]
name = "x"
dtype = "float32"
axes = ["N", 2]

[[arguments]]
name = "starts"
dtype = "int64"
axes = ["N + 1"]

[[arguments]]
name = "scale"
dtype = "float32"
scalar = true

[[outputs]]
name = "y"
dtype = "float32"
axes = ["N"]
slices = ["N"]

[[experts]]
name = "eager"
title = "torch"
packages = ["einops"]

[[tolerances]]
workloads = ["large"]
slack = 4
why = "A sum of many terms."

[[harmless]]
bug = "wrong"
workloads = ["large"]
why = "Nothing to get wrong."
"""
WORKLOADS = """
[[workloads]]
name = "small"
title = "3 entries"
axes = { N = 3 }

[[workloads]]
name = "large"
title = "4 entries in bfloat16"
axes = { N = 4 }
values = { spread = 2.0 }
dtypes = { x = "bfloat16" }
"""
REFERENCE = """
def reference(x, starts, scale):
    return (scale * x.sum(1),)


def make_inputs(workload, generator, device):
    raise RuntimeError("reading an operator runs nothing")


def edge_cases(workload):
    return {}
"""
RUN = "def run(x, starts, scale):\n    return x\n"
FILES = {
    "operator.toml": OPERATOR,
    "workloads.toml": WORKLOADS,
    "reference.py": REFERENCE,
    "experts/eager/solution.py": RUN,
    "bugs/wrong/solution.py": RUN,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "scaled_sum"
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_everything_is_read(folder: Path) -> None:
    operator = load(str(folder))
    assert (operator.name, operator.title, operator.devices) == ("scaled_sum", "Scaled sum", ("cpu",))
    assert operator.axes == {"N": "entry"}
    assert [(a.name, a.scalar) for a in operator.arguments] == [("x", False), ("starts", False), ("scale", True)]
    assert operator.outputs[0].slices == ("N",)
    assert [(e.name, e.folder, e.packages) for e in operator.experts] == [
        ("eager", folder / "experts" / "eager", ("einops",))
    ]
    assert operator.bugs == (folder / "bugs" / "wrong",)


def test_shapes_come_from_the_workload(folder: Path) -> None:
    small, large = task(str(folder)), task(f"{folder}/large")
    assert (small.name, large.name) == ("scaled_sum/small", "scaled_sum/large")
    assert shapes(small) == [
        TensorShape("x", "float32", (3, 2)),
        TensorShape("starts", "int64", (4,)),
        TensorShape("scale", "float32", ()),
        TensorShape("y", "float32", (3,)),
    ]
    assert shapes(large)[0] == TensorShape("x", "bfloat16", (4, 2))
    assert large.workload.values == {"spread": 2.0}


def test_a_tolerance_holds_for_its_workloads(folder: Path) -> None:
    tolerance = task(f"{folder}/large").tolerance
    assert tolerance is not None
    assert (tolerance.slack, tolerance.limit) == (4.0, None)
    assert task(str(folder)).tolerance is None


def test_a_bug_may_be_none_on_a_workload(folder: Path) -> None:
    assert task(f"{folder}/small").bugs == (folder / "bugs" / "wrong",)
    assert task(f"{folder}/large").bugs == ()


def test_the_hash_follows_files_and_workload(folder: Path, tmp_path: Path) -> None:
    first = task(f"{folder}/small").sha256
    copy = tmp_path / "elsewhere" / "scaled_sum"
    shutil.copytree(folder, copy)
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__" / "reference.pyc").write_bytes(b"cache")
    assert task(f"{copy}/small").sha256 == first
    assert task(f"{folder}/large").sha256 != first
    (folder / "experts/eager/helper.py").write_text("")
    assert task(f"{folder}/small").sha256 != first


def test_the_catalogue() -> None:
    assert names() == ["gated_delta_net_prefill", "top_k_select"]
    for name in names():
        assert load(name).folder == CATALOGUE / name
        assert len(load(name).workloads) >= 2
        assert len(load(name).experts) >= 2
    assert task("gated_delta_net_prefill").name == "gated_delta_net_prefill/ragged_4x8"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "gated_delta",
            "no operator 'gated_delta': there are gated_delta_net_prefill, top_k_select (justgoal tasks list)",
        ),
        (
            "gated_delta/x",
            "no operator 'gated_delta': there are gated_delta_net_prefill, top_k_select (justgoal tasks list)",
        ),
        (
            "",
            "no operator '': there are gated_delta_net_prefill, top_k_select (justgoal tasks list)",
        ),
        (
            "gated_delta_net_prefill/x",
            "operator gated_delta_net_prefill has no workload 'x': there are ragged_4x8, primes_8x16, long_4x8 "
            "(justgoal tasks show gated_delta_net_prefill)",
        ),
        ("./nowhere", "no operator folder './nowhere': a folder with operator.toml in it is wanted"),
        ("../catalogue", "no operator folder '../catalogue': a folder with operator.toml in it is wanted"),
    ],
)
def test_unknown_names(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        task(text)
    assert str(caught.value) == message


def test_a_folder_beside_is_no_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"^no operator 'docs': there are "):
        load("docs")


def test_a_bare_name_may_be_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert task("scaled_sum/large").operator.folder == folder
    monkeypatch.chdir(folder)
    assert task("./large").name == task(".").name.replace("small", "large")


def test_a_workload_is_no_operator() -> None:
    with pytest.raises(UsageError, match="names a workload: an operator is wanted"):
        load("top_k_select/b8_n32768")


def test_a_folder_without_operator_toml(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"^{tmp_path.name}/operator.toml is missing$"):
        task(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("operator.toml", '"Scaled sum"', '"Scaled sum', "is not valid TOML: Illegal character '\\n' (at line 2,"),
        ("operator.toml", 'title = "Scaled sum"', "", "title is missing: it must be text"),
        ("operator.toml", '"Scaled sum"', "3", "title must be text, not 3"),
        ("operator.toml", '"Scaled sum"', '" "', "title is empty"),
        ("operator.toml", 'source = "none"', 'sauce = "none"', "source is missing: it must be text"),
        ("operator.toml", '["cpu"]', '["tpu"]', "devices[0] 'tpu' is not one of cpu, cuda"),
        ("operator.toml", '["cpu"]', '"cpu"', "devices must be a list of text, not 'cpu'"),
        ("operator.toml", '["cpu"]', '["cpu"]\nfast = 1', "fast is not a known field: there are title, "),
        ("operator.toml", 'N = "entry"', "N = 1", "axes.N must be text, not 1"),
        ("operator.toml", 'axes = ["N", 2]', "", "arguments[0].axes is missing: it must be a list of axis names"),
        ("operator.toml", '["N", 2]', '["N", -2]', "arguments[0].axes[1] -2 must be an axis, such as N or N+1"),
        ("operator.toml", '["N + 1"]', '["2*N"]', "arguments[1].axes[0] '2*N' must be an axis"),
        ("operator.toml", 'name = "starts"', 'name = "x"', "arguments and outputs name 'x' twice"),
        ("operator.toml", 'name = "starts"', 'name = "out"', "arguments name 'out', which is how `run` may ask for"),
        ("operator.toml", 'name = "starts"', 'name = "a b"', "arguments[1].name 'a b' must be letters, digits"),
        ("operator.toml", "scalar = true", "scalar = 1", "arguments[2].scalar must be true or false, not 1"),
        ("operator.toml", 'dtype = "int64"', 'dtype = "int64"\nscalar = true', "arguments[1].axes is not a known"),
        ("operator.toml", 'slices = ["N"]', 'slices = ["M"]', "outputs[0].slices[0] 'M' is not one of N"),
        (
            "operator.toml",
            'name = "y"\ndtype = "float32"',
            'name = "y"\ndtype = "float33"',
            "outputs[0].dtype 'float33' is not one of float64, float32,",
        ),
        ("operator.toml", "[[experts]]", "[experts]", "experts must be one or more [[experts]] tables, not {"),
        ("operator.toml", '["einops"]', "[1]", "experts[0].packages[0] must be text, not 1"),
        ("operator.toml", 'name = "eager"', 'name = "lazy"', None),
        ("operator.toml", 'why = "A sum of many terms."', "", "tolerances[0].why is missing: it must be text"),
        ("operator.toml", "slack = 4", "slack = 0.5", "tolerances[0].slack must be at least 1 and finite, not 0.5"),
        ("operator.toml", "slack = 4", "slack = nan", "tolerances[0].slack must be at least 1 and finite, not nan"),
        ("operator.toml", '["large"]', '["huge"]', "tolerances[0].workloads names 'huge', which is no workload"),
        (
            "operator.toml",
            'bug = "wrong"',
            'bug = "right"',
            "harmless[0].bug names 'right', which has no folder in bugs",
        ),
        (
            "operator.toml",
            '["large"]\nwhy = "N',
            '["huge"]\nwhy = "N',
            "harmless[0].workloads names 'huge', which is no",
        ),
        ("operator.toml", 'why = "Nothing to get wrong."', "", "harmless[0].why is missing: it must be text"),
        ("workloads.toml", WORKLOADS, "", "workloads is missing: it must be one or more [[workloads]] tables"),
        ("workloads.toml", WORKLOADS, "workloads = []", "workloads is empty: it must be one or more [[workloads]]"),
        ("workloads.toml", WORKLOADS, "workloads = [1]", "workloads[0] must be a table, not 1"),
        ("workloads.toml", 'name = "large"', 'name = "small"', "workloads name 'small' twice"),
        ("workloads.toml", "{ N = 3 }", "{ M = 3 }", "workloads[0].axes.N is missing: x has that axis"),
        ("workloads.toml", "{ N = 3 }", "{ N = true }", "workloads[0].axes.N must be a size, not True"),
        ("workloads.toml", "{ N = 3 }", "3", "workloads[0].axes must be a table, not 3"),
        ("workloads.toml", "{ x =", "{ z =", "workloads[1].dtypes.z is neither an argument nor an output"),
        ("workloads.toml", '"bfloat16"', '"int4"', "workloads[1].dtypes.x 'int4' is not one of float64,"),
        ("reference.py", REFERENCE, "def f(:", "is not valid Python: line 1: invalid syntax"),
        ("reference.py", REFERENCE, "\0", "is not valid Python: "),
        ("workloads.toml", WORKLOADS, "x = " + "[" * 20000, "is not valid TOML: nested too deeply"),
        ("reference.py", REFERENCE, "x = " + "-" * 200000 + "1", "is not valid Python: nested too deeply"),
        ("reference.py", "def edge_cases", "def cases", "defines no function edge_cases(workload)"),
        ("reference.py", "(workload, generator, device)", "(workload)", "make_inputs must take (workload, gen"),
        ("reference.py", "(x, starts, scale)", "(x, starts)", "reference must take (x, starts, scale) by position"),
        ("experts/eager/solution.py", "def run", "def ran", "defines no function run(x, starts, scale)"),
        ("bugs/wrong/solution.py", "scale):", "scale, *, fast):", "run must take (x, starts, scale) by position"),
    ],
)
def test_each_mistake_names_file_and_field(folder: Path, file: str, old: str, new: str, message: str | None) -> None:
    text = FILES[file]
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1))
    with pytest.raises(UsageError) as caught:
        task(str(folder))
    line = str(caught.value)
    assert "\n" not in line
    wanted = f"scaled_sum/{file}: {message}" if message else "scaled_sum/experts/lazy/solution.py is missing"
    assert line.startswith(wanted)


@pytest.mark.parametrize("file", sorted(FILES))
def test_each_missing_file_is_named(folder: Path, file: str) -> None:
    (folder / file).unlink()
    with pytest.raises(UsageError) as caught:
        task(str(folder))
    assert str(caught.value) == f"scaled_sum/{file} is missing"


def test_a_fifo_is_not_waited_for(folder: Path) -> None:
    (folder / "workloads.toml").unlink()
    os.mkfifo(folder / "workloads.toml")
    with pytest.raises(UsageError, match=r"^scaled_sum/workloads\.toml: is no regular file$"):
        task(str(folder))


def test_an_expert_that_is_not_listed(folder: Path) -> None:
    shutil.copytree(folder / "experts/eager", folder / "experts/other")
    with pytest.raises(UsageError) as caught:
        task(str(folder))
    assert str(caught.value) == "scaled_sum/operator.toml: experts lacks 'other', which has a folder"


def test_functions_may_take_more(folder: Path) -> None:
    (folder / "experts/eager/solution.py").write_text("def run(*arguments, fast=True):\n    return arguments[0]\n")
    (folder / "bugs/wrong/solution.py").write_text("def run(x, starts, scale=1.0, chunk=16):\n    return x\n")
    assert task(str(folder)).name == "scaled_sum/small"
