"""Compares the numbers as integers, which reverses the order of negative ones."""

import torch


def run(x, k):
    indices = x.view(torch.int32).topk(k, dim=1).indices
    return x.gather(1, indices), indices
