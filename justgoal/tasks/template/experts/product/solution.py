"""What a good engineer would write first. As a model's solution: `run` in solution.py, other files beside it."""


def run(x, weight, scale):
    return scale * (x @ weight)
