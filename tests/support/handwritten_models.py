"""A small model of handwritten sublayers."""

import torch
from torch import nn

from support.families import shake
from support.random_models.layouts import Layout, Sizes
from support.random_models.sublayers import Attention
from support.stacks import D, Mlp

VOCAB = 99


def make_attention():
    return Attention(Layout("batch", Sizes(2, 1, 7, D)))


class Part(nn.Module):
    """One sublayer: its function, its norm and learned factors, which a step combines: a function of the part and of the stream."""

    def __init__(self, f, norm):
        super().__init__()
        self.f, self.norm, self.drop = f, norm, nn.Dropout(0.1)
        self.gamma, self.scale = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(()))

    def branch(self, x):
        return self.f(self.norm(x))


class Tiny(nn.Module):
    """Transformer of two layers whose sublayers run `step`, with an optional final norm."""

    def __init__(self, step, final_norm):
        super().__init__()
        self.embed, self.positions, self.step = nn.Embedding(VOCAB, D), nn.Embedding(64, D), step
        self.parts = nn.ModuleList(Part(make(), nn.LayerNorm(D)) for _ in range(2) for make in (make_attention, Mlp))
        self.last = nn.LayerNorm(D) if final_norm else nn.Identity()

    def forward(self, ids):
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[-1]))
        for part in self.parts:
            x = self.step(part, x)
        return self.last(x)


pre = lambda s, x: x + s.branch(x)  # noqa: E731 (a step, as the others in the tables)
IDS = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))


def tiny(step=pre, final_norm=True):
    """Return a `Tiny` with random parameters."""
    return shake(Tiny(step, final_norm))


def check_tiny(result, closure=1e-5):
    """Check the inspection of a `tiny` model."""
    assert result.wiring == "pre_ln"
    assert [site.kind for site in result.sites if site.role != "skip"] == ["attention", "feed-forward"] * 2
    assert result.unknown == ()
    assert result.closes
    assert result.closure <= closure
