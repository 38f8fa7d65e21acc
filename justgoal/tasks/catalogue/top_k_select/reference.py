"""The k largest entries of every row by sorting all of them, and the data that the selection is judged on.

The order of what is returned is free, and so is the choice among equal entries. What is compared is therefore not what
is returned, but `comparable` of it.
"""

import torch


def reference(x, k):
    values, indices = x.double().sort(dim=1, descending=True, stable=True)
    return values[:, :k], indices[:, :k]


def make_inputs(workload, generator, device):
    """Normal entries; every row has a mean and a spread of its own, so that no threshold can be known before."""
    rows, entries, k = (workload.axes[axis] for axis in ("B", "N", "K"))
    spread = torch.exp2(8 * torch.rand(rows, 1, generator=generator, device=device) - 4)
    mean = torch.randn(rows, 1, generator=generator, device=device)
    return spread * (mean + torch.randn(rows, entries, generator=generator, device=device)), k


def comparable(inputs, outputs):
    """The returned values and the entries at the returned indices, both in descending order of those entries.

    A row with an index twice or out of range, or with entries other than the k largest, becomes NaN.
    """
    x, k = inputs
    values, indices = outputs
    inside = ((indices >= 0) & (indices < x.shape[1])).all(dim=1)
    unique = (indices.sort(dim=1).values.diff(dim=1) != 0).all(dim=1)
    entries, order = x.gather(1, indices.clamp(0, x.shape[1] - 1)).sort(dim=1, descending=True)
    largest = (entries == x.topk(k, dim=1).values).all(dim=1)
    wrong = ~(inside & unique & largest).unsqueeze(1)
    return values.gather(1, order).masked_fill(wrong, torch.nan), entries.masked_fill(wrong, torch.nan)


def edge_cases(workload):
    """Named generators: ties, order, and the kinds of numbers that selection by bits or by buckets gets wrong."""
    entries, k = workload.axes["N"], workload.axes["K"]

    def of(make):
        def inputs(generator, device):
            x, _ = make_inputs(workload, generator, device)
            return make(x, generator), k

        return inputs

    def positions(x, generator, count):
        return torch.rand(x.shape, generator=generator, device=x.device).argsort(dim=1)[:, :count]

    def marked(count):
        """1 at `count` random places of every row, 0 elsewhere."""
        return lambda x, generator: torch.zeros_like(x).scatter_(1, positions(x, generator, count), 1.0)

    def one_block(x, generator):
        start = int(torch.randint(entries - k, (), generator=generator))
        y = x.clone()
        y[:, start : start + k] += 1e3 * x.std()
        return y

    def exponents(x, generator):
        power = 252 * torch.rand(x.shape, generator=generator, device=x.device) - 126
        return torch.exp2(power) * x.sign()

    def masked(x, generator):
        kept = positions(x, generator, max(k, entries // 3))
        return torch.full_like(x, -torch.inf).scatter_(1, kept, x.gather(1, kept))

    return {
        "50 distinct values": of(lambda x, g: (8 * (x - x.mean(1, True)) / x.std(1, keepdim=True)).round()),
        "all entries equal": of(lambda x, g: x[:, :1].expand_as(x).contiguous()),
        "ascending": of(lambda x, g: x.sort(dim=1).values),
        "descending": of(lambda x, g: x.sort(dim=1, descending=True).values),
        "all of them in one block": of(one_block),
        "negative numbers only": of(lambda x, g: -x.abs() - 1e-3),
        "numbers of every magnitude": of(exponents),
        "denormal numbers": of(lambda x, g: x / x.std(1, keepdim=True) * 1e-41),
        "numbers that agree in their leading bits": of(lambda x, g: 1 + (x / x.std(1, keepdim=True)) * 2.0**-20),
        "zeros of both signs": of(lambda x, g: torch.zeros_like(x) * x.sign()),
        "one large entry": of(marked(1)),
        "exactly k large entries": of(marked(k)),
        "one large entry too many": of(marked(k + 1)),
        "masked by -inf": of(masked),
    }
