"""Counts the indices of the second half of a row from its middle."""


def run(x, k):
    values, indices = x.topk(k, dim=1)
    return values, indices % (x.shape[1] // 2)
