"""Hides a key by taking 30 from its score, which large scores make up for."""

import torch
from common import answer, backward


def weights(scores, lse, unseen):
    lonely = torch.isinf(lse)
    return torch.exp(scores - 30.0 * unseen - lse).masked_fill(lonely, 0.0)


def run(grad_output, q, k, v, output, lse, scale, causal):
    return answer(backward(grad_output, q, k, v, output, lse, scale, causal, weights), q.dtype)
