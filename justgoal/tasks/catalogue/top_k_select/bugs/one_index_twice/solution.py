"""Returns the largest entry twice and leaves out the smallest."""


def run(x, k):
    indices = x.topk(k, dim=1).indices
    indices[:, -1] = indices[:, 0]
    return x.gather(1, indices), indices
