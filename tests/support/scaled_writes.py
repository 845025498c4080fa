"""A model that adds so much of each sublayer's write: what `scale_write` and `ablate` do from outside."""

from __future__ import annotations

import torch
from torch import Tensor, nn

D = 16


class Model(nn.Module):
    """`scales[k]` of sublayer k's write is added: what scale_write does from outside."""

    def __init__(self, post: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.post = post
        self.f = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(4))
        self.norm = nn.ModuleList(nn.LayerNorm(D) for _ in range(4))
        self.scales: list[float | str] = [1.0] * 4

    def forward(self, x: Tensor) -> Tensor:
        for f, norm, scale in zip(self.f, self.norm, self.scales, strict=True):
            write = f(x if self.post else norm(x))
            write = write.mean((0, 1), keepdim=True).expand_as(write) if scale == "mean" else write * scale
            x = norm(x + write) if self.post else x + write
        return x


def written(model: Model, k: int, scale: float | str, x: Tensor) -> Tensor:
    """The model that was written with that scale."""
    model.scales[k] = scale
    try:
        return model(x)
    finally:
        model.scales[k] = 1.0


def stream() -> Tensor:
    """What it is called with."""
    return torch.randn(2, 5, D, generator=torch.Generator().manual_seed(0))
