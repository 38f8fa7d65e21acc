"""Goes on with the state of the sequence before."""

import torch
from torch.nn import functional


def run(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    share = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(share, 1), k.repeat_interleave(share, 1)
    decay = torch.exp(-torch.exp(A_log) * functional.softplus(a + dt_bias))[..., None, None]
    beta = torch.sigmoid(b)[..., None, None]
    output, new_state = torch.empty_like(v), torch.empty_like(state)
    s = state[0].mT.clone()
    for i, (first, last) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        for t in range(first, last):
            key = k[t].unsqueeze(1)
            s *= decay[t]
            s += key.mT @ (beta[t] * (v[t].unsqueeze(1) - key @ s))
            output[t] = scale * (q[t].unsqueeze(1) @ s).squeeze(1)
        new_state[i] = s.mT
    return output, new_state
