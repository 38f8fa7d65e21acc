"""Takes decays within a block of 16 tokens as quotients of products, which vanish when much is forgotten."""

import torch
from common import beta_of, decay_of, recur


def run(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    decay = decay_of(A_log, a, dt_bias)
    for first, last in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        for block in decay[first:last].split(16):
            products = torch.cumprod(block, 0)
            block[1:] = products[1:] / products[:-1]
    return recur(q, k, v, state, decay, beta_of(b), cu_seqlens, scale)
