"""Pairs of models: one to which a remark of `inspect` applies, and one that resembles it; forwards of `Steps`."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from support.stream_steps import D, make_mlp, normalize, repeat, run_layers


def run_post(m, x, first=0, last=3, b=1.0):
    """Return the stream after post-LN sublayers."""
    for k in range(first, last):
        x = m.norms[k](x + b * m.mlps[k](x))
    return x


# Random numbers.


def begin_with(draw):
    """Return the forward that adds what `draw(m)` returns to the start."""
    return lambda m, x: m.last(run_layers(m, m.gates[0](x) + draw(m)))


OWN, RESET = torch.Generator(), torch.Generator()  # one of them is reset in each call
random_start = begin_with(lambda m: torch.randn(5, D))
random_start_times_zero = begin_with(lambda m: 0.0 * torch.randn(5, D))
random_start_of_own_generator = begin_with(lambda m: torch.randn(5, D, generator=OWN))
start_of_reset_generator = begin_with(lambda m: torch.randn(5, D, generator=RESET.manual_seed(3)))
# Positions drawn with a fixed seed, as tabular models have for their columns.
seeded_start = begin_with(lambda m: m.gates[1](torch.randn(5, D, generator=torch.Generator().manual_seed(3))))


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


def replace(step):
    """Return the forward of post-LN sublayers one of which is a step without a residual connection."""
    return lambda m, x: run_post(m, m.norms[3](step(m, run_post(m, x))), 4, 6)


missing_residual = replace(lambda m, x: m.mlps[3](x))
summed_residual = replace(lambda m, x: m.gates[0](x + m.mlps[3](x)))  # the sum is projected


def beside(m, x):
    """Run layers of a graph transformer: attention and a sublayer side by side, whose sums with x are added."""
    for k in (0, 2):
        attention = m.gates[k](torch.softmax(m.gates[k + 1](x) @ x.mT, -1) @ x)
        x = m.norms[k](x + m.mlps[k](x)) + m.norms[k + 1](x + attention)
        x = m.others[k](x + m.mlps[k + 1](x))
    return x


# Weights.


class Routed(nn.Module):
    """Container of sublayers that is called for each."""

    def __init__(self):
        super().__init__()
        self.mlps = nn.ModuleList(make_mlp() for _ in range(4))

    def forward(self, x, k):
        return self.mlps[k](x)


shared = repeat(lambda m, k, x: x + m.mlps[0](m.norms[k](x)), end=normalize)


def shared_container(m, x):
    if not hasattr(m, "routed"):
        m.routed = Routed()
    for k in range(4):
        x = x + m.routed(m.norms[k](x), k)
    return m.last(x)


def recur(number):
    """Return the forward that updates a state by each token, at the token t with the sublayer and the input `number(t)`."""

    def run(m, x):
        h = m.gates[0](x[:, 0])
        for t in range(1, x.shape[1]):
            h = h + m.mlps[number(t)](m.norms[number(t)](h) + m.gates[number(t) or 1](x[:, t]))
        return m.last(h)

    return run


recurrence, unshared_recurrence = recur(lambda t: 0), recur(lambda t: t)


# Constants and ends.


def end_times(factor):
    return lambda m, x: m.last(factor * run_layers(m, x))


scaled_end, end_times_one = end_times(0.5), end_times(1.0)
swapped_deepnorm = partial(run_post, last=4, b=8**0.25)
scaled_post_ln = partial(run_post, last=4, b=0.6)


def embedding_norm(m, x):
    return m.last(run_layers(m, m.context(m.gates[0](x))))


def norm_between_streams(m, x):
    """Begin a stream with the end of a post-LN one."""
    x = run_post(m, x, 0, 2)
    memory = F.gelu(m.gates[0](x))
    return m.last(run_layers(m, memory, 2, 4))
