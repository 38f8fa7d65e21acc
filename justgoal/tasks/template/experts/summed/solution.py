"""A second honest implementation, in another algorithm if there is one: the judge must accept both."""


def run(x, weight, scale):
    return scale * (x * weight).sum(1)
