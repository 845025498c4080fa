"""Model with a factor on each sublayer's write, as the reference for `scale_write` and `ablate`."""

import torch
from torch import nn

D = 16


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
            write = f(x if self.post else norm(x))
            write = write.mean((0, 1), keepdim=True).expand_as(write) if scale == "mean" else write * scale
            x = norm(x + write) if self.post else x + write
        return x


def run_scaled(model, k, scale, x):
    """Return the output with one write scaled by this factor."""
    model.scales[k] = scale
    try:
        return model(x)
    finally:
        model.scales[k] = 1.0
