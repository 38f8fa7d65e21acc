"""Hides later keys whether or not that is asked for."""

from common import answer, backward


def run(grad_output, q, k, v, output, lse, scale, causal):
    return answer(backward(grad_output, q, k, v, output, lse, scale, 1), q.dtype)
