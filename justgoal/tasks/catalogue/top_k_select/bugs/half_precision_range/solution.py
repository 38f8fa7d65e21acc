"""Clamps the numbers to the range of float16 before it selects."""


def run(x, k):
    indices = x.clamp(-65504.0, 65504.0).topk(k, dim=1).indices
    return x.gather(1, indices), indices
