"""The chunked (WY) form of the gated delta rule, one sequence and one chunk after the other, all heads at once.

Nothing is gathered and nothing is padded; a chunk of fewer tokens is a smaller product.
"""

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 32


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    output, new_state = out or (torch.empty_like(v), torch.empty_like(state))
    share = v.shape[1] // k.shape[1]
    keys_queries = torch.stack((k.float(), scale * q.float())).transpose(1, 2)  # [2, hk, T, d]
    values = v.float().transpose(0, 1)
    # The decay's logarithm is summed in float64: differences of sums follow, and after a reset the sums are large.
    decay = (-A_log.double().exp() * functional.softplus(a.double() + dt_bias)).mT
    beta = b.float().sigmoid().mT.unsqueeze(-1)
    new_state.copy_(state)
    bounds = cu_seqlens.tolist()
    for now, start, end in zip(new_state, bounds, bounds[1:], strict=False):
        for first in range(start, end, CHUNK):
            part = slice(first, min(first + CHUNK, end))
            sums = decay[:, part].cumsum(1)
            output[part] = step(
                now, keys_queries[:, :, part].repeat_interleave(share, 1), values[:, part], sums, beta[:, part]
            ).transpose(0, 1)
    return output, new_state


def step(now: Tensor, keys_queries: Tensor, values: Tensor, sums: Tensor, beta: Tensor) -> Tensor:
    """The answers of one chunk. Changes `now`, the states [hv, value, key], in place."""
    chunk = values.shape[1]
    past = torch.ones(chunk, chunk, dtype=torch.bool).tril()
    between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).float().exp().masked_fill(~past, 0.0)
    products = (keys_queries @ keys_queries[0].mT) * between
    since_start = sums.float().exp().unsqueeze(-1)
    seen = (keys_queries @ now.mT) * since_start
    wanted = beta * (values - seen[0])
    updates = torch.linalg.solve_triangular(beta * products[0], wanted, upper=False, unitriangular=True)
    kept = updates * (sums[:, -1:] - sums).float().exp().unsqueeze(-1)
    now.mul_(since_start[:, -1:]).baddbmm_(kept.mT, keys_queries[0])
    return torch.baddbmm(seen[1], products[1], updates)
