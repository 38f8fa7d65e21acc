"""Takes away what the key finds before the decay instead of after it."""

from common import beta_of, decay_of, recur


def step(s, q, k, v, decay, beta):
    found = k @ s
    s *= decay
    s += k.mT @ (beta * (v - found))
    return q @ s


def run(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    return recur(q, k, v, state, decay_of(A_log, a, dt_bias), beta_of(b), cu_seqlens, scale, step)
