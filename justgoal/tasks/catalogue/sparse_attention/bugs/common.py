"""A right implementation in parts, so that a bug can put a wrong one in the place of any of them."""

import math

import torch


def valid(row):
    """The indices that count."""
    return row[row >= 0].tolist()


def softmax(scores):
    """Weights that sum to one, and the logarithm of the sum."""
    lse = scores.logsumexp(-1, keepdim=True)
    return torch.exp(scores - lse), lse.squeeze(-1)


def attend(q_nope, q_pe, ckv, kpe, indices, scale, choose=valid, weigh=softmax, empty=(0.0, -math.inf)):
    """`choose` makes a row's positions, `weigh` the weights and lse of scores; `empty` is for rows without any."""
    query, content, position = torch.cat((q_nope, q_pe), -1).float(), ckv.flatten(0, 1), kpe.flatten(0, 1)
    output, lse = torch.full_like(q_nope, empty[0]), torch.full(q_nope.shape[:2], empty[1])
    for token, row in enumerate(indices):
        if chosen := choose(row):
            values = content[chosen].float()
            keys = torch.cat((values, position[chosen].float()), -1)
            weights, total = weigh(scale * (query[token] @ keys.T))
            output[token] = weights @ values
            lse[token] = total / math.log(2)
    return output, lse
