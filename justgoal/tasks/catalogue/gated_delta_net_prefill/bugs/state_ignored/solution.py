"""Starts every sequence from nothing."""

import torch
from common import beta_of, decay_of, recur


def run(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    return recur(q, k, v, torch.zeros_like(state), decay_of(A_log, a, dt_bias), beta_of(b), cu_seqlens, scale)
