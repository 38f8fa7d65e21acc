"""Of the entries equal to the k-th largest it finds only the first."""

import torch


def run(x, k):
    bound = x.topk(k, dim=1).values[:, -1:]
    rows = []
    for row, limit in zip(x, bound, strict=True):
        above = (row > limit).nonzero().squeeze(1)
        rows.append(torch.cat((above, (row == limit).nonzero()[0].expand(k - len(above)))))
    indices = torch.stack(rows)
    return x.gather(1, indices), indices
