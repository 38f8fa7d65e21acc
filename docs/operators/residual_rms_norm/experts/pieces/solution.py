def run(x, residual, weight, epsilon):
    stream = x + residual
    return stream * (stream.square().mean(1, keepdim=True) + epsilon).rsqrt() * weight, stream
