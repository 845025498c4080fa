"""Tests of `inspect` on unusual graphs: it makes no false claims, and states a reason for unsupported parts."""

import copy

import pytest
import torch
from torch import nn

from addnorm import inspect
from support.families import shake
from support.random_models.graphs import Graph
from support.stacks import encoder
from support.stream_steps import D, inspect_steps, noise, repeat


def residual(*parts):
    """Return a residual connection x + f(x) around any modules."""
    return Graph(lambda m, x: x + m.f(x), f=nn.Sequential(*parts))


# Rows in unusual spellings.


def test_inspect_finds_width_of_one_feature():
    layers = (residual(nn.LayerNorm(1), nn.Linear(1, 4), nn.GELU(), nn.Linear(4, 1)) for _ in range(2))
    inspection = inspect(shake(nn.Sequential(*layers)), noise(2, 5, 1))
    assert (inspection.wiring, inspection.streams[0].width) == ("pre_ln", 1)


def test_inspect_finds_many_layers():
    inspection = inspect(encoder(num_layers=40), noise(1, 3, D))
    assert (inspection.wiring, len(inspection.sites), inspection.streams[0].num_layers) == ("pre_ln", 80, 40)


# Models without rows.


def test_inspect_ignores_adds_in_activations():
    """Snake is x + sin(x)^2."""
    first, second = (Graph(lambda m, x: x + torch.sin(x).square()) for _ in range(2))
    layer = (residual(first, nn.Conv1d(8, 8, 3, padding=1)), second, nn.Conv1d(8, 8, 1))
    inspection = inspect(nn.Sequential(*layer, *copy.deepcopy(layer)), noise(2, 8, 9))
    assert inspection.sites == ()
    assert {unknown.path: "twice" in unknown.reason for unknown in inspection.unknown} == {"0": False, "1": False}


ROWS = torch.tensor([3, 0, 4, 1, 2])


SENDS = {
    "index_add": lambda target, rows: torch.zeros(5, D).index_add(0, target, rows),
    "scatter_add": lambda target, rows: torch.zeros(5, D).scatter_add(0, target[:, None].expand(5, D), rows),
    "index_put": lambda target, rows: torch.zeros(5, D).index_put((target,), rows, accumulate=True),
}


@pytest.mark.parametrize(
    ("target", "kind"), [(ROWS.roll(1), "other"), (ROWS, "feed-forward")], ids=["edges", "experts"]
)
@pytest.mark.parametrize("send", SENDS.values(), ids=SENDS)
def test_inspect_tells_messages_from_experts(target, kind, send):
    run = repeat(lambda m, k, x: x + send(target, m.mlps[k](m.norms[k](x)[ROWS])))
    inspection = inspect_steps(run, noise(5, D))
    assert {site.kind for site in inspection.sites} == {kind}


def weigh(m, k, x, source):
    """Return the values that a product of activations, without a softmax, selects from a source of tokens."""
    weights = (m.gates[k](m.norms[k](x)) @ m.gates[5](source).mT).sigmoid()
    return weights @ m.mlps[k](source)


def mix_experts(m, k, x):
    """Return the sum of two experts' outputs with the weights of each token."""
    z = m.norms[k](x)
    weights = m.gates[k](z)[..., :2].softmax(-1)
    return torch.einsum("bte,bted->btd", weights, torch.stack([m.mlps[k](z), m.gates[4](z)], -2))


PRODUCTS = {
    "attention": lambda m, k, x, memory: x + weigh(m, k, x, m.norms[k](x)),
    "cross-attention": lambda m, k, x, memory: x + weigh(m, k, x, memory),
    "feed-forward": lambda m, k, x, memory: x + mix_experts(m, k, x),
}


@pytest.mark.parametrize("kind", PRODUCTS)
def test_inspect_tells_kinds_of_products_apart(kind):
    inspection = inspect_steps(repeat(PRODUCTS[kind]), noise(2, 5, D), noise(2, 7, D, seed=1))
    assert [site.kind for site in inspection.sites] == [kind] * 4
