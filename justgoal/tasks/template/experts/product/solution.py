"""What a good engineer would write first. A folder like a model's solution: solution.py with `run`, other files beside it."""


def run(x, weight, scale):
    return scale * (x @ weight)
