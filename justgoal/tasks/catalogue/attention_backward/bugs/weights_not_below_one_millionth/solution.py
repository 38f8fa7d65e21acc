"""Keeps the argument of the exponential above -13, where a short polynomial for it ends."""

import torch
from common import answer, backward


def weights(scores, lse, unseen):
    return torch.exp((scores - lse).clamp_min(-13.0)).masked_fill(unseen, 0.0)


def run(grad_output, q, k, v, output, lse, scale, causal):
    return answer(backward(grad_output, q, k, v, output, lse, scale, causal, weights), q.dtype)
