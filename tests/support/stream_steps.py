"""A model with norms, sublayers, vectors, matrices and gates, and parts of forwards that run them."""

from functools import partial

import torch
from torch import nn

import addnorm
from support import families
from support.families import shake
from support.random_models.graphs import Graph

D = 16


noise = partial(families.noise, seed=0)
X = noise(2, 5, D)


class Outer(nn.Module):
    """Call of a function in a module of its own."""

    def forward(self, run, x):
        return run(x)


def make_mlp():
    return nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))


class Steps(Graph):
    """Parts for six sublayers and the function that runs them."""

    def __init__(self, run):
        super().__init__(run)
        self.norms, self.others = (nn.ModuleList(nn.LayerNorm(D) for _ in range(6)) for _ in range(2))
        self.bare = nn.LayerNorm(D, elementwise_affine=False)
        self.last, self.context = nn.LayerNorm(D), nn.LayerNorm(D)
        self.mlps = nn.ModuleList(make_mlp() for _ in range(6))
        self.gates = nn.ModuleList(nn.Linear(D, D) for _ in range(6))
        self.convolutions = nn.ModuleList(nn.Conv2d(D, D, 3, padding=1) for _ in range(3))
        self.gammas, self.shifts = (nn.Parameter(torch.zeros(6, D)) for _ in range(2))
        self.heads = nn.Parameter(torch.zeros(2, 2))
        self.outer = Outer()

    def branch(self, k, x):
        """Return the output of pre-LN sublayer k."""
        return self.mlps[k](self.norms[k](x))


def make_steps(run):
    """Return the model with random parameters; its scales are between 0.3 and 0.9."""
    model = shake(Steps(run).eval())
    with torch.no_grad():
        for parameter in (model.gammas, model.shifts):
            parameter.uniform_(0.3, 0.9, generator=torch.Generator().manual_seed(1))
    return model


def inspect_steps(run, *inputs):
    """Return the inspection of a forward, on one stream of five tokens unless other inputs are passed."""
    return addnorm.inspect(make_steps(run), *(inputs or (X,)))


def list_reasons(inspection):
    """Return the reasons of what is not understood."""
    return [unknown.reason for unknown in inspection.unknown]


def silence(model, k):
    """Make sublayer k of a model return zeros."""
    for parameter in model.mlps[k][2].parameters():
        torch.nn.init.zeros_(parameter)


def repeat(step, count=4, end=None):
    """Return the forward that calls `step(m, k, x, *others)` for each sublayer, and then `end(m, x)`."""

    def run(m, x, *others):
        for k in range(count):
            x = step(m, k, x, *others)
        return end(m, x) if end else x

    return run


def run_layers(m, x, first=0, last=4):
    """Return the stream after pre-LN sublayers."""
    for k in range(first, last):
        x = x + m.branch(k, x)
    return x


def normalize(m, x):
    return m.last(x)


def stacked_sublayers(m, x):
    for k in (0, 2):
        x = x + torch.stack([m.branch(j, x) for j in (k, k + 1)]).sum(0)
    return x


def fused_tokens(m, x, other):
    """Compute the first token from two streams, as CrossViT."""
    for k in (0, 3):
        x = x + m.branch(k, x)
        other = other + m.branch(k + 1, other)
        both = torch.cat([m.gates[k](x[:, :1]), other], 1)
        c = both[:, :1] + m.branch(k + 2, both).mean(1, keepdim=True)
        x = torch.cat([m.gates[k + 1](c), x[:, 1:]], 1)
    return x
