"""Counts in int16."""

import torch


def run(numbers, buckets):
    counts = torch.zeros(numbers.shape[0], buckets, dtype=torch.int16)
    return counts.scatter_add_(1, numbers, torch.ones_like(numbers, dtype=torch.int16)).long()
