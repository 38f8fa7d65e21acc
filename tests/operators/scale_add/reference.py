"""out = alpha x + y, and the sum of each of its rows, in float64."""

import math

import torch

SPREAD = 1.0


def reference(x, y, alpha):
    out = alpha * x.double() + y.double()
    return out, out.sum(1)


def make_inputs(workload, generator, device):
    shape = workload.axes["N"], workload.axes["M"]
    x, y = (SPREAD * torch.randn(shape, generator=generator, device=device) for _ in range(2))
    return x, y, float(0.5 + torch.rand((), generator=generator))


SECRET_FACTOR = 1.0e3


def edge_cases(workload):
    def large_alpha(generator, device):
        x, y, alpha = make_inputs(workload, generator, device)
        return x, y, SECRET_FACTOR * alpha

    def nothing(generator, device):
        x, y, alpha = make_inputs(workload, generator, device)
        return torch.zeros_like(x), torch.zeros_like(y), alpha

    def not_finite(generator, device):
        x, y, alpha = make_inputs(workload, generator, device)
        x[0, 0], y[1, 1] = math.inf, math.nan
        return x, y, alpha

    return {"a large alpha": large_alpha, "nothing but zeros": nothing, "values that are not finite": not_finite}
