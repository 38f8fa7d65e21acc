"""y = scale (x weight) in float64, and the data that it is judged on.

The definition, as naive as can be: it is what every solution is compared with, so it must be right and need not be fast
(0.25 s a call at most). The model sees this file without `edge_cases`.
"""

import torch


def reference(x, weight, scale):
    """In float64 where the arguments are float32. Returns one tensor or a tuple of them."""
    return scale * (x.double() * weight.double()).sum(1)


def make_inputs(workload, generator, device):
    """The usual data, in the order of the arguments. All randomness must come from `generator`."""
    rows, columns = workload.axes["N"], workload.axes["M"]
    x = torch.randn(rows, columns, generator=generator, device=device)
    weight = torch.randn(columns, generator=generator, device=device)
    return x, weight, 0.5


def edge_cases(workload):
    """Secret kinds of data by name: whatever a wrong solution might get away with on the usual one.

    `justgoal tasks check` says which kind is missing.
    """

    def another_scale(generator, device):
        x, weight, _ = make_inputs(workload, generator, device)
        return x, weight, -3.0

    def large_numbers(generator, device):
        x, weight, scale = make_inputs(workload, generator, device)
        return 1e20 * x, weight, scale

    def one_column(generator, device):
        x, weight, scale = make_inputs(workload, generator, device)
        only = torch.zeros_like(weight)
        only[-1] = 1.0
        return x, only, scale

    return {"another scale": another_scale, "large numbers": large_numbers, "only the last column": one_column}


# def comparable(inputs, outputs):
#     """What is compared, where several answers are right: applied to a solution's outputs and to the reference's."""
