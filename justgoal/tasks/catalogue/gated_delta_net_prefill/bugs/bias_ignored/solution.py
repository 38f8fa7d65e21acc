"""Leaves dt_bias out of the gates."""

from common import beta_of, decay_of, recur


def run(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    return recur(q, k, v, state, decay_of(A_log, a, 0.0), beta_of(b), cu_seqlens, scale)
