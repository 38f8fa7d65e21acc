"""stream = x + residual; y = weight stream / sqrt(mean of stream^2 + epsilon), the mean over features."""

import torch


def reference(x, residual, weight, epsilon):
    stream = x.double() + residual.double()
    return weight * stream * (stream.square().mean(1, keepdim=True) + epsilon).rsqrt(), stream


def make_inputs(workload, generator, device):
    """As in a deep network: the stream is larger than what a block adds, and tokens differ in size."""
    tokens, features = workload.axes["T"], workload.axes["D"]

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    size = torch.exp2(normal(tokens, 1))
    return size * normal(tokens, features), 4 * size * normal(tokens, features), 1 + 0.1 * normal(features), 1e-6


def edge_cases(workload):
    def changed(change):
        def inputs(generator, device):
            return change(*make_inputs(workload, generator, device))

        return inputs

    def one_large_feature(x, residual, weight, epsilon):
        residual[:, 7] *= 1e4
        return x, residual, weight, epsilon

    def off_centre(x, residual, weight, epsilon):
        return x, residual + 8.0, weight, epsilon

    return {
        "tokens so small that epsilon counts": changed(lambda x, r, w, e: (1e-4 * x, 1e-4 * r, w, e)),
        "another epsilon": changed(lambda x, r, w, e: (x, r, w, 0.25)),
        "large tokens": changed(lambda x, r, w, e: (1e12 * x, 1e12 * r, w, e)),
        "empty tokens": changed(lambda x, r, w, e: (torch.zeros_like(x), torch.zeros_like(r), w, e)),
        "one large feature": changed(one_large_feature),
        "features with a mean": changed(off_centre),
    }
