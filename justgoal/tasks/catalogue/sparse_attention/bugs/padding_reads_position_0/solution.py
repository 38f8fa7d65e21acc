"""Gives padding the weight 0 but reads position 0 for it, whatever stands there."""

import math

import torch


def run(q_nope, q_pe, ckv_cache, kpe_cache, sparse_indices, sm_scale):
    content, position = ckv_cache.flatten(0, 1).float(), kpe_cache.flatten(0, 1).float()
    output, lse = torch.zeros_like(q_nope), torch.full(q_nope.shape[:2], -math.inf)
    for token, row in enumerate(sparse_indices):
        if (row < 0).all():
            continue
        values = content[row.clamp(min=0)]
        scores = sm_scale * (q_nope[token].float() @ values.T + q_pe[token].float() @ position[row.clamp(min=0)].T)
        scores = torch.where(row < 0, -math.inf, scores)
        output[token] = scores.softmax(-1) @ values
        lse[token] = scores.logsumexp(-1) / math.log(2)
    return output, lse
