"""Works on whole blocks of 32 valid indices, and drops the rest."""

from common import attend, valid


def choose(row):
    chosen = valid(row)
    return chosen[: len(chosen) // 32 * 32]


def run(*inputs):
    return attend(*inputs, choose=choose)
