"""Takes a block of rows whose gradients are all below 1e-20 for one without a gradient."""

from common import answer, backward


def run(grad_output, q, k, v, output, lse, scale, causal):
    grad = grad_output.float().clone()
    for block in grad.split(64, dim=1):
        block.mul_(block.abs().amax() >= 1e-20)
    return answer(backward(grad, q, k, v, output, lse, scale, causal), q.dtype)
