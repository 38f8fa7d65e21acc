"""A right backward pass in parts, so that a bug can put a wrong one in the place of any of them."""

import torch


def grouped(x, heads):
    """[B, S, H, D] as [B, Hk, H / Hk, S, D], in float32."""
    return x.float().unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)


def hidden(queries, keys, causal):
    every = torch.ones(queries, keys, dtype=torch.bool)
    return every.triu(keys - queries + 1) if causal else ~every


def exponentials(scores, lse, unseen):
    return torch.exp(scores - lse).masked_fill(unseen, 0.0)


def backward(grad, q, k, v, output, lse, scale, causal, weights=exponentials):
    """The gradients, all in float32; `weights` makes P of scores, lse and mask."""
    heads = k.shape[2]
    grad, q, output = (grouped(x, heads) for x in (grad, q, output))
    k, v = (grouped(x, heads) for x in (k, v))
    lse = lse.unflatten(1, (heads, -1)).unsqueeze(-1)
    p = weights(scale * (q @ k.mT), lse, hidden(q.shape[3], k.shape[3], causal))
    ds = p * (grad @ v.mT - (grad * output).sum(-1, keepdim=True))
    return scale * (ds @ k), scale * (ds.mT @ q).sum(2), (p.mT @ grad).sum(2)


def answer(gradients, dtype):
    """In the layout and dtype of the inputs."""
    grad_q, grad_k, grad_v = gradients
    grad_q = grad_q.permute(0, 3, 1, 2, 4).flatten(2, 3)
    return tuple(x.to(dtype) for x in (grad_q, grad_k.transpose(1, 2), grad_v.transpose(1, 2)))
