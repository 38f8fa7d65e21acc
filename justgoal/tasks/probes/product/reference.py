"""A matrix product, in float64."""

import torch


def reference(a, b):
    return a.double() @ b.double()


def make_inputs(workload, generator, device):
    axes = workload.axes
    return (
        torch.randn(axes["M"], axes["K"], generator=generator, device=device),
        torch.randn(axes["K"], axes["N"], generator=generator, device=device),
    )


def edge_cases(workload):
    return {"positive": lambda generator, device: tuple(x.abs() for x in make_inputs(workload, generator, device))}
