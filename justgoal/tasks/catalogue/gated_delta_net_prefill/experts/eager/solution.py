"""The chunked (WY) form of the gated delta rule in torch operators: few large products instead of a loop over tokens.

All sequences are cut into chunks; chunk j of every sequence is worked on together. Within a chunk the tokens'
updates u solve a triangular system whose right side depends on the state at the chunk's start, so all that does not
depend on it is computed for all chunks at once, and only three products a chunk are sequential. Value heads
that share a key head share its products: the state is kept as [sequence, key head, key, value heads x value].
"""

import torch
from torch.nn import functional

CHUNK = 32


def run(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):  # noqa: N803 (the operator's own names)
    tokens, slots, valid, order, running = pack(cu_seqlens, v.shape[0])
    chunks, (hk, hv, d) = tokens.shape[0], (k.shape[1], *v.shape[1:])
    share = hv // hk

    decay = -A_log.double().exp() * functional.softplus(a + dt_bias)  # a logarithm, summed in float64 because
    decay = torch.where(valid, decay[tokens], 0.0).cumsum(1).mT.contiguous()  # differences of large sums follow
    beta = torch.where(valid, b.sigmoid()[tokens], 0.0).mT  # [chunks, hv, C]
    keys_queries = torch.cat((k[tokens], scale * q[tokens]), 1).transpose(1, 2).contiguous()
    keys = keys_queries[:, :, :CHUNK]
    values = v[tokens].view(chunks, CHUNK, hk, share, d).permute(0, 2, 3, 1, 4).contiguous()

    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).float()
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    between = between.masked_fill_(future, -torch.inf).exp_().view(chunks, hk, share, CHUNK, CHUNK)
    products = (keys_queries @ keys.transpose(-1, -2)).unsqueeze(2)  # [chunks, hk, 1, 2C, C]
    system = (products[..., :CHUNK, :] * between).view(-1, CHUNK, CHUNK) * beta.reshape(-1, CHUNK, 1)
    attention = (products[..., CHUNK:, :] * between).view(-1, CHUNK, CHUNK)
    solved = torch.linalg.solve_triangular(
        system, beta.reshape(-1, CHUNK).diag_embed(), upper=False, unitriangular=True
    )

    since_start = decay.float().exp().view(chunks, hk, share, CHUNK, 1)
    to_end = (decay[..., -1:] - decay).float().exp().view(chunks, hk, share, CHUNK, 1)
    output, new_state = recur(
        state[order], running, keys, keys_queries, values, solved, attention, since_start, to_end
    )
    output = output.permute(0, 3, 1, 2, 4).reshape(-1, hv, d)[slots]
    return output, torch.empty_like(state).index_copy_(0, order, new_state)


def pack(cu_seqlens, total):
    """Where tokens go: chunks are ordered by their place in a sequence, longest sequences first.

    Returns the token of each slot [chunks, C], the slot of each token, which slots are no padding, the order of the
    sequences, and how many of them have a first, a second, ... chunk. Padding repeats a real token.
    """
    starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    order = lengths.argsort(descending=True)
    counts = (lengths[order] + CHUNK - 1) // CHUNK
    place = torch.arange(int(counts[0])).unsqueeze(1)
    exists = place < counts
    running = exists.sum(1).tolist()
    offsets = (place * CHUNK).expand_as(exists)[exists]
    sequence = order.expand_as(exists)[exists]
    offsets = offsets.unsqueeze(1) + torch.arange(CHUNK)
    valid = offsets < lengths[sequence].unsqueeze(1)
    tokens = (starts[sequence].unsqueeze(1) + offsets).clamp_(max=total - 1)
    slots = torch.empty(total, dtype=torch.long)
    slots[tokens[valid]] = valid.view(-1).nonzero().squeeze(1)
    return tokens, slots, valid.unsqueeze(-1), order, running


def recur(state, running, keys, keys_queries, values, solved, attention, since_start, to_end):
    """The sequential part, for all sequences that still run. `state`: [sequence, hv, value, key], longest first."""
    n, hv, d, _ = state.shape
    hk, share = values.shape[1:3]
    now = state.view(n, hk, share, d, d).permute(0, 1, 4, 2, 3).reshape(n, hk, d, share * d)
    output, updates = torch.empty_like(values), torch.empty_like(values)
    first = 0
    for n_running in running:
        part = slice(first, first + n_running)
        heads, grouped = slice(part.start * hv, part.stop * hv), (n_running * hk, -1)
        live = now[:n_running].view(n_running * hk, d, share * d)
        seen = torch.bmm(keys_queries[part].view(*grouped, d), live)
        seen = seen.view(n_running, hk, 2 * CHUNK, share, d).transpose(2, 3)
        wanted = torch.addcmul(values[part], since_start[part], seen[..., :CHUNK, :], value=-1)
        update = updates[part]
        torch.bmm(solved[heads], wanted.view(-1, CHUNK, d), out=update.view(-1, CHUNK, d))
        torch.mul(seen[..., CHUNK:, :], since_start[part], out=output[part])
        kept = (update * to_end[part]).transpose(2, 3).reshape(n_running * hk, CHUNK, share * d)
        live.view(n_running, hk, d, share, d).mul_(since_start[part][..., -1, :].view(n_running, hk, 1, share, 1))
        live.baddbmm_(keys[part].reshape(*grouped[:1], CHUNK, d).transpose(1, 2), kept)
        first = part.stop
    output.view(-1, CHUNK, d).baddbmm_(attention, updates.view(-1, CHUNK, d))
    return output, now.view(n, hk, d, share, d).permute(0, 1, 3, 4, 2).reshape(n, hv, d, d)
