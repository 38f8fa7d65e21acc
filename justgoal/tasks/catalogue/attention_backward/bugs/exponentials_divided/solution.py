"""Divides exp(score) by exp(lse): both overflow where scores are large."""

import torch
from common import answer, backward


def weights(scores, lse, unseen):
    return (torch.exp(scores) / torch.exp(lse)).masked_fill(unseen, 0.0)


def run(grad_output, q, k, v, output, lse, scale, causal):
    return answer(backward(grad_output, q, k, v, output, lse, scale, causal, weights), q.dtype)
