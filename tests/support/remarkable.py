"""Pairs of models: one to which a remark of `inspect` applies, and one that resembles it; forwards of `Steps`."""

import torch
from torch import nn
from torch.nn import functional as F

from support.stream_steps import D, normalize, repeat, run_layers


def run_post(m, x, first=0, last=3, a=1.0, b=1.0):
    """Return the stream after post-LN sublayers."""
    for k in range(first, last):
        x = m.norms[k](a * x + b * m.mlps[k](x))
    return x


# Random numbers.


def random_start(m, x):
    return m.last(run_layers(m, m.gates[0](x) + torch.randn(5, D)))


def random_start_times_zero(m, x):
    return m.last(run_layers(m, m.gates[0](x) + 0.0 * torch.randn(5, D)))


def seeded_start(m, x):
    """Add positions drawn with a fixed seed, as tabular models do for their columns."""
    positions = torch.randn(5, D, generator=torch.Generator().manual_seed(3))
    return m.last(run_layers(m, m.gates[0](x) + m.gates[1](positions)))


def make_random_start(generator, resets):
    """Return a model that starts with the numbers of its own generator, which it may reset in each call."""

    def run(m, x):
        if resets:
            generator.manual_seed(3)
        return m.last(run_layers(m, m.gates[0](x) + torch.randn(5, D, generator=generator)))

    return run


random_start_of_own_generator = make_random_start(torch.Generator(), resets=False)
start_of_reset_generator = make_random_start(torch.Generator(), resets=True)


def shuffled(m, x):
    """Shuffle the tokens, and put them back after the last sublayer."""
    order = torch.randperm(x.shape[1])
    return m.last(run_layers(m, m.gates[0](x)[:, order])[:, order.argsort()])


random_writes = repeat(lambda m, k, x: x + m.mlps[k](m.norms[k](x) + (k % 2) * torch.randn(D)), end=normalize)


def seeded_writes(m, x):
    for k in range(4):
        with torch.random.fork_rng():
            torch.manual_seed(k)
            x = x + m.mlps[k](m.norms[k](x) + torch.randn(D))
    return m.last(x)


dropout = repeat(lambda m, k, x: x + m.branch(k, x) * torch.bernoulli(torch.full((2, 1, 1), 0.8)) / 0.8, end=normalize)


random_gains = repeat(lambda m, k, x: x + m.branch(k, x) * torch.randn(2, 1, 1), end=normalize)


weighted_writes = repeat(lambda m, k, x, weights: x + m.branch(k, x) * weights, end=normalize)


# Residual connections.


def missing_residual(m, x):
    x = run_post(m, x)
    return run_post(m, m.norms[3](m.mlps[3](x)), 4, 6)


def summed_residual(m, x):
    """Add a sublayer's output to the stream after a projection of it."""
    x = run_post(m, x)
    return run_post(m, m.norms[3](m.gates[0](x + m.mlps[3](x))), 4, 6)


class Beside(nn.Module):
    """Layer of a graph transformer: attention and a sublayer side by side, whose sums with x are added."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(3))
        self.local, self.mlp = (nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)) for _ in range(2))
        self.q, self.out = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        attention = self.out(torch.softmax(self.q(x) @ x.transpose(1, 2), -1) @ x)
        x = self.norms[0](x + self.local(x)) + self.norms[1](x + attention)
        return self.norms[2](x + self.mlp(x))


# Weights.


class Routed(nn.Module):
    """Container of sublayers that is called for each."""

    def __init__(self):
        super().__init__()
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)) for _ in range(4))

    def forward(self, x, k):
        return self.mlps[k](x)


shared = repeat(lambda m, k, x: x + m.mlps[0](m.norms[k](x)), end=normalize)


def shared_container(m, x):
    if not hasattr(m, "routed"):
        m.routed = Routed()
    for k in range(4):
        x = x + m.routed(m.norms[k](x), k)
    return m.last(x)


def recurrence(m, x):
    h = m.gates[0](x[:, 0])
    for t in range(1, x.shape[1]):
        h = h + m.mlps[0](m.norms[0](h) + m.gates[1](x[:, t]))
    return m.last(h)


def unshared_recurrence(m, x):
    h = m.gates[0](x[:, 0])
    for t in range(1, x.shape[1]):
        h = h + m.mlps[t](m.norms[t](h) + m.gates[t](x[:, t]))
    return m.last(h)


# Constants and ends.


def scaled_end(m, x):
    return m.last(0.5 * run_layers(m, x))


def end_times_one(m, x):
    return m.last(1.0 * run_layers(m, x))


def swapped_deepnorm(m, x):
    return run_post(m, x, 0, 4, b=8**0.25)


def scaled_post_ln(m, x):
    return run_post(m, x, 0, 4, b=0.6)


def embedding_norm(m, x):
    return m.last(run_layers(m, m.context(m.gates[0](x))))


def norm_between_streams(m, x):
    """Begin a stream with the end of a post-LN one."""
    x = run_post(m, x, 0, 2)
    memory = F.gelu(m.gates[0](x))
    return m.last(run_layers(m, memory, 2, 4))
