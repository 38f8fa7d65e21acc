"""The catalogue's operators: references against loops of another hand, experts accepted, planted bugs rejected."""

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from justgoal.evaluation.bounds import worst
from justgoal.evaluation.draws import Draw, Problem
from justgoal.tasks.contract import Operator, Task, Workload, load, shapes, task

Run = Callable[..., Any]
GDN, TOP_K = load("gated_delta_net_prefill"), load("top_k_select")
ATTENTION, SPARSE = load("attention_backward"), load("sparse_attention")
OPERATORS = (ATTENTION, GDN, SPARSE, TOP_K)
TASKS = [task(f"{operator.name}/{workload.name}") for operator in OPERATORS for workload in operator.workloads]
COMPILED = pytest.mark.slow
WRONG = 1e-4
"""Relative L2 that every bug exceeds on some case."""
SMALL = {
    ATTENTION.name: Workload("small", "", {"B": 2, "Sq": 70, "Sk": 53, "Hq": 6, "Hk": 2, "D": 32}),
    SPARSE.name: Workload(
        "small",
        "",
        {"T": 8, "H": 3, "P": 9, "K": 500},
        {},
        dict.fromkeys(("q_nope", "q_pe", "ckv_cache", "kpe_cache", "output"), "float32"),
    ),
    GDN.name: Workload("small", "", {"T": 203, "N": 5, "Hk": 2, "Hv": 4, "D": 32}, {"lengths": [70, 1, 19, 80, 33]}),
    TOP_K.name: Workload("small", "", {"B": 3, "N": 1031, "K": 64}),
}


def module(path: Path) -> ModuleType:
    """A solution or a reference; what bugs share (bugs/common.py) is found by each as its own."""
    spec = importlib.util.spec_from_file_location("_".join(path.parts[-4:-1]), path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parents[1]))
    try:
        spec.loader.exec_module(loaded)
    finally:
        sys.path.remove(str(path.parents[1]))
        sys.modules.pop("common", None)
    return loaded


REFERENCE = {operator.name: module(operator.folder / "reference.py") for operator in OPERATORS}


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with torch.inference_mode(False), torch.no_grad():
        yield
    torch.set_num_threads(before)


def cases(operator: str, workload: Workload) -> dict[str, Callable[[torch.Generator, str], Any]]:
    """The usual data under the name "", and the edge cases."""
    reference = REFERENCE[operator]
    usual = lambda generator, device: reference.make_inputs(workload, generator, device)  # noqa: E731
    return {"": usual, **reference.edge_cases(workload)}


def error(operator: str, inputs: Any, outputs: Any, expected: Any) -> float:
    """The largest relative L2 error of any output; infinite where something is not finite or has another shape."""
    compare = getattr(REFERENCE[operator], "comparable", lambda _, values: values)
    largest = 0.0
    for value, wanted in zip(compare(inputs, outputs), compare(inputs, expected), strict=True):
        infinite = torch.isinf(wanted)
        if value.shape != wanted.shape or not torch.equal(value[infinite].double(), wanted[infinite].double()):
            return math.inf
        value, wanted = value.double().masked_fill(infinite, 0), wanted.double().masked_fill(infinite, 0)
        if not torch.isfinite(value).all():
            return math.inf
        largest = max(largest, float((value - wanted).norm() / wanted.norm().clamp_min(1e-300)))
    return largest


def errors(operator: str, workload: Workload, run: Run) -> Iterator[tuple[str, float]]:
    for case, make in cases(operator, workload).items():
        inputs = make(torch.Generator().manual_seed(5), "cpu")
        yield case, error(operator, inputs, run(*inputs), REFERENCE[operator].reference(*inputs))


def flat(inputs: Any) -> list[torch.Tensor]:
    return [torch.as_tensor(value) for value in inputs]


@pytest.mark.parametrize("one", TASKS, ids=lambda one: one.name)
def test_data_has_the_declared_layout(one: Task) -> None:
    layout = shapes(one)
    arguments = layout[: len(one.operator.arguments)]
    for case, make in cases(one.operator.name, one.workload).items():
        inputs = make(torch.Generator().manual_seed(1), "cpu")
        assert len(inputs) == len(arguments), case
        for value, wanted, declared in zip(inputs, arguments, one.operator.arguments, strict=True):
            if declared.scalar:
                assert type(value) is (int if declared.dtype == "int64" else float), case
                continue
            assert (value.dtype, tuple(value.shape)) == (getattr(torch, wanted.dtype), wanted.shape), (case, wanted)
            assert value.is_contiguous(), (case, wanted)
            assert case == "NaN where nobody looks" or not value.isnan().any(), (case, wanted)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_data_follows_its_generator(operator: Operator) -> None:
    for case, make in cases(operator.name, SMALL[operator.name]).items():
        first, again, other = (flat(make(torch.Generator().manual_seed(seed), "cpu")) for seed in (1, 1, 2))
        assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(first, again, strict=True)), case
        same = [torch.equal(x, y) for x, y in zip(first, other, strict=True)]
        assert not all(same) or case == "zeros of both signs", case


