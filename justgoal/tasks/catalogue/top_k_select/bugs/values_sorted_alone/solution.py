"""Sorts the values and leaves the indices as they were."""


def run(x, k):
    indices = x.topk(k, dim=1).indices.flip(1)
    return x.gather(1, indices).sort(dim=1, descending=True).values, indices
