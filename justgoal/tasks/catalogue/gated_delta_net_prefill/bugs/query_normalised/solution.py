"""Normalises queries, as the layer before it may already have done."""

from common import beta_of, decay_of, recur
from torch.nn import functional


def run(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    return recur(
        functional.normalize(q.float(), dim=-1), k, v, state, decay_of(A_log, a, dt_bias), beta_of(b), cu_seqlens, scale
    )
