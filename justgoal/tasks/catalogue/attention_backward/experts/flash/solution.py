"""torch's flash attention for CPUs, backward pass alone.

Its causal mask is aligned at the beginning of both sequences, ours at the end. They agree for as many queries as keys:
queries that see no key are left out, and keys that all queries see are a call of their own, without a mask. Gradients
add up over keys, since every weight follows from the saved lse. All is done in float32: without instructions for
bfloat16 its products are ten times as slow.
"""

import torch
from torch import Tensor


def run(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, scale: float, causal: int
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, queries, keys = q.dtype, q.shape[1], k.shape[1]
    lone = max(queries - keys, 0) if causal else 0
    seen = (max(keys - queries, 0) if causal else keys, keys)
    grad, q, k, v, output = (x.float().transpose(1, 2) for x in (grad_output, q, k, v, output))
    grad, q, output, lse = (x[:, :, lone:].contiguous() for x in (grad, q, output, lse))

    def backward(part: slice, masked: bool) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k[:, :, part].contiguous(), v[:, :, part].contiguous(), output, lse, 0.0, masked, scale=scale
        )

    parts = [backward(slice(0, seen[0]), False)] if seen[0] else []
    if causal:
        parts.append(backward(slice(*seen), True))
    grad_q = parts[0][0] if len(parts) == 1 else parts[0][0] + parts[1][0]
    if lone:
        grad_q = torch.nn.functional.pad(grad_q, (0, 0, lone, 0))
    grad_k, grad_v = (torch.cat([part[i] for part in parts], 2) if len(parts) > 1 else parts[0][i] for i in (1, 2))
    return grad_q.transpose(1, 2).to(dtype), grad_k.transpose(1, 2).to(dtype), grad_v.transpose(1, 2).to(dtype)
