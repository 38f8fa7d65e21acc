import torch


def run(numbers, buckets):
    counts = torch.zeros(numbers.shape[0], buckets, dtype=torch.int64)
    return counts.scatter_add_(1, numbers, torch.ones_like(numbers))
