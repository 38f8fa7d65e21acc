"""The selection of the `filtered` expert, compiled by torch: see there."""

import torch
from torch import Tensor


@torch.compile(dynamic=False)
def run(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    rows, entries = x.shape
    size = entries // (4 * k)
    if size < 2:
        values, columns = x.topk(k, dim=1, sorted=False)
        return values, columns
    count = entries // size  # group g is g, g + count, g + 2 count, ...: its maxima are taken of whole vectors
    groups = x[:, : size * count].view(rows, size, count)
    best = groups.amax(1).topk(k, dim=1, sorted=False).indices
    candidates = groups.gather(2, best.unsqueeze(1).expand(-1, size, -1)).view(rows, size * k)
    if size * count < entries:
        candidates = torch.cat((candidates, x[:, size * count :]), 1)
    values, chosen = run(candidates, k)
    layer = chosen // k
    column = best.gather(1, chosen % k)
    return values, torch.where(layer < size, column + layer * count, chosen + size * (count - k))