def test_sequences_are_a_partition_of_the_tokens() -> None:
    for workload in (*GDN.workloads, SMALL[GDN.name]):
        for case, make in cases(GDN.name, workload).items():
            inputs = make(torch.Generator().manual_seed(3), "cpu")
            assert inputs.cu_seqlens[0] == 0 and inputs.cu_seqlens[-1] == workload.axes["T"], case
            assert (inputs.cu_seqlens.diff() > 0).all(), case
            rounding = 1e-6 if inputs.k.dtype == torch.float32 else 2e-3
            assert float((inputs.k.float().norm(dim=-1) - 1).abs().max()) < rounding, case


def by_hand(
    inputs: Any, drop: int = 0, state_of: Callable[[int], Any] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule for one head of one sequence after the other, written from the paper's formula
    S = S (decay (I - beta k k^T)) + beta v k^T with S values by keys. Every `drop` tokens the state is lost.
    """
    q, k, v, state, a_log, a, dt_bias, b = (x.double() for x in inputs[:8])
    output, new_state = torch.empty_like(v), torch.empty_like(state)
    for i, (first, last) in enumerate(zip(inputs.cu_seqlens.tolist(), inputs.cu_seqlens.tolist()[1:], strict=False)):
        for head in range(v.shape[1]):
            source = head * k.shape[1] // v.shape[1]
            s = state[i, head].clone()
            for t in range(first, last):
                if drop and t > first and (t - first) % drop == 0:
                    s = torch.zeros_like(s)
                x = a[t, head] + dt_bias[head]
                decay = math.exp(-math.exp(a_log[head]) * (math.log1p(math.exp(-abs(x))) + max(x, 0.0)))
                beta = 1 / (1 + math.exp(-b[t, head]))
                key = k[t, source]
                s = decay * (s - beta * torch.outer(s @ key, key)) + beta * torch.outer(v[t, head], key)
                output[t, head] = inputs.scale * (s @ q[t, source])
            new_state[i, head] = s
    return output, new_state


def test_gated_delta_rule_by_hand() -> None:
    for case, make in cases(GDN.name, SMALL[GDN.name]).items():
        inputs = make(torch.Generator().manual_seed(7), "cpu")
        expected = by_hand(inputs)
        assert error(GDN.name, inputs, REFERENCE[GDN.name].reference(*inputs), expected) < 1e-12, case


@pytest.mark.parametrize(("workload", "least"), [("ragged_4x8", 0.2), ("primes_8x16", 0.3), ("long_4x8", 0.5)])
def test_a_lost_state_shows_in_the_usual_data(workload: str, least: float) -> None:
    """With a model's own initial gates it would be wrong by 0.9 % only; here by tens of percent."""
    one = task(f"{GDN.name}/{workload}")
    axes = {**one.workload.axes, "Hk": 1, "Hv": 2}
    few_heads = Workload(workload, "", axes, one.workload.values)
    inputs = REFERENCE[GDN.name].make_inputs(few_heads, torch.Generator().manual_seed(2), "cpu")
    # Two heads instead of all: those that remember for 1 and for 4096 tokens.
    expected = REFERENCE[GDN.name].reference(*inputs)
    lost = by_hand(inputs, drop=64)
    assert float((lost[0] - expected[0]).norm() / expected[0].norm()) > least


def test_every_argument_matters() -> None:
    reference = REFERENCE[GDN.name]
    inputs, other = (reference.make_inputs(SMALL[GDN.name], torch.Generator().manual_seed(s), "cpu") for s in (1, 2))
    other = other._replace(cu_seqlens=inputs.cu_seqlens + torch.tensor([0, 1, 1, 1, 1, 0]), scale=0.1)
    expected = reference.reference(*inputs)
    for name in inputs._fields:
        changed = reference.reference(*inputs._replace(**{name: getattr(other, name)}))
        difference = max(float((x - y).norm() / y.norm()) for x, y in zip(changed, expected, strict=True))
        assert difference > 1e-2, name


def factor(problem: Problem, case: str, run: Run) -> float:
    """By how much the outputs of `run` exceed what the judge allows beside the first expert."""
    inputs = problem.inputs(case, seed=5)
    draw = Draw(case, inputs, problem.comparable(inputs, problem.module.reference(*inputs)))
    first = problem.task.operator.experts[0]
    problem.set_bounds(draw, module(first.folder / "solution.py").run(*inputs), [])
    found = problem.errors(draw, run(*inputs))
    return max(worst(one, allowed)[0] for one, allowed in zip(found, draw.bounds, strict=True))


def expert_tests() -> list[Any]:
    return [
        pytest.param(one, name, marks=COMPILED if name == "compiled" else ())
        for one in TASKS
        for name in [expert.name for expert in one.operator.experts]
    ]


@pytest.mark.filterwarnings("default")  # torch.compile's own
@pytest.mark.parametrize(("one", "name"), expert_tests(), ids=lambda value: getattr(value, "name", value))
def test_experts_are_right_on_every_case(one: Task, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [expert] = [expert for expert in one.operator.experts if expert.name == name]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    problem = Problem(one)
    with torch._dynamo.config.patch(error_on_recompile=True):  # one partition of the tokens is as good as another
        run = module(expert.folder / "solution.py").run
        found = {case: factor(problem, case, run) for case in ["", *problem.cases]}
    assert {case: value for case, value in found.items() if not value <= 1} == {}


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_experts_leave_their_inputs_alone(operator: Operator) -> None:
    workload = SMALL[operator.name]
    inputs = REFERENCE[operator.name].make_inputs(workload, torch.Generator().manual_seed(1), "cpu")
    before = [value.clone() for value in flat(inputs)]
    for expert in operator.experts:
        if expert.name != "compiled":
            module(expert.folder / "solution.py").run(*inputs)
            assert all(torch.equal(x, y) for x, y in zip(flat(inputs), before, strict=True)), expert.name


def attention_by_hand(inputs: Any) -> list[torch.Tensor]:
    """Attention written for one head after the other, and its gradients by automatic differentiation."""
    grad_output, q, k, v, _, _, scale, causal = inputs
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    group, alone = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
    with torch.enable_grad():
        total = torch.zeros((), dtype=torch.float64)
        for h in range(q.shape[2]):
            for i in range(q.shape[1]):
                seen = i + alone + 1 if causal else k.shape[1]
                if seen > 0:
                    scores = scale * torch.einsum("bd,bjd->bj", q[:, i, h], k[:, :seen, h // group])
                    answer = torch.einsum("bj,bjd->bd", scores.softmax(-1), v[:, :seen, h // group])
                    total = total + (answer * grad_output[:, i, h]).sum()
        return list(torch.autograd.grad(total, (q, k, v)))


@pytest.mark.parametrize("case", ["", "no mask", "another scale", "rows without a gradient"])
def test_attention_backward_by_hand(case: str) -> None:
    """Up to the rounding of what was saved."""
    inputs = cases(ATTENTION.name, SMALL[ATTENTION.name])[case](torch.Generator().manual_seed(7), "cpu")
    found = REFERENCE[ATTENTION.name].reference(*inputs)
    assert error(ATTENTION.name, inputs, found, attention_by_hand(inputs)) < 1e-6


def test_gradients_add_up_over_keys() -> None:
    """What a ring of two devices computes, each from its keys and what both saved, is what one computes of all keys."""
    workload = Workload("all", "", {"B": 1, "Sq": 20, "Sk": 60, "Hq": 4, "Hk": 2, "D": 16})
    reference = REFERENCE[ATTENTION.name]
    inputs = cases(ATTENTION.name, workload)["no mask"](torch.Generator().manual_seed(3), "cpu")
    grad, q, k, v, *saved = inputs
    whole = reference.reference(*inputs)
    parts = [reference.reference(grad, q, k[:, part], v[:, part], *saved) for part in (slice(0, 25), slice(25, 60))]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0])
    for index in (1, 2):
        torch.testing.assert_close(torch.cat([part[index] for part in parts], 1), whole[index])


def test_sparse_attention_by_hand() -> None:
    """Position by position in Python floats, for one token of each kind of row."""
    inputs = cases(SPARSE.name, SMALL[SPARSE.name])["few valid indices"](torch.Generator().manual_seed(7), "cpu")
    output, lse = REFERENCE[SPARSE.name].reference(*inputs)
    q_nope, q_pe, ckv, kpe, indices, scale = inputs
    for token in (0, 1, 2):
        named = [i for i in indices[token].tolist() if i != -1]
        if not named:
            assert bool((output[token] == 0).all()) and bool((lse[token] == -math.inf).all())
            continue
        rows = [(ckv[i // 64, i % 64].double(), kpe[i // 64, i % 64].double()) for i in named]
        for head in range(q_nope.shape[1]):
            query, place = q_nope[token, head].double(), q_pe[token, head].double()
            weights = [2 ** (scale * float(query @ c + place @ p) / math.log(2)) for c, p in rows]
            assert float(lse[token, head]) == pytest.approx(math.log2(sum(weights)))
            expected = sum((w * c for w, (c, _) in zip(weights, rows, strict=True)), torch.zeros(512).double())
            torch.testing.assert_close(output[token, head], expected / sum(weights))


def test_indices_are_distinct_positions() -> None:
    for workload in (*SPARSE.workloads, SMALL[SPARSE.name]):
        for case, make in cases(SPARSE.name, workload).items():
            indices = make(torch.Generator().manual_seed(3), "cpu")[4]
            for row in indices:
                named = row[row != -1].tolist()
                assert len(set(named)) == len(named), case
                assert all(0 <= i < 64 * workload.axes["P"] for i in named), case


# Bugs that only one kind of case finds, which is why that kind exists.
ALONE = {
    "scale_ignored": {"another scale", "another scale and larger queries"},
    "denormals_are_zero": {"denormal numbers"},
    "half_precision_range": {"numbers of every magnitude"},
    "always_causal": {"no mask"},
    "small_gradients_skipped": {"tiny gradients"},
    "gradients_in_the_range_of_float16": {"gradients of very different size"},
    "padding_reads_position_0": {"NaN where nobody looks"},
}
BUGS = [(operator, bug) for operator in OPERATORS for bug in operator.bugs]
LARGE = {"sequences_of_300_tokens_at_most"}
"""Those that small workloads are too small for."""


def failing(operator: str, workload: Workload, run: Run) -> list[str]:
    """The cases on which a solution is clearly wrong. One call goes before, for those that live on earlier ones."""
    run(*cases(operator, workload)[""](torch.Generator().manual_seed(4), "cpu"))
    return [case for case, value in errors(operator, workload, run) if value > WRONG]


@pytest.mark.parametrize(
    ("operator", "bug"), [pair for pair in BUGS if pair[1].name not in LARGE], ids=lambda value: value.name
)
def test_planted_bugs_are_rejected(operator: Operator, bug: Path) -> None:
    found = failing(operator.name, SMALL[operator.name], module(bug / "solution.py").run)
    assert found
    assert bug.name not in ALONE or ALONE[bug.name] >= set(found)


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "bug"), BUGS, ids=lambda value: value.name)
def test_planted_bugs_are_rejected_at_full_size(operator: Operator, bug: Path) -> None:
    assert failing(operator.name, operator.workloads[0], module(bug / "solution.py").run)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_there_are_enough_of_everything(operator: Operator) -> None:
    assert len(operator.experts) >= 3
    assert len(operator.workloads) >= 3
    assert len(operator.bugs) >= (15 if operator is GDN else 10)


def select(values: list[float], indices: list[int]) -> float:
    """Error of this answer for the two largest of 5, 1, 3, 3."""
    x = torch.tensor([[5.0, 1.0, 3.0, 3.0]])
    reference = REFERENCE[TOP_K.name].reference(x, 2)
    answer = torch.tensor([values], dtype=torch.float32), torch.tensor([indices])
    return error(TOP_K.name, (x, 2), answer, reference)


def test_any_order_and_any_of_equal_entries_will_do() -> None:
    assert select([5, 3], [0, 2]) == 0
    assert select([5, 3], [0, 3]) == 0
    assert select([3, 5], [2, 0]) == 0


def test_wrong_selections_are_not_finite() -> None:
    assert select([5, 1], [0, 1]) == math.inf
    assert select([3, 3], [2, 3]) == math.inf
    assert select([5, 5], [0, 0]) == math.inf
    assert select([5, 3], [0, 4]) == math.inf
    assert select([5, 3], [0, -1]) == math.inf
    assert select([5, 3], [0, 1 << 62]) == math.inf


def test_values_must_be_those_at_the_indices() -> None:
    assert select([3, 5], [0, 2]) > 0.1
    assert select([5, 3.001], [0, 2]) > WRONG
    assert select([math.nan, 3], [0, 2]) == math.inf
