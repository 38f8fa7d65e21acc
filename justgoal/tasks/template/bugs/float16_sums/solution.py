"""Adds up in float16."""

# A wrong solution that the judge must catch: a mistake that somebody might really make. The first line says which.
# What all bugs share may stand in bugs/common.py, and is imported as `common`.


def run(x, weight, scale):
    return scale * (x * weight).half().sum(1).float()
