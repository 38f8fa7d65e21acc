"""The chunked (WY) form of the gated delta rule in torch operators: a few large products, no loop over tokens.

All sequences are cut into chunks, and chunk j of every sequence is worked on together. Within a chunk the updates u of
its tokens solve a triangular system whose right side depends on the state before the chunk. All that does not depend
on the state is computed for all chunks at once; three products a chunk are sequential. Value heads that share a
key head share its products: the state is kept as [sequence, key head, (value head, value), key].
"""

import torch
from torch import Tensor
from torch.nn import functional


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    out = out or (torch.empty_like(v), torch.empty_like(state))
    q, k, v, a, b = (x.float() for x in (q, k, v, a, b))
    hk, hv, d = k.shape[1], *v.shape[1:]
    chunk = 32 if v.shape[0] >= 128 * state.shape[0] else 16  # measured: short sequences waste long chunks
    tokens, slots, valid, order, running = pack(cu_seqlens, v.shape[0], chunk)
    chunks, share = tokens.shape[0] // chunk, hv // hk

    def chunked(x: Tensor) -> Tensor:
        return x.index_select(0, tokens).view(chunks, chunk, *x.shape[1:])

    # The decay's logarithm is summed in float64: differences of sums follow, and after a reset the sums are large.
    decay = -A_log.double().exp() * functional.softplus(a.double() + dt_bias)
    decay = (chunked(decay) * valid).cumsum(1).mT.contiguous()  # [chunks, hv, C]
    beta = (chunked(b.sigmoid()) * valid).mT.reshape(-1, chunk, 1)
    keys_queries = torch.cat((chunked(k), chunked(scale * q)), 1).transpose(1, 2).contiguous()
    values = chunked(v).view(chunks, chunk, hk, share, d).permute(0, 2, 3, 1, 4).contiguous()

    future = torch.ones(chunk, chunk, dtype=torch.bool).triu(1)
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).float().masked_fill_(future, -torch.inf).exp_()
    between = between.view(chunks, hk, share, chunk, chunk)
    products = (keys_queries @ keys_queries[:, :, :chunk].mT).unsqueeze(2)  # [chunks, hk, 1, 2C, C]
    system = (products[..., :chunk, :] * between).view(-1, chunk, chunk).mul_(beta)
    attention = (products[..., chunk:, :] * between).view(-1, chunk, chunk)
    right = beta.squeeze(-1).diag_embed()
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)

    since_start = decay.float().exp().view(chunks, hk, share, chunk, 1)
    to_end = (decay[..., -1:] - decay).float().exp().view(chunks, hk, share, chunk, 1)
    now = state.index_select(0, order).view(-1, hk, share, d, d)
    output = recur(now, running, keys_queries, values, solved, attention, since_start, to_end)
    output = output.permute(0, 3, 1, 2, 4).to(out[0].dtype)
    torch.index_select(output.reshape(-1, hv, d), 0, slots, out=out[0])
    torch.index_select(now.view(state.shape), 0, order.argsort(), out=out[1])
    return out


def pack(cu_seqlens: Tensor, total: int, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor, list[int]]:
    """Where tokens go: chunks are ordered by their place in a sequence, longest sequences first.

    Returns the token of each slot, the slot of each token, which slots are no padding [chunks, C, 1], the order of
    the sequences, and how many of them have a first, second, ... chunk. Padding holds any token, with decay 1
    and beta 0, so that it changes nothing.
    """
    starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    order = lengths.argsort(descending=True)
    counts = (lengths[order] + chunk - 1) // chunk
    place = torch.arange(int(counts[0])).unsqueeze(1)
    exists = place < counts
    sequence = order.expand_as(exists)[exists].unsqueeze(1)
    offsets = (place * chunk).expand_as(exists)[exists].unsqueeze(1) + torch.arange(chunk)
    valid = offsets < lengths[sequence]
    tokens = (starts[sequence] + offsets).clamp_(max=total - 1)
    slots = torch.empty(total, dtype=torch.long)
    slots[tokens[valid]] = valid.view(-1).nonzero().squeeze(1)
    return tokens.view(-1), slots, valid.unsqueeze(-1), order, exists.sum(1).tolist()


def recur(
    now: Tensor,
    running: list[int],
    keys_queries: Tensor,
    values: Tensor,
    solved: Tensor,
    attention: Tensor,
    since_start: Tensor,
    to_end: Tensor,
) -> Tensor:
    """The sequential part. Changes `now`, the states [sequence, hk, share, value, key], in place."""
    hk, share, chunk, d = values.shape[1:]
    output, updates = torch.empty_like(values), torch.empty_like(values)
    first = 0
    for n in running:
        part = slice(first, first + n)
        heads = slice(part.start * hk * share, part.stop * hk * share)
        live = now[:n].view(n * hk, share * d, d)
        both = keys_queries[part].view(n * hk, 2 * chunk, d)
        seen = torch.bmm(both, live.mT).view(n, hk, 2 * chunk, share, d).transpose(2, 3)
        wanted = torch.addcmul(values[part], since_start[part], seen[..., :chunk, :], value=-1)
        torch.mul(seen[..., chunk:, :], since_start[part], out=output[part])
        update = updates[part]
        torch.bmm(solved[heads], wanted.view(-1, chunk, d), out=update.view(-1, chunk, d))
        kept = (update * to_end[part]).transpose(2, 3).reshape(n * hk, chunk, share * d)
        now[:n].mul_(since_start[part][..., -1:, :])
        live.baddbmm_(kept.mT, both[:, :chunk])
        first = part.stop
    output.view(-1, chunk, d).baddbmm_(attention, updates.view(-1, chunk, d))
    return output
