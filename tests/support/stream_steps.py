"""Models whose streams are cut, joined, gated, interpolated or scaled in ways that the rows must contain or `inspect` must report.

Each function is the forward of a `Steps` model, which has norms, sublayers, vectors, matrices and gates for it.
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

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


# Norms whose weight is outside of torch's norm.


def norm_image(m, k, x):
    return m.norms[k](x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


channel_scale = repeat(lambda m, k, x: x + m.gammas[k].view(-1, 1, 1) * m.convolutions[k](norm_image(m, k, x)), count=3)


def stacked_sublayers(m, x):
    for k in (0, 2):
        x = x + torch.stack([m.branch(j, x) for j in (k, k + 1)]).sum(0)
    return x


# Streams that are cut and joined.


def fused_tokens(m, x, other):
    """Compute the first token from two streams, as CrossViT."""
    for k in (0, 3):
        x = x + m.branch(k, x)
        other = other + m.branch(k + 1, other)
        both = torch.cat([m.gates[k](x[:, :1]), other], 1)
        c = both[:, :1] + m.branch(k + 2, both).mean(1, keepdim=True)
        x = torch.cat([m.gates[k + 1](c), x[:, 1:]], 1)
    return x


def summed_streams(m, x, other):
    """Add the end of another stream to the end of one, before its norm."""
    for k in range(3):
        x = x + m.branch(k, x)
        other = other + m.branch(k + 3, other)
    return m.last(x + other)


def partly_normed(m, x, other):
    """Normalize and write some tokens, and double the others, as XCiT's class attention."""
    x = torch.cat([m.norms[0](x[:, :1]), x[:, 1:]], 1)
    x = x + torch.cat([m.mlps[0](x[:, :1]), x[:, 1:]], 1)
    return m.last(x)


# Norms.


# Add positions before the norm of each sublayer.
norm_of_a_sum = repeat(lambda m, k, x: m.others[k](x + m.branch(k, x + m.shifts[:5])), count=3)


def bare_token_mixers(m, x):
    """Multiply the transposed stream by a matrix, between feed-forward sublayers; no layer has a norm."""
    x = m.gates[0](x)
    for k in range(2):
        x = x + torch.relu(x.mT @ m.gammas[:5, :5]).mT
        x = x + m.mlps[k](x)
    return x


def normed_token_mixers(m, x):
    """Norm the transposed output of a product over the tokens, by hand."""
    for _ in range(3):
        y = (torch.relu(x.mT) @ m.gammas[:5, :5]).mT
        x = x + (y * y.square().mean(-1, keepdim=True).add(1e-6).rsqrt()) * m.gammas[5]
    return x


# Multiply the norm by a constant after the channels came first again.
scaled_reads_of_channels = repeat(lambda m, k, x: x + m.convolutions[k](norm_image(m, k, x) * 0.5), count=3)


# Scale the output's norm, which has no weight, where it is added.
scaled_branch_norms = repeat(lambda m, k, x: x + m.gammas[k].view(-1) * m.bare(m.branch(k, x)))


def sums_of_normed_sublayers(m, x):
    """Add a sum of two sublayers with norms of their own."""
    for k in range(2):
        x = m.outer(lambda x, k=k: sum([m.branch(j, x) for j in (2 * k, 2 * k + 1)]), x) + x
    return x


def add_orthogonal(x, y):
    """Add the part of an output that is orthogonal to the stream."""
    u = F.normalize(x, dim=-1)
    return x + (y - (y * u).sum(-1, keepdim=True) * u)


orthogonal_updates = repeat(lambda m, k, x: add_orthogonal(x, m.branch(k, x)))
# Read through the same kind of norm as the projection.
orthogonal_updates_of_one_norm = repeat(
    lambda m, k, x: add_orthogonal(x, m.mlps[k](F.normalize(x, dim=-1) * m.gammas[k]))
)


def norms_of_channels(m, x):
    """Normalize the channels of an image by their variance and mean, as NesT."""

    def norm(k, x):
        var, mean = x.var(1, unbiased=False, keepdim=True), x.mean(1, keepdim=True)
        return (x - mean) / (var + 1e-5).sqrt() * m.gammas[k].view(-1, 1, 1) + m.shifts[k].view(-1, 1, 1)

    for k in range(3):
        x = x + m.convolutions[k](norm(k, x))
    return norm(3, x)
