"""counts[row, i] is how often i stands in that row of `numbers`, all of which are at least 0 and below `buckets`.

`buckets` is the size of the axis K. Outputs that are integers must be equal to these: errors need no tolerance.
"""

import torch


def reference(numbers, buckets):
    return torch.stack([torch.bincount(row, minlength=buckets) for row in numbers])


def make_inputs(workload, generator, device):
    """Small numbers are more frequent than large ones, to another degree in every row."""
    rows, entries, buckets = (workload.axes[axis] for axis in ("B", "N", "K"))
    uniform = torch.rand(rows, entries, generator=generator, device=device)
    power = 1 + 2 * torch.rand(rows, 1, generator=generator, device=device)
    return (buckets * uniform**power).long().clamp(max=buckets - 1), buckets


def edge_cases(workload):
    rows, entries, buckets = (workload.axes[axis] for axis in ("B", "N", "K"))

    def changed(change):
        def inputs(generator, device):
            numbers, _ = make_inputs(workload, generator, device)
            return change(numbers, generator), buckets

        return inputs

    def one_bucket(numbers, generator):
        return torch.randint(buckets, (rows, 1), generator=generator).expand(rows, entries).contiguous()

    def all_alike(numbers, generator):
        return torch.arange(entries).remainder(buckets).expand(rows, entries).contiguous()

    return {
        "one bucket for all of a row": changed(one_bucket),
        "every bucket alike": changed(all_alike),
        "sorted": changed(lambda numbers, generator: numbers.sort(1).values),
        "the last two buckets": changed(lambda numbers, generator: buckets - 1 - numbers % 2),
    }
