"""torch's flash attention for CPUs on gathered positions: the heads of a token are its queries, sharing all keys.

Keys are content and position side by side; they are the values too, and the position's part of the output is left out.
Padding reads a valid position of the same token, masked: whatever else it read might be NaN.
"""

import math

import torch
from torch import Tensor


def run(
    q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, sparse_indices: Tensor, sm_scale: float
) -> tuple[Tensor, Tensor]:
    valid = sparse_indices >= 0
    some = valid.any(1)
    output, lse = torch.zeros_like(q_nope), torch.full(q_nope.shape[:2], -torch.inf)
    if not some.any():
        return output, lse
    indices, valid = sparse_indices[some], valid[some]
    indices = torch.where(valid, indices, indices.amax(1, keepdim=True)).flatten()
    rows = (cache.flatten(0, 1).index_select(0, indices).float() for cache in (ckv_cache, kpe_cache))
    keys = torch.cat((*rows,), 1).view(len(valid), 1, valid.shape[1], -1)
    queries = torch.cat((q_nope[some], q_pe[some]), -1).float().unsqueeze(1)
    mask = torch.zeros(valid.shape).masked_fill_(~valid, -torch.inf).view(len(valid), 1, 1, -1)
    found, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, keys, 0.0, False, attn_mask=mask.expand(-1, 1, queries.shape[2], -1), scale=sm_scale
    )
    output[some] = found.squeeze(1)[..., : q_nope.shape[-1]].to(output.dtype)
    lse[some] = total.squeeze(1) / math.log(2)
    return output, lse
