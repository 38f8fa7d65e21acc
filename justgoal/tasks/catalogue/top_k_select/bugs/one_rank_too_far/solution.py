"""Returns rank k + 1 instead of rank k."""

import torch


def run(x, k):
    values, indices = x.topk(k + 1, dim=1)
    keep = torch.cat((torch.arange(k - 1), torch.tensor([k])))
    return values[:, keep], indices[:, keep]
