"""One token after the other: its valid positions are gathered, then two products in float32. Padding costs nothing."""

import math

import torch
from torch import Tensor


def run(
    q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, sparse_indices: Tensor, sm_scale: float
) -> tuple[Tensor, Tensor]:
    content, position = ckv_cache.flatten(0, 1), kpe_cache.flatten(0, 1)
    output, lse = torch.zeros_like(q_nope), torch.full(q_nope.shape[:2], -torch.inf)
    for token, row in enumerate(sparse_indices):
        valid = row[row >= 0]
        if len(valid) == 0:
            continue
        values = content.index_select(0, valid).float()
        scores = q_nope[token].float() @ values.mT
        scores.addmm_(q_pe[token].float(), position.index_select(0, valid).float().mT).mul_(sm_scale)
        lse[token] = scores.logsumexp(-1) / math.log(2)
        output[token] = scores.softmax(-1) @ values
    return output, lse
