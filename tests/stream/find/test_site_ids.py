"""Tests of site ids: unique over all streams, also where two streams share a block, and the same in record and ablate."""

import pytest
import torch
from torch import nn

import addnorm

D = 8


def feed_forward():
    return nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))


class Joint(nn.Module):
    """Attention over the tokens of two streams together."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x, c):
        q, k, v = self.qkv(torch.cat([x, c], 1)).chunk(3, -1)
        y = self.out((q @ k.mT * 0.3).softmax(-1) @ v)
        return y[:, : x.shape[1]], y[:, x.shape[1] :]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = nn.ModuleList(nn.LayerNorm(D) for _ in range(4))
        self.attn, self.f, self.g = Joint(), feed_forward(), feed_forward()

    def forward(self, x, c):
        y, e = self.attn(self.n[0](x), self.n[1](c))
        x, c = x + y, c + e
        return x + self.f(self.n[2](x)), c + self.g(self.n[3](c))


class TwoStreams(nn.Module):
    """Two streams through the same blocks, as in MMDiT."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, c):
        for block in self.blocks:
            x, c = block(x, c)
        return x, c


@pytest.fixture
def inputs():
    return torch.randn(2, 6, D), torch.randn(2, 4, D)


def test_ids_are_unique_over_two_streams(inputs):
    inspection = addnorm.inspect(TwoStreams(), *inputs)
    ids = [site.id for site in inspection.sites]
    assert len(inspection.streams) == 2
    assert len({*ids}) == len(ids) == 8
    assert {site.id for site in inspection.sites if site.path == "blocks.0.attn"} == {
        f"{stream.name}/blocks.0.attn" for stream in inspection.streams
    }
    assert {"blocks.1.f", "blocks.1.g"} < {*ids}  # no other stream has a sublayer there
    assert all(inspection.site(name) is site for name, site in zip(ids, inspection.sites, strict=True))


def test_path_of_two_sublayers_is_refused(inputs):
    inspection = addnorm.inspect(TwoStreams(), *inputs)
    with pytest.raises(KeyError, match=r"'blocks\.0\.attn', the path of 2 sublayers, expected an id: '.*/blocks"):
        inspection.site("blocks.0.attn")


def test_ablation_by_id_of_one_stream(inputs):
    model = TwoStreams()
    inspection = addnorm.inspect(model, *inputs)
    x, c = inputs
    block, later = model.blocks
    y, e = block.attn(block.n[0](x), block.n[1](c))
    for stream, kept in zip(inspection.streams, ((x, c + e), (x + y, c)), strict=True):
        first, second = kept
        first, second = first + block.f(block.n[2](first)), second + block.g(block.n[3](second))
        with addnorm.ablate(inspection.site(f"{stream.name}/blocks.0.attn")):
            outputs = model(x, c)
        for output, expected in zip(outputs, later(first, second), strict=True):
            torch.testing.assert_close(output, expected)


def test_sublayer_called_final():
    """Record a module whose id is that of the final norm in other recordings."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.final, self.last = feed_forward(), feed_forward(), nn.LayerNorm(D)

        def forward(self, x):
            x = x + self.first(x)
            return self.last(x + self.final(x))

    model = Model()
    with addnorm.record(model) as rec:
        model(torch.randn(2, 3, D)).sum().backward()
    assert [site.id for site in rec.sites] == ["stream/x_0", "first", "final", "stream/final"]


class Hourglass(nn.Module):
    """Two layers without numbers, each with two sublayers, and one between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = Pair(), feed_forward(), Pair()

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.middle(x))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.f, self.g = nn.LayerNorm(D), feed_forward(), feed_forward()

    def forward(self, x):
        x = x + self.f(self.norm(x))
        return x + self.g(x)


def test_inspect_counts_modules_without_numbers_as_layers():
    inspection = addnorm.inspect(Hourglass(), torch.randn(2, 5, D))
    assert [site.layer for site in inspection.sites] == [0, 0, 1, 2, 2]
