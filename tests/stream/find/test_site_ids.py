"""Tests of site ids: unique over all streams, also where two streams share a block, and the same in record and ablate."""

from functools import partial

import pytest
import torch
from torch import nn

import addnorm
from support.instrumented_model import step
from support.random_models.graphs import Graph
from support.stream_steps import D, X, make_mlp, make_steps, noise, normalize, repeat

INPUTS = noise(2, 6, D), noise(2, 4, D, seed=1)


def attend(gate, c, x):
    """Return the outputs of one attention over the tokens of two streams."""
    both = gate(torch.cat((x, c), 1))
    return ((both @ both.mT).softmax(-1) @ both).split((6, 4), 1)


def two_streams(m, x, c, kept=(1, 1)):
    """Run two streams through the same blocks, as in MMDiT; `kept` are factors of the first writes."""
    for k in (0, 3):
        y, e = m.outer(partial(attend, m.gates[k], m.others[k](c)), m.norms[k](x))
        x, c = x + kept[0] * y, c + kept[1] * e
        x, c, kept = x + m.branch(k + 1, x), c + m.branch(k + 2, c), (1, 1)
    return x, c


@pytest.fixture
def model():
    return make_steps(two_streams)


def test_ids_are_unique_over_two_streams(model):
    inspection = addnorm.inspect(model, *INPUTS)
    ids = [site.id for site in inspection.sites]
    assert len(inspection.streams) == 2
    assert len({*ids}) == len(ids) == 8
    assert {name for name in ids if "outer" in name} == {
        f"{stream.name}/outer#{number}" for stream in inspection.streams for number in (1, 2)
    }
    assert {"mlps.4", "mlps.5"} < {*ids}  # no other stream has a sublayer there
    assert all(inspection.site(name) is site for name, site in zip(ids, inspection.sites, strict=True))


def test_path_of_several_sublayers_is_refused(model):
    with pytest.raises(KeyError, match=r"'outer', the path of 4 sublayers, expected an id: '.*/outer"):
        addnorm.inspect(model, *INPUTS).site("outer")


def test_ablation_by_id_of_one_stream(model):
    inspection = addnorm.inspect(model, *INPUTS)
    for stream, kept in zip(inspection.streams, ((0, 1), (1, 0)), strict=True):
        with addnorm.ablate(inspection.site(f"{stream.name}/outer#1")):
            outputs = model(*INPUTS)
        torch.testing.assert_close(outputs, two_streams(model, *INPUTS, kept))


def test_sublayer_called_final():
    """Record a module whose id is that of the final norm in other recordings."""
    model = make_steps(repeat(lambda m, k, x: x + (m.final if k else m.mlps[0])(x), count=2, end=normalize))
    model.final = make_mlp()
    rec = step(model, INPUTS[0])
    assert [site.id for site in rec.sites] == ["stream/x_0", "mlps.0", "final", "stream/final"]


def run_pair(m, x):
    x = x + m.f(m.norm(x))
    return x + m.g(x)


def run_hourglass(m, x):
    x = m.first(x)
    return m.last(x + m.middle(x))


def test_inspect_counts_modules_without_numbers_as_layers():
    first, last = (Graph(run_pair, norm=nn.LayerNorm(D), f=make_mlp(), g=make_mlp()) for _ in range(2))
    model = Graph(run_hourglass, first=first, middle=make_mlp(), last=last)
    inspection = addnorm.inspect(model, X)
    assert [site.layer for site in inspection.sites] == [0, 0, 1, 2, 2]
