"""Public inputs of the task, made as the judge makes its own, under another seed."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from reference import make_inputs

WORKLOAD = SimpleNamespace(**json.loads((Path(__file__).parent / "workload.json").read_text()))


def inputs(seed=0):
    """A tuple of arguments for `run` and `reference`, in order."""
    return make_inputs(WORKLOAD, torch.Generator().manual_seed(seed), "cpu")


if __name__ == "__main__":
    for value in inputs():
        print(f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value))
