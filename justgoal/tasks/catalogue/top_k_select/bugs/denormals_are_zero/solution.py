"""Treats denormal numbers as zero."""

import torch


def run(x, k):
    indices = torch.where(x.abs() < 2.0**-126, 0.0, x).topk(k, dim=1).indices
    return x.gather(1, indices), indices
