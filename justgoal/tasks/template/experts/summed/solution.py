"""A second honest implementation, in another algorithm if there is one: it shows that the judge accepts more than one."""


def run(x, weight, scale):
    return scale * (x * weight).sum(1)
