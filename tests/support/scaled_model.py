"""Model with a factor on each sublayer's write, as the reference for `scale_write` and `ablate`."""

import torch
from torch import nn

import addnorm
from support.stream_steps import X, noise

D = 16


def change_write(write, scale):
    """Return the product of a write and a number, or for "mean" its mean over all tokens."""
    return write.mean((0, 1), keepdim=True).expand_as(write) if scale == "mean" else write * scale


def run_backward(model, x):
    """Return the output and the parameters' gradients, of a loss whose gradient differs between the elements."""
    model.zero_grad()
    y = model(x)
    (y * noise(*y.shape, seed=3)).sum().backward()
    return [y.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters())]


def edit(site, scale):
    """Return the edit that multiplies a write by a number, or replaces it by its mean."""
    return addnorm.ablate(site, "mean") if scale == "mean" else addnorm.scale_write(site, scale)


class Model(nn.Module):
    """Four sublayers; `scales[k]` multiplies the write of sublayer k."""

    def __init__(self, post=False):
        super().__init__()
        torch.manual_seed(0)
        self.post = post
        self.f = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(4))
        self.norm = nn.ModuleList(nn.LayerNorm(D) for _ in range(4))
        self.scales = [1.0] * 4

    def forward(self, x):
        for f, norm, scale in zip(self.f, self.norm, self.scales, strict=True):
            write = change_write(f(x if self.post else norm(x)), scale)
            x = norm(x + write) if self.post else x + write
        return x


def run_scaled(model, k, scale):
    """Return the output for X with one write scaled by this factor."""
    model.scales[k] = scale
    try:
        return model(X)
    finally:
        model.scales[k] = 1.0
