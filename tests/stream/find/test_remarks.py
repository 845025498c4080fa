"""Tests that each kind of remark and note is made where it is so, and not of a model that only resembles it."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.random_models.graphs import Graph
from support.stream_steps import D, X, inspect_steps, make_mlp, normalize, repeat, run_layers

# Pairs of forwards of `Steps`: one to which a remark or note applies, and one that resembles it.


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


shared = repeat(lambda m, k, x: x + m.mlps[0](m.norms[k](x)), end=normalize)


def shared_container(m, x):
    """Run a container of sublayers, which is called for each."""
    if not hasattr(m, "routed"):
        m.routed = Graph(lambda m, x, k: m.mlps[k](x), mlps=nn.ModuleList(make_mlp() for _ in range(4)))
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


# The remarks and notes.

ONE = (X,)
WEIGHTS = (*ONE, torch.rand(2, 5, 1, generator=torch.Generator().manual_seed(2)) + 0.5)
MASK = (*ONE, (torch.arange(5) < 3).float().expand(2, 5)[..., None])

# words of the remark or note, a model that has it, one that resembles it, and their inputs if they are not ONE
KINDS = {
    "random start": ("its start depends on random numbers in evaluation mode, and two runs differ", random_start, seeded_start),
    "random start without effect": ("random numbers", random_start, random_start_times_zero),
    "random order": ("random numbers", random_start, shuffled),
    "random writes": ("2 of its 4 sublayers draw random numbers in evaluation mode, \\S+#2 first", random_writes, seeded_writes),
    "generator of the model": ("random numbers", random_start_of_own_generator, start_of_reset_generator),
    "dropout": ("^dropout$", dropout, random_gains),
    "random factor": ("the write is multiplied by random numbers", random_gains, dropout),
    "mask": ("the write is masked by token", weighted_writes, weighted_writes, MASK, WEIGHTS),
    "weights": ("the write is multiplied by a number for each token", weighted_writes, weighted_writes, WEIGHTS, MASK),
    "missing residual": ("does not add to it", missing_residual, summed_residual),
    "shared weights": ("shared weights: mlps.0 is 4 sublayers", shared, shared_container),
    "recurrence": ("shared weights", recurrence, unshared_recurrence),
    "factor at the end": ("multiplied by a factor before the final norm", scaled_end, end_times_one),
    "swapped factor": ("deepnorm has it on the stream", swapped_deepnorm, scaled_post_ln),
    "embedding norm": ("with a norm of the embedding", embedding_norm, norm_between_streams),
}  # fmt: skip


def list_texts(run, inputs):
    """Return the remarks and notes of a model, whose streams all close."""
    inspection = inspect_steps(run, *inputs)
    assert inspection.closes, inspection.unknown
    notes = [note for site in inspection.sites for note in site.notes]
    return [*notes, *(remark for stream in inspection.streams for remark in stream.remarks)]


@pytest.mark.parametrize("kind", KINDS)
def test_remark_is_made_where_it_is_so(kind):
    words, *runs = KINDS[kind]
    inputs = runs[2:] or (ONE, ONE)
    right, near = (list_texts(*pair) for pair in zip(runs[:2], inputs, strict=True))
    assert any(re.search(words, text) for text in right), right
    assert not any(re.search(words, text) for text in near), near


def test_no_residual_is_missing_where_a_layer_adds_to_the_stream():
    inspection = inspect_steps(beside)
    assert [stream.remarks for stream in inspection.streams] == [()] * 3
