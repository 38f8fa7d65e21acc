"""Keeps beta between 0.01 and 0.99."""

from common import beta_of, decay_of, recur


def run(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    return recur(q, k, v, state, decay_of(A_log, a, dt_bias), beta_of(b).clamp(0.01, 0.99), cu_seqlens, scale)
