"""The gradients of attention, one formula after the other in float64, and the data that they are judged on.

For every sequence and query head h, whose key head is h // (Hq // Hk), with matrices of queries or keys by features:

    P = exp(scale Q K^T - lse)                  0 where a key is hidden
    delta_i = sum_d grad_output_id output_id
    dS = P (grad_output V^T - delta)
    grad_q = scale dS K
    grad_k = scale dS^T Q                       summed over the query heads of a key head
    grad_v = P^T grad_output                    likewise

If causal is 1, query i sees key j where j <= i + Sk - Sq; if it is 0, all keys. A query that sees none has output 0 and
lse -inf, and takes no part. `output` and `lse` (natural logarithm) are what the forward pass saved, and count as they
are: they are rounded, and may belong to attention over more keys than these, of which other devices hold the rest.
"""

import torch
from torch.nn import functional


def reference(grad_output, q, k, v, output, lse, scale, causal):
    queries, keys, heads = q.shape[1], k.shape[1], k.shape[2]
    grad, q, output = (x.double().unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4) for x in (grad_output, q, output))
    k, v = (x.double().transpose(1, 2).unsqueeze(2) for x in (k, v))  # [B, Hk, 1, Sk, D]
    lse = lse.double().unflatten(1, (heads, -1)).unsqueeze(-1)
    P = torch.exp(scale * (q @ k.mT) - lse)
    if causal:
        P = P.masked_fill(hidden(queries, keys, q.device), 0.0)
    dS = P * (grad @ v.mT - (grad * output).sum(-1, keepdim=True))
    grad_q = scale * (dS @ k)
    grad_k = scale * (dS.mT @ q).sum(2)
    grad_v = (P.mT @ grad).sum(2)
    return grad_q.permute(0, 3, 1, 2, 4).flatten(2, 3), grad_k.transpose(1, 2), grad_v.transpose(1, 2)


def hidden(queries, keys, device):
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(keys - queries + 1)


def make_inputs(workload, generator, device):
    return saved(workload, *usual(workload, generator, device))


def usual(workload, generator, device):
    B, Sq, Sk, Hq, Hk, D = (workload.axes[axis] for axis in ("B", "Sq", "Sk", "Hq", "Hk", "D"))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    return normal(B, Sq, Hq, D), normal(B, Sq, Hq, D), normal(B, Sk, Hk, D), normal(B, Sk, Hk, D)


def saved(workload, grad_output, q, k, v, scale=None, causal=1):
    """All arguments: these in the workload's dtypes, with what a forward pass would have saved of them."""
    grad_output, q, k, v = (
        typed(workload, name, x) for name, x in (("grad_output", grad_output), ("q", q), ("k", k), ("v", v))
    )
    # The factors of `scale` are float32 as an argument is.
    scale = torch.tensor(q.shape[-1] ** -0.5 if scale is None else scale).item()
    output, lse = attention(q, k, v, scale, causal)
    return grad_output, q, k, v, typed(workload, "output", output), lse, scale, causal


def typed(workload, name, x):
    return x.to(getattr(torch, workload.dtypes.get(name, "float32"))).contiguous()


def attention(q, k, v, scale, causal):
    queries, keys, heads = q.shape[1], k.shape[1], k.shape[2]
    q = q.float().unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)
    k, v = (x.float().transpose(1, 2).unsqueeze(2) for x in (k, v))
    scores = scale * (q @ k.mT)
    if causal:
        scores = scores.masked_fill(hidden(queries, keys, q.device), -torch.inf)
    lse = scores.logsumexp(-1)
    output = torch.where(lse.isfinite().unsqueeze(-1), torch.exp(scores - lse.unsqueeze(-1)), 0.0) @ v
    return output.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.flatten(1, 2)


def edge_cases(workload):
    """Named generators: masks, scales, peaked rows, gradients with gaps and of all sizes."""
    B, Sq, Sk, Hq, Hk = (workload.axes[axis] for axis in ("B", "Sq", "Sk", "Hq", "Hk"))

    def of(change, **options):
        def inputs(generator, device):
            return saved(workload, *change(generator, *usual(workload, generator, device)), **options)

        return inputs

    def unchanged(generator, *tensors):
        return tensors

    def one_large_key(generator, grad, q, k, v):
        place = torch.randint(Sk // 4, (), generator=generator)
        k = k.clone()
        k[:, place] *= 30.0
        return grad, q, k, v

    def own_key(generator, grad, q, k, v):
        """Every query finds the last key that it sees, with about half of its weight."""
        own = (torch.arange(Sk, device=q.device) + Sq - Sk).clamp(min=0)
        direction = functional.normalize(q[:, own].unflatten(2, (Hk, -1)).sum(3), dim=-1)
        share = (Hq // Hk) ** 0.5
        return grad, q, 0.1 * k + share * 6.0 * direction, v

    def growing_keys(generator, grad, q, k, v):
        """What is hidden would weigh the most."""
        size = torch.linspace(0.1, 12.0, Sk, device=q.device)
        return grad, q, size[:, None, None] * k, v

    def gaps(generator, grad, q, k, v):
        kept = torch.rand(B, Sq, Hq, 1, generator=generator, device=q.device) < 0.5
        return kept * grad, q, k, v

    def last_row(generator, grad, q, k, v):
        alone = torch.zeros_like(grad)
        alone[:, -1] = grad[:, -1]
        return alone, q, k, v

    def sizes(generator, grad, q, k, v):
        power = torch.linspace(-20, 20, Hq, device=q.device)[torch.randperm(Hq, generator=generator)]
        return torch.exp2(power)[:, None] * grad, q, k, v

    def keys_elsewhere(generator, device):
        """Of twice as many keys the first half is here, and the second is hidden from nobody."""
        *tensors, output, lse, scale, causal = make_inputs(workload, generator, device)
        q = tensors[1]
        k, v = usual(workload, generator, device)[2:]
        other, other_lse = attention(q, k, v, scale, 0)
        both = torch.logaddexp(lse, other_lse)
        share, other_share = ((x - both).exp().transpose(1, 2).unsqueeze(-1) for x in (lse, other_lse))
        output = typed(workload, "output", share * output.float() + other_share * other)
        return *tensors, output, both, scale, causal

    return {
        "no mask": of(unchanged, causal=0),
        "another scale": of(unchanged, scale=0.23),
        "large logits": of(lambda _, grad, q, k, v: (grad, 4 * q, 4 * k, v)),
        "one large key": of(one_large_key),
        "the last key that is seen weighs most": of(own_key),
        "what is hidden would weigh most": of(growing_keys),
        "values with a large mean": of(lambda _, grad, q, k, v: (grad, q, k, v + 8)),
        "rows without a gradient": of(gaps),
        "a gradient in the last row alone": of(last_row),
        "gradients of very different size": of(sizes),
        "tiny gradients": of(lambda _, grad, q, k, v: (1e-30 * grad, q, k, v)),
        "more keys elsewhere": keys_elsewhere,
    }
