"""The chunked (WY) form of the gated delta rule, with all that does not depend on the state compiled by torch.

As in the eager expert, chunk j of every sequence is worked on together, and within a chunk the updates u of its tokens
solve a triangular system. Here each value head has keys and queries of its own, already multiplied by their
decays, so that the sequential part is four operators a chunk: two products with the state, the system, the decay.
What is compiled sees the same shapes for every partition of the same tokens: the number of chunks is the largest
possible one, and those in excess hold no tokens.
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
    output, new_state = out or (torch.empty_like(v), torch.empty_like(state))
    sequences, hv, d = state.shape[:3]
    chunk = 32 if v.shape[0] >= 128 * sequences else 16  # measured: short sequences waste long chunks
    tokens, slots, valid, order, running = pack(cu_seqlens, v.shape[0], chunk)
    factor = torch.tensor(scale)  # a float would be compiled in
    keys, keys_queries, mixed, solved, attention, decays = prepare(q, k, v, A_log, a, dt_bias, b, tokens, valid, factor)
    updates = torch.empty_like(keys)

    def advance(states: Tensor, out: Tensor, first: int) -> None:
        """One chunk of as many sequences as `states` has, whose chunks start at `first`. `out` may be `states`."""
        heads = slice(first * hv, first * hv + states.shape[0] * hv)
        states, out = states.view(-1, d, d), out.view(-1, d, d)
        mixed[heads].baddbmm_(keys_queries[heads], states.mT)
        torch.bmm(solved[heads], mixed[heads, :chunk], out=updates[heads])
        torch.mul(states, decays[heads], out=out)
        out.baddbmm_(updates[heads].mT, keys[heads])

    advance(state, new_state, 0)
    if len(running) > 1:
        longer, first = order[: running[1]], sequences
        states = new_state.index_select(0, longer)
        for count in running[1:]:
            advance(states[:count], states[:count], first)
            first += count
        new_state.index_copy_(0, longer, states)
    updates[sum(running) * hv :] = 0.0
    finish(mixed, attention, updates, slots, output)
    return output, new_state


def pack(cu_seqlens: Tensor, total: int, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor, list[int]]:
    """Where tokens go: first the first chunk of every sequence, then the second ones, longest sequences first.

    Returns the token of each slot [chunks, C], the slot of each token, which slots are no padding [chunks, C, 1],
    the order of the sequences after the first chunk, and how many of them have a first, second, ... chunk.
    """
    starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    order = lengths.argsort(descending=True)
    counts = (lengths[order] + chunk - 1) // chunk
    place = torch.arange(int(counts[0])).unsqueeze(1)
    exists = place < counts
    sequence = order.expand_as(exists)[exists]
    sequence[: len(order)] = torch.arange(len(order))
    offsets = (place * chunk).expand_as(exists)[exists].unsqueeze(1) + torch.arange(chunk)
    sequence = sequence.unsqueeze(1)
    used = len(sequence)
    most = (total + len(order) * (chunk - 1)) // chunk
    valid = torch.zeros(most, chunk, dtype=torch.bool)
    torch.lt(offsets, lengths[sequence], out=valid[:used])
    tokens = torch.zeros(most, chunk, dtype=torch.long)
    torch.clamp(starts[sequence] + offsets, max=total - 1, out=tokens[:used])
    slots = torch.empty(total, dtype=torch.long)
    slots[tokens[valid]] = valid.view(-1).nonzero().squeeze(1)
    return tokens, slots, valid.unsqueeze(-1), order, exists.sum(1).tolist()


@torch.compile(dynamic=False)
def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    tokens: Tensor,
    valid: Tensor,
    scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All that does not depend on the state, [chunks x hv, ...]: keys decayed to the chunk's end, [-keys, queries]
    decayed from its start, [values, 0], the solved system, attention within the chunk, the decay over it.
    """
    chunks, chunk = tokens.shape
    hk, hv, d = k.shape[1], *v.shape[1:]
    share = hv // hk
    q, k, v, a, b = (x.float() for x in (q, k, v, a, b))

    # The decay's logarithm is summed in float64: differences of sums follow, and after a reset the sums are large.
    decay = -A_log.double().exp() * functional.softplus(a.double() + dt_bias)
    decay = torch.where(valid, decay[tokens], 0.0).cumsum(1).mT.reshape(chunks, hk, share, chunk, 1)
    beta = torch.where(valid, b.sigmoid()[tokens], 0.0).mT.reshape(chunks, hk, share, chunk, 1)
    keys_queries = torch.cat((k[tokens], scale * q[tokens]), 1).transpose(1, 2).contiguous()
    keys, queries = keys_queries.unsqueeze(2).split(chunk, 3)
    values = v[tokens].view(chunks, chunk, hk, share, d).permute(0, 2, 3, 1, 4)

    products = (keys_queries @ keys_queries[:, :, :chunk].mT).unsqueeze(2)
    past = torch.ones(chunk, chunk, dtype=torch.bool).tril()
    between = torch.where(past, (decay - decay.mT).float().exp(), 0.0)
    system = (products[..., :chunk, :] * between * beta).reshape(-1, chunk, chunk)
    attention = (products[..., chunk:, :] * between).reshape(-1, chunk, chunk)
    right = torch.diag_embed(beta.reshape(-1, chunk))
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)

    since_start, to_end = decay.float().exp(), (decay[..., -1:, :] - decay).float().exp()
    from_start = torch.cat((-keys * since_start, queries * since_start), 3).reshape(-1, 2 * chunk, d)
    mixed = torch.cat((values, torch.zeros_like(values)), 3).reshape(-1, 2 * chunk, d)
    decays = since_start[..., -1, :].reshape(-1, 1, 1)
    return (keys * to_end).reshape(-1, chunk, d), from_start, mixed, solved, attention, decays


@torch.compile(dynamic=False)
def finish(mixed: Tensor, attention: Tensor, updates: Tensor, slots: Tensor, out: Tensor) -> None:
    """What the state and the chunk's own tokens answer, back in the tokens' order."""
    chunk, (hv, d) = updates.shape[1], out.shape[1:]
    output = torch.bmm(attention, updates) + mixed[:, chunk:]
    out.copy_(output.view(-1, hv, chunk, d).transpose(1, 2).reshape(-1, hv, d)[slots])
