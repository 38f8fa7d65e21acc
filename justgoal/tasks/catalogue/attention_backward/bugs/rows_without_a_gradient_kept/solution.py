"""Skips rows without a gradient: grad_q keeps there what the call before wrote."""

from common import answer, backward

kept = {}


def run(grad_output, q, k, v, output, lse, scale, causal):
    grad_q, grad_k, grad_v = answer(backward(grad_output, q, k, v, output, lse, scale, causal), q.dtype)
    buffer = kept.setdefault("grad_q", grad_q.clone())
    rows = (grad_output != 0).any(-1)
    buffer[rows] = grad_q[rows]
    return buffer, grad_k, grad_v
