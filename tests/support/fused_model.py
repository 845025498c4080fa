"""Small post-LN and pre-LN models for the tests of fusion, `fuse` without a benchmark, a counter of calls, and warning filters."""

from functools import partial

import pytest
import torch
from torch import nn

import addnorm
from support.stream_steps import D, noise

X = noise(2, 5, D)
fuse = partial(addnorm.fuse, benchmark=False)  # no test depends on measured times
# Warnings of torch while it captures and compiles.
QUIET = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]


class Layer(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.f, self.g = nn.Linear(D, D), nn.Linear(D, D)
        self.n, self.m = nn.LayerNorm(D), nn.LayerNorm(D)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        x = self.n(x + self.drop(self.f(x)))
        return self.m(x + self.drop(torch.tanh(self.g(x))))


class Model(nn.Module):
    def __init__(self, layers=1, p=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer(p) for _ in range(layers))

    def forward(self, x, scale=1.0):
        for layer in self.layers:
            x = layer(x)
        return x * scale


class PreNormLayer(Layer):
    def forward(self, x):
        x = x + self.drop(self.f(self.n(x)))
        return x + self.drop(self.g(self.m(x)))


class PreNormModel(nn.Module):
    """Model whose layers `run(layer, x)` runs; a norm follows the last one."""

    def __init__(self, p=0.0, layers=2, run=lambda layer, x: layer(x)):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(PreNormLayer(p) for _ in range(layers))
        self.norm, self.run = nn.LayerNorm(D), run

    def forward(self, x):
        for layer in self.layers:
            x = self.run(layer, x)
        return self.norm(x)


def count_calls(model, *args, **kwargs):
    """Return how many times the operation is called."""
    with torch.profiler.profile() as profile, torch.no_grad():
        model(*args, **kwargs)
    return sum(event.name.startswith("addnorm::add_norm") for event in profile.events())
