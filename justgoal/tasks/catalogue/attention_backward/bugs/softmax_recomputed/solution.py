"""Makes the weights of a token sum to one over the keys that are here."""

from common import answer, backward, exponentials


def weights(scores, lse, unseen):
    p = exponentials(scores, scores.amax(-1, keepdim=True), unseen)
    return p / p.sum(-1, keepdim=True).clamp_min(1e-30)


def run(grad_output, q, k, v, output, lse, scale, causal):
    return answer(backward(grad_output, q, k, v, output, lse, scale, causal, weights), q.dtype)
