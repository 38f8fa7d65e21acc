"""Softmax over rows, in float64."""

import torch


def reference(x):
    return torch.softmax(x.double(), -1)


def make_inputs(workload, generator, device):
    return (torch.randn(workload.axes["R"], workload.axes["C"], generator=generator, device=device),)


def edge_cases(workload):
    return {"peaked rows": lambda generator, device: (20 * make_inputs(workload, generator, device)[0],)}
