"""All queries against all keys in five products; what lies between them is compiled by torch."""

import torch
from torch import Tensor


def run(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, scale: float, causal: int
) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys = q.shape[1], k.shape[1]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    factor = torch.tensor(scale)  # a float would be compiled in
    return backward(grad_output, q, k, v, output, lse, factor, seen.tril(keys - queries) if causal else seen)


@torch.compile(dynamic=False)
def backward(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, scale: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    (batch, queries, heads, d), keys, groups, dtype = q.shape, k.shape[1], k.shape[2], q.dtype

    def rows(x: Tensor) -> Tensor:
        """[B, Sq, Hq, D] as [B Hk, (Hq / Hk) Sq, D]."""
        return x.float().transpose(1, 2).reshape(batch * groups, -1, d)

    grad, saved, q = rows(grad_output), rows(output), rows(q)
    k, v = (x.float().transpose(1, 2).reshape(batch * groups, keys, d) for x in (k, v))
    share = heads // groups
    scores = scale * (q @ k.mT) - lse.view(batch * groups, -1, 1)
    weights = torch.where(seen, scores.view(-1, share, queries, keys).exp(), 0.0).view_as(scores)
    change = scale * weights * (grad @ v.mT - (grad * saved).sum(-1, keepdim=True))
    grad_q = (change @ k).view(batch, heads, queries, d).transpose(1, 2)
    grad_k, grad_v = (
        (x.mT @ y).view(batch, groups, keys, d).transpose(1, 2) for x, y in ((change, q), (weights, grad))
    )
    return grad_q.to(dtype).contiguous(), grad_k.to(dtype).contiguous(), grad_v.to(dtype).contiguous()
