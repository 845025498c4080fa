"""The share of Add & Norm in a forward pass: from node by node, with the clock."""

import time

import torch
from torch import nn
from torch.nn import functional as F

from addnorm.fusion.share import Clock, share

D = 16


class Slow(nn.Module):
    """A norm that reads a sum; another one that does not; and products."""

    def __init__(self):
        super().__init__()
        self.f, self.norm = nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x):
        x = self.norm(self.f(x))
        return self.f(F.layer_norm(x + self.f(x), (D,)))


def test_adds_that_a_norm_reads_and_these_norms_count_and_nothing_else(monkeypatch):
    ticks = iter(range(10_000))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(ticks))  # each node takes one tick
    model, x = Slow(), torch.randn(2, 5, D)
    part = share(lambda backend: torch.compile(model, backend=backend), lambda call: call(x))
    torch._dynamo.reset()
    clock = Clock()
    with torch.no_grad():
        torch.compile(model, backend=clock)(x)
    torch._dynamo.reset()
    assert clock.inside == 2  # the add and the norm
    assert part == 2 / clock.total


def test_a_model_without_add_and_norm_has_none():
    model, x = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D)), torch.randn(2, D)
    assert share(lambda backend: torch.compile(model, backend=backend), lambda call: call(x)) == 0.0
    torch._dynamo.reset()
