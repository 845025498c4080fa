"""Tests of `inspect` on unusual graphs: it makes no false claims, and states a reason for unsupported parts."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from addnorm import inspect
from support.families import shake
from support.handwritten_models import D, make_input
from support.random_models.graphs import Graph
from support.stacks import encoder
from support.stream_steps import inspect_steps, repeat


def residual(*parts):
    """Return a residual connection x + f(x) around any modules."""
    return Graph(lambda m, x: x + m.f(x), f=nn.Sequential(*parts))


# Rows in unusual spellings.


def test_inspect_finds_width_of_one_feature():
    layers = (residual(nn.LayerNorm(1), nn.Linear(1, 4), nn.GELU(), nn.Linear(4, 1)) for _ in range(2))
    inspection = inspect(shake(nn.Sequential(*layers)), make_input(2, 5, 1))
    assert (inspection.wiring, inspection.streams[0].width) == ("pre_ln", 1)


def test_inspect_finds_many_layers():
    inspection = inspect(encoder(num_layers=40), make_input(1, 3, D))
    assert (inspection.wiring, len(inspection.sites), inspection.streams[0].num_layers) == ("pre_ln", 80, 40)


def turned(m, x):
    """Add in place through a view."""
    x = x.clone()
    view = x.transpose(1, 2)
    for k in range(4):
        view += m.branch(k, x).transpose(1, 2)
    return x


PRE_LN = {
    "in place through a view": turned,
    "from .data": repeat(lambda m, k, x: x.data + m.branch(k, x)),
    "vmap": repeat(lambda m, k, x: torch.vmap(lambda y: y + m.branch(k, y))(x)),
}


@pytest.mark.parametrize("name", PRE_LN)
def test_inspect_finds_pre_ln_in_unusual_model(name):
    inspection = inspect_steps(PRE_LN[name])
    assert (inspection.wiring, inspection.closes, inspection.unknown) == ("pre_ln", True, ())
    assert [site.kind for site in inspection.sites] == ["feed-forward"] * 4


# Models that no row expresses.


def dense(m, x):
    states = [x]
    for k in range(4):
        states.append(m.branch(k, torch.stack(states).sum(0)))
    return torch.stack(states).sum(0)


def projected(m, x, axis=-1):
    """Multiply the output of an einsum, whose memory has the features first, by a matrix; or mix tokens."""
    weight = torch.eye(x.shape[axis]).roll(1, 0) * 0.5 * m.norms[0].weight[0]
    for k in range(4):
        x = torch.einsum("bnd,hd->bnd", x, m.norms[k].weight[None].expand(4, -1) * 0.25) if axis == -1 else x
        x = (x @ weight if axis == -1 else (x.transpose(1, 2) @ weight).transpose(1, 2)) + m.branch(k, x)
    return x


WITHOUT_ROWS = {
    "matrix on the features": (projected, "a matrix over its last dimension"),
    "matrix on the tokens": (lambda m, x: projected(m, x, axis=1), "it mixes states, tokens or parts of the features"),
    "dense connections": (dense, "a sum of three or more values"),
    "relu after the add": (
        repeat(lambda m, k, x: F.relu(x + m.branch(k, x))),
        "begins with a function of the end of another stream",
    ),
    "relu after the add, no norms": (repeat(lambda m, k, x: F.relu(x + m.mlps[k](x))), "a single add"),
}


@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_inspect_explains_model_without_rows(name):
    run, reason = WITHOUT_ROWS[name]
    inspection = inspect_steps(run)
    assert inspection.wiring in ("none", "unknown") or name == "dense connections"
    assert any(reason in unknown.reason for unknown in inspection.unknown), inspection.unknown


def test_inspect_ignores_adds_in_activations():
    """Snake is x + sin(x)^2."""
    first, second = (Graph(lambda m, x: x + torch.sin(x).square()) for _ in range(2))
    layer = (residual(first, nn.Conv1d(8, 8, 3, padding=1)), second, nn.Conv1d(8, 8, 1))
    inspection = inspect(nn.Sequential(*layer, *copy.deepcopy(layer)), make_input(2, 8, 9))
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
    inspection = inspect_steps(run, make_input(5, D))
    assert {site.kind for site in inspection.sites} == {kind}
