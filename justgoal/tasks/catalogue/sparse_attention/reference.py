"""Attention to listed positions, in float64, and the data that it is judged on.

The caches are pages of 64 positions; position i is row i % 64 of page i // 64. For every token and head, over the
valid entries i of the token's row of sparse_indices:

    score_i = sm_scale (q_nope . ckv_i + q_pe . kpe_i)
    lse     = log2(sum exp(score_i))
    output  = softmax(score) . ckv

-1 is padding and may stand anywhere in a row. All other indices of a row are distinct, in any order. A token without a
valid index has output 0 and lse -inf. Positions that nobody names may hold anything, NaN included.
"""

import math

import torch

PAGE = 64


def reference(q_nope, q_pe, ckv_cache, kpe_cache, sparse_indices, sm_scale):
    query = torch.cat((q_nope, q_pe), -1).double()
    content, position = ckv_cache.flatten(0, 1), kpe_cache.flatten(0, 1)
    output = torch.zeros(q_nope.shape, dtype=torch.float64, device=query.device)
    lse = torch.full(q_nope.shape[:2], -torch.inf, dtype=torch.float64, device=query.device)
    for token, indices in enumerate(sparse_indices):
        valid = indices[indices >= 0]
        if len(valid) == 0:
            continue
        values = content[valid].double()
        keys = torch.cat((values, position[valid].double()), -1)
        score = sm_scale * (query[token] @ keys.T)
        lse[token] = score.logsumexp(-1) / math.log(2)
        output[token] = score.softmax(-1) @ values
    return output, lse


def make_inputs(workload, generator, device):
    """Every fourth token has a quarter of its row as padding, at the end."""
    T, K = workload.axes["T"], workload.axes["K"]
    full = min(K, PAGE * workload.axes["P"])
    counts = [full - K // 4 if token % 4 == 1 else full for token in range(T)]
    return of_rows(workload, generator, device, [distinct(workload, generator, count) for count in counts])


def distinct(workload, generator, count):
    return torch.randperm(PAGE * workload.axes["P"], generator=generator)[:count].tolist()


def of_rows(workload, generator, device, rows):
    """Normal values, and these indices: a shorter row is padded at its end."""
    T, H, P, K = (workload.axes[axis] for axis in ("T", "H", "P", "K"))

    def normal(name, *shape):
        dtype = getattr(torch, workload.dtypes.get(name, "bfloat16"))
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    indices = torch.tensor([[*row, *[-1] * (K - len(row))] for row in rows], dtype=torch.int32, device=device)
    return (
        normal("q_nope", T, H, 512),
        normal("q_pe", T, H, 64),
        normal("ckv_cache", P, PAGE, 512),
        normal("kpe_cache", P, PAGE, 64),
        indices,
        torch.tensor(192.0).rsqrt().item(),  # of 128 + 64 features before they became latent
    )


def edge_cases(workload):
    """Named generators: numbers and places of valid indices, sizes of scores, and what lies where nobody looks."""
    T, P, K = (workload.axes[axis] for axis in ("T", "P", "K"))
    full = min(K, PAGE * P)

    def changed(change):
        return lambda generator, device: change(generator, *make_inputs(workload, generator, device))

    def rows(row):
        """`row(generator, token)` is a list of up to K indices."""
        return lambda generator, device: of_rows(
            workload, generator, device, [row(generator, token) for token in range(T)]
        )

    def few(generator, token):
        counts = [0, 1, 63, 64, 65, full - 1, full]
        return distinct(workload, generator, counts[token % len(counts)])

    def scattered(generator, token):
        """Half a row of padding, at places of their own."""
        valid = distinct(workload, generator, K // 2)
        row = torch.full((K,), -1, dtype=torch.int64)
        row[torch.randperm(K, generator=generator)[: K // 2]] = torch.tensor(valid)
        return row.tolist()

    def at_the_end(generator, token):
        """A row that begins with padding."""
        return [-1] * (K - 100) + distinct(workload, generator, 100)

    def blocks(generator, token):
        """Whole blocks of 64 are padding, every second one."""
        valid = distinct(workload, generator, full)
        return [-1 if i // PAGE % 2 else valid[i] if i < full else -1 for i in range(K)]

    def outer_pages(generator, token):
        """The first page and the last, its last position first."""
        return [PAGE * P - 1, *range(PAGE), *range(PAGE * (P - 1), PAGE * P - 1)]

    def ordered(descending):
        return rows(lambda generator, token: sorted(distinct(workload, generator, full), reverse=descending))

    def offset(size):
        """All scores of every token by about `size`, which no weight depends on."""

        def shift(generator, q_nope, q_pe, ckv, kpe, indices, scale):
            q_pe, kpe = q_pe.clone(), kpe.clone()
            q_pe[..., 0], kpe[..., 0] = size / abs(size) * 16, abs(size) / scale / 16
            return q_nope, q_pe, ckv, kpe, indices, scale

        return changed(shift)

    def last_entry(generator, q_nope, q_pe, ckv, kpe, indices, scale):
        """The last valid entry of a row has the key that the token's heads like best."""
        ckv = ckv.clone()
        for token, row in enumerate(indices):
            last = row[row >= 0][-1:]
            ckv.view(-1, 512)[last] = q_nope[token].float().mean(0).mul(q_nope.shape[1] ** 0.5).to(ckv.dtype)
        return q_nope, q_pe, ckv, kpe, indices, scale

    def unnamed(generator, q_nope, q_pe, ckv, kpe, indices, scale):
        """Nobody names the first page or the last, and NaN stands wherever nobody looks. Every row has padding."""
        indices = indices.masked_fill((indices < PAGE) | (indices >= PAGE * (P - 1)), -1)
        lonely = torch.ones(PAGE * P, dtype=torch.bool, device=ckv.device)
        lonely[indices[indices >= 0]] = False
        lonely = lonely.view(P, PAGE, 1)
        return q_nope, q_pe, ckv.masked_fill(lonely, torch.nan), kpe.masked_fill(lonely, torch.nan), indices, scale

    def times(factor):
        return changed(lambda _, q_nope, q_pe, *rest: (factor * q_nope, factor * q_pe, *rest))

    return {
        "few valid indices": rows(few),
        "padding anywhere": rows(scattered),
        "padding first": rows(at_the_end),
        "blocks of padding": rows(blocks),
        "no valid index": rows(lambda generator, token: []),
        "the first page and the last": rows(outer_pages),
        "ascending indices": ordered(False),
        "descending indices": ordered(True),
        "large scores": times(16.0),
        "another scale": changed(lambda _, *inputs: (*inputs[:-1], torch.tensor(0.19).item())),
        "all scores far above zero": offset(110.0),
        "all scores far below zero": offset(-110.0),
        "the last entry matters most": changed(last_entry),
        "NaN where nobody looks": changed(unnamed),
    }
