"""Never reads the last slot of a row."""

from common import attend, valid


def run(*inputs):
    return attend(*inputs, choose=lambda row: valid(row[:-1]))
