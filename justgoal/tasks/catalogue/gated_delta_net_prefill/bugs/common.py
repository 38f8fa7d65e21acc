"""A right implementation in parts, token by token, so that a bug can put a wrong one in the place of any of them."""

import torch
from torch.nn import functional


def decay_of(A_log, a, dt_bias):
    return torch.exp(-torch.exp(A_log) * functional.softplus(a.float() + dt_bias))


def beta_of(b):
    return torch.sigmoid(b.float())


def step(s, q, k, v, decay, beta):
    """One token: its answer, with the states [Hv, key, value] changed in place. All but s are [Hv, 1, ...]."""
    s *= decay
    s += k.mT @ (beta * (v - k @ s))
    return q @ s


def recur(q, k, v, state, decay, beta, cu_seqlens, scale, step=step):
    """The gated delta rule for given decays and betas [T, Hv]."""
    share = v.shape[1] // k.shape[1]
    queries, keys = (x.float().repeat_interleave(share, 1).unsqueeze(2) for x in (q, k))
    values, decay, beta = v.float().unsqueeze(2), decay[..., None, None], beta[..., None, None]
    output, new_state = torch.empty_like(v), torch.empty_like(state)
    for i, (first, last) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        s = state[i].mT.clone()
        for t in range(first, last):
            answer = step(s, queries[t], keys[t], values[t], decay[t], beta[t])
            output[t] = (scale * answer).squeeze(1).to(output.dtype)
        new_state[i] = s.mT
    return output, new_state
