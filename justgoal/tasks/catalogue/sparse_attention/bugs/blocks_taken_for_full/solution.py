"""Takes a block of 64 indices for full when its last one is valid; padding in it reads the last position."""

from common import attend


def choose(row):
    return [i for block in row.split(64) for i in (block if block[-1] >= 0 else block[block >= 0]).tolist()]


def run(*inputs):
    return attend(*inputs, choose=choose)
