"""Wrong gradients on purpose, for tests of the checks that must detect them."""

import torch


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
