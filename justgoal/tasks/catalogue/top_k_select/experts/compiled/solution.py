import torch
from torch import Tensor


def run(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return select(x, k)

@torch.compile(dynamic=False)
def select(x,k):
    rows, entries = x.shape
    size = max(entries // (4 * k), 1)
    groups = entries // size
    maxima = x[:, : groups * size].view(rows, size, groups).amax(1)
    group = maxima.topk(k, dim=1, sorted=False).indices
    columns = (group.unsqueeze(1) + groups * torch.arange(size).view(-1, 1)).flatten(1)
    if groups*size<entries:
        rest = torch.arange(groups * size, entries).expand(rows, -1)
        columns = torch.cat((columns, rest), 1)
    values, chosen = x.gather(1, columns).topk(k, dim=1, sorted=False)
    return values, columns.gather(1, chosen)
