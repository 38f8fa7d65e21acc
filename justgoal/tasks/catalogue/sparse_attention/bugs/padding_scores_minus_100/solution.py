"""Gives padding the score -100 instead of none, with the values of the last position."""

import math

import torch


def run(q_nope, q_pe, ckv_cache, kpe_cache, sparse_indices, sm_scale):
    content, position = ckv_cache.flatten(0, 1).float(), kpe_cache.flatten(0, 1).float()
    output, lse = torch.zeros_like(q_nope), torch.empty(q_nope.shape[:2])
    for token, row in enumerate(sparse_indices):
        safe = torch.where(row < 0, row.amax().clamp(min=0), row)
        values = content[safe].nan_to_num(0.0)
        keys = torch.cat((values, position[safe].nan_to_num(0.0)), -1)
        scores = sm_scale * (torch.cat((q_nope[token], q_pe[token]), -1).float() @ keys.T)
        scores = torch.where(row < 0, -100.0, scores)
        output[token] = scores.softmax(-1) @ values
        lse[token] = scores.logsumexp(-1) / math.log(2)
    return output, lse
