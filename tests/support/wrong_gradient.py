"""Wrong gradients on purpose, for tests of the checks that must detect them."""

import torch


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, factor):
        ctx.factor = factor
        return t.clone()

    @staticmethod
    def backward(ctx, dt):
        return dt * ctx.factor, None


def scale_gradient(t, factor):
    """Return a copy of the tensor whose gradient is multiplied by a factor."""
    return _ScaledGradient.apply(t, factor)
