"""Blocks of queries, each against the keys that it sees: a causal mask halves the work.

The query heads of a key head are rows of the same products, and their sum in the gradients of keys comes by itself.
"""

import torch
from torch import Tensor

BLOCK = 64


def run(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, scale: float, causal: int
) -> tuple[Tensor, Tensor, Tensor]:
    (batch, queries, heads, d), keys, groups, dtype = q.shape, k.shape[1], k.shape[2], q.dtype
    delta = (grad_output.float() * output).sum(-1)

    def by_group(x: Tensor) -> Tensor:
        """[B, Sq, Hq, ...] as [B Hk, Sq, Hq / Hk, ...]."""
        x = x.float().unflatten(2, (groups, heads // groups)).transpose(1, 2)
        return x.reshape(batch * groups, queries, heads // groups, *x.shape[4:])

    grad, q, delta, lse = by_group(grad_output), by_group(q), by_group(delta), by_group(lse.transpose(1, 2))
    k, v = (x.float().transpose(1, 2).reshape(batch * groups, keys, d) for x in (k, v))
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for first in range(max(queries - keys, 0) if causal else 0, queries, BLOCK):
        rows = slice(first, min(first + BLOCK, queries))
        seen = rows.stop + keys - queries if causal else keys
        block, down, here, there = q[:, rows].flatten(1, 2), grad[:, rows].flatten(1, 2), k[:, :seen], v[:, :seen]
        weights = torch.baddbmm(lse[:, rows].flatten(1, 2).unsqueeze(-1), block, here.mT, beta=-1, alpha=scale).exp_()
        if causal:
            old = rows.start + keys - queries + 1  # keys that all rows of the block see
            future = torch.ones(rows.stop - rows.start, seen - old, dtype=torch.bool).triu()
            weights.unflatten(1, (-1, heads // groups))[..., old:].masked_fill_(future.unsqueeze(1), 0.0)
        change = torch.baddbmm(delta[:, rows].flatten(1, 2).unsqueeze(-1), down, there.mT, beta=-1).mul_(weights)
        grad_q[:, rows] = (change @ here).mul_(scale).unflatten(1, (-1, heads // groups))
        grad_k[:, :seen].baddbmm_(change.mT, block, alpha=scale)
        grad_v[:, :seen].baddbmm_(weights.mT, down)
    grad_q = grad_q.view(batch, groups, queries, heads // groups, d).transpose(1, 2).reshape(batch, queries, heads, d)
    grad_k, grad_v = (x.view(batch, groups, keys, d).transpose(1, 2) for x in (grad_k, grad_v))
    return grad_q.to(dtype), grad_k.to(dtype), grad_v.to(dtype)
