"""Answers a query from the state before its own token."""

from common import beta_of, decay_of, recur


def step(s, q, k, v, decay, beta):
    s *= decay
    answer = q @ s
    s += k.mT @ (beta * (v - k @ s))
    return answer


def run(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    return recur(q, k, v, state, decay_of(A_log, a, dt_bias), beta_of(b), cu_seqlens, scale, step)
