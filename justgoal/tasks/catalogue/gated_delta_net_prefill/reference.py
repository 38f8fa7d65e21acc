"""The gated delta rule as a loop over tokens, in float64, and the data that it is judged on.

For every sequence and value head h there is a state S of D keys by D values. Value head h belongs to key head
h // (Hv // Hk). With decay = exp(-exp(A_log) softplus(a + dt_bias)) and beta = sigmoid(b), each token does

    S = decay S
    S = S + k (beta (v - S^T k))^T
    output = scale S^T q

A sequence starts from its row of `state`, which is stored values first ([N, Hv, value, key]: the transpose of S), as
`new_state` is. Sequence i is the tokens cu_seqlens[i] to cu_seqlens[i + 1] - 1. No sequence is empty, and every row
of k has norm 1 up to its dtype's rounding; nothing else may be assumed of values.
"""

from typing import NamedTuple

import torch
from torch.nn import functional


class Inputs(NamedTuple):
    q: torch.Tensor  # [T, Hk, D]
    k: torch.Tensor  # [T, Hk, D]
    v: torch.Tensor  # [T, Hv, D]
    state: torch.Tensor  # [N, Hv, D, D]
    A_log: torch.Tensor  # [Hv]
    a: torch.Tensor  # [T, Hv]
    dt_bias: torch.Tensor  # [Hv]
    b: torch.Tensor  # [T, Hv]
    cu_seqlens: torch.Tensor  # [N + 1], int64
    scale: float


def reference(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    """Token t of all sequences at once, the longest sequences first: the first rows of S are those still running."""
    q, k, v, state, A_log, a, dt_bias, b = (x.double() for x in (q, k, v, state, A_log, a, dt_bias, b))
    heads = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(heads, dim=1) for x in (scale * q, k))
    decay = torch.exp(-torch.exp(A_log) * functional.softplus(a + dt_bias))
    beta = torch.sigmoid(b)

    starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    order = lengths.argsort(descending=True)
    S = state[order].transpose(-1, -2).contiguous()  # [N, Hv, key, value]
    output = torch.empty_like(v)
    for t in range(int(lengths.max())):
        running = order[: int((lengths > t).sum())]
        rows = starts[running] + t
        now = S[: len(running)]
        key = k[rows].unsqueeze(-2)
        now *= decay[rows][..., None, None]
        update = beta[rows][..., None, None] * (v[rows].unsqueeze(-2) - key @ now)
        now.addcmul_(key.transpose(-1, -2), update)
        output[rows] = (q[rows].unsqueeze(-2) @ now).squeeze(-2)
    new_state = torch.empty_like(state)
    new_state[order] = S.transpose(-1, -2)
    return output, new_state


def make_inputs(workload, generator, device):
    """Every head remembers for another time: half-lives from 1 to 4096 tokens, in random order."""
    T, N, Hk, Hv, D = (workload.axes[axis] for axis in ("T", "N", "Hk", "Hv", "D"))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    half_lives = torch.logspace(0, 12, Hv, base=2, device=device)
    half_lives = half_lives[torch.randperm(Hv, generator=generator, device=device)]
    dt_bias = 0.5 * normal(Hv)

    def typed(name, x):
        return x.to(getattr(torch, workload.dtypes.get(name, "float32")))

    return Inputs(
        q=typed("q", functional.normalize(normal(T, Hk, D), dim=-1)),
        k=typed("k", functional.normalize(normal(T, Hk, D), dim=-1)),
        v=typed("v", normal(T, Hv, D)),
        state=0.5 * normal(N, Hv, D, D),
        A_log=torch.log(0.6931 / half_lives / functional.softplus(dt_bias)),
        a=typed("a", normal(T, Hv)),
        dt_bias=dt_bias,
        b=typed("b", normal(T, Hv)),
        cu_seqlens=boundaries(workload.values["lengths"], device),
        scale=torch.tensor(D).rsqrt().item(),
    )


def boundaries(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0)


def edge_cases(workload):
    """Named generators of unusual values, and of other partitions of T tokens into N sequences."""
    T, N = workload.axes["T"], workload.axes["N"]

    def changed(change):
        return lambda generator, device: change(make_inputs(workload, generator, device))

    cases = {
        "nothing is forgotten": changed(lambda x: x._replace(a=torch.full_like(x.a, -20.0))),
        "all is forgotten": changed(forget_all),
        "the model's own initial gates": default_gates(workload),
        "resets inside sequences": resets(workload),
        "no updates": changed(lambda x: x._replace(b=torch.full_like(x.b, -20.0))),
        "full updates": changed(lambda x: x._replace(b=torch.full_like(x.b, 20.0))),
        "one key for all tokens": changed(repeat_key),
        "a large state": changed(lambda x: x._replace(state=x.state * 17.7)),  # rows of norm 100
        "no state": changed(lambda x: x._replace(state=torch.zeros_like(x.state))),
        "another scale and larger queries": changed(lambda x: x._replace(q=x.q * 11.0, scale=0.37)),
    }
    if N > 1:
        cases["one long sequence and single tokens"] = changed(lambda x: repartition(x, [1] * (N - 1), T))
        cases["sequences of equal length"] = changed(lambda x: repartition(x, [T // N] * (N - 1), T))
        cases["random lengths"] = random_lengths(workload)
    return cases


def forget_all(x):
    return x._replace(A_log=torch.full_like(x.A_log, 2.7725887), a=torch.full_like(x.a, 20.0))  # ln 16


def repeat_key(x):
    """Every token overwrites the same direction almost entirely: the triangular system of a chunk is the hardest."""
    key = x.k[:1].expand_as(x.k).contiguous()
    return x._replace(k=key, q=(x.q + key) / 2, b=torch.full_like(x.b, 6.0))


def repartition(x, first, total):
    """These lengths, and the rest in one last sequence."""
    return x._replace(cu_seqlens=boundaries([*first, total - sum(first)], x.q.device))


def default_gates(workload):
    def inputs(generator, device):
        x = make_inputs(workload, generator, device)
        rates = torch.empty_like(x.A_log).uniform_(0.01, 16.0, generator=generator)
        return x._replace(A_log=rates.log(), dt_bias=torch.ones_like(x.dt_bias))

    return inputs


def resets(workload):
    """Slow gates, but one token in 20 forgets everything before it."""

    def inputs(generator, device):
        x = make_inputs(workload, generator, device)
        reset = torch.rand(x.a.shape, generator=generator, device=device) < 0.05
        slow = torch.full_like(x.A_log, -1.0)
        return x._replace(A_log=slow, dt_bias=torch.zeros_like(slow), a=torch.where(reset, 60.0, x.a - 5.0))

    return inputs


def random_lengths(workload):
    def inputs(generator, device):
        T, N = workload.axes["T"], workload.axes["N"]
        cuts = torch.randperm(T - 1, generator=generator, device=device)[: N - 1].sort().values + 1
        cu_seqlens = torch.cat((cuts.new_zeros(1), cuts, cuts.new_full((1,), T)))
        return make_inputs(workload, generator, device)._replace(cu_seqlens=cu_seqlens)

    return inputs
