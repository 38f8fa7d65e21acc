"""All tokens at once: one gather, two batched products, and what lies between them compiled by torch.

Padding reads a valid position of the same token, masked: whatever else it read might be NaN.
"""

import math

import torch
from torch import Tensor


def run(
    q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, sparse_indices: Tensor, sm_scale: float
) -> tuple[Tensor, Tensor]:
    factor = torch.tensor(sm_scale)  # a float would be compiled in
    return attend(q_nope, q_pe, ckv_cache.flatten(0, 1), kpe_cache.flatten(0, 1), sparse_indices, factor)


@torch.compile(dynamic=False)
def attend(
    q_nope: Tensor, q_pe: Tensor, content: Tensor, position: Tensor, indices: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    valid = (indices >= 0).unsqueeze(1)
    some = valid.any(-1, keepdim=True)
    places = torch.where(indices >= 0, indices, indices.amax(1, keepdim=True)).clamp(min=0)
    values = torch.where(some, content[places].float(), 0.0)
    scores = q_nope.float() @ values.mT + q_pe.float() @ torch.where(some, position[places].float(), 0.0).mT
    scores = torch.where(valid, scale * scores, -torch.inf)
    largest = torch.where(some, scores.amax(-1, keepdim=True), 0.0)
    weights = torch.where(valid, (scores - largest).exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    output = torch.where(some, (weights @ values) / total, 0.0).to(q_nope.dtype)
    lse = torch.where(some, (largest + total.log()) / math.log(2), -torch.inf)
    return output, lse.squeeze(-1)
