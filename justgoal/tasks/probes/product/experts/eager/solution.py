import torch


def run(a, b):
    return torch.mm(a, b)
