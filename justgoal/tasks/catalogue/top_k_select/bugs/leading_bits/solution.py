"""Selects by the leading 16 bits of every number."""


def run(x, k):
    indices = x.bfloat16().topk(k, dim=1).indices
    return x.gather(1, indices), indices
