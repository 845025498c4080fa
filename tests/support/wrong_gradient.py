"""Wrong gradients on purpose, for tests of the checks that must detect them."""

import torch

from addnorm.bench.exactness import GRADIENTS


class ChangedGradient(torch.autograd.Function):
    """Copy of a tensor with a changed gradient."""

    @staticmethod
    def forward(ctx, t, change):
        ctx.change = change
        return t.clone()

    @staticmethod
    def backward(ctx, dt):
        return ctx.change(dt), None


def scale_gradient(t, factor):
    """Return a copy of the tensor whose gradient is multiplied by a factor."""
    return ChangedGradient.apply(t, lambda dt: dt * factor)


def spoil(call, name, factor):
    """Return a call of (y, z) with one output, or one gradient of an argument, multiplied by a factor."""

    def spoiled(*args):
        args = [scale_gradient(t, factor) if name == key else t for key, t in zip(GRADIENTS, args, strict=False)]
        return tuple(t * factor if name == key else t for key, t in zip("yz", call(*args), strict=True))

    return spoiled
