"""Tests of `record` and `decompose` on NaN, on inputs of one or no token, and on more tokens than a sample holds."""

import math

import pytest
import torch
from torch import nn

import addnorm
from addnorm.stream.record import sample

D = 6


class Block(nn.Module):
    """Attention over the given dimension, and a feed-forward sublayer; post-LN, so that tokens differ in their shares."""

    def __init__(self, batch_first=True):
        super().__init__()
        self.batch_first = batch_first
        self.attention = nn.MultiheadAttention(D, 2, batch_first=batch_first)
        self.up, self.down = nn.Linear(D, 9), nn.Linear(9, D)
        self.n, self.m = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x, mask=None):
        x = self.n(x + self.attention(x, x, x, key_padding_mask=mask, need_weights=False)[0])
        return self.m(x + self.down(torch.tanh(self.up(x))))


class Pointwise(nn.Module):
    """Model whose tokens do not depend on each other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.n, self.f = nn.LayerNorm(D).double(), nn.ModuleList(nn.Linear(D, D).double() for _ in range(2))

    def forward(self, x):
        for f in self.f:
            x = x + torch.tanh(f(self.n(x)))
        return x


def make(*shape, batch_first=True):
    torch.manual_seed(0)
    model = Block(batch_first).double().eval()
    with torch.no_grad():
        for norm in (model.n, model.m):
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_(std=0.2)
    return model, torch.randn(*shape, D, dtype=torch.float64)


def record(model, *inputs, **options):
    with addnorm.record(model, grads=False, **options) as rec, torch.no_grad():
        model(*inputs)
    return rec


def similarities(rec):
    values = [value for _, value in rec.series("out", "similarity")]
    assert values
    return values


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_similarity_of_token_without_number_is_nan(value):
    model, x = make(3, 5)
    x[1, 2, 3] = value
    assert all(map(math.isnan, similarities(record(model, x))))


def test_similarity_ignores_nan_of_masked_token():
    _, x = make(3, 5)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1, 2] = mask[2, 4] = False
    x[~mask] = 0.0
    expected = similarities(record(Pointwise(), x, tokens=mask))
    x[~mask] = math.nan
    assert similarities(record(Pointwise(), x, tokens=mask)) == expected
    assert all(map(math.isfinite, expected))


def test_one_token_of_sequence_first_has_no_similarity():
    model, x = make(1, 4, batch_first=False)
    assert all(map(math.isnan, similarities(record(model, x))))


def test_empty_batch_has_no_components():
    model, x = make(0, 5)
    assert record(model, x).balances == {}
    with pytest.raises(ValueError, match="cannot be decomposed: the inputs hold no token"):
        addnorm.decompose(model, x)


def test_shares_of_many_tokens_equal_decomposition():
    model, x = make(5, 61)
    mask = torch.rand(5, 61) > 0.3
    rec = record(model, x, tokens=mask)
    sheet = rec.balances["stream"]
    assert sheet.tokens == sheet.total_tokens == int(mask.sum()) > 64
    sources, rows = addnorm.decompose(model, x).memory_map(mask)
    own, shares = rec.memory_maps["stream"]
    assert own == sources
    assert shares == [pytest.approx(row, rel=1e-9, abs=1e-12) for row in rows]


def test_sample_of_tokens_is_bounded(monkeypatch):
    model, x = make(40, 25)
    monkeypatch.setattr(sample, "BYTES", 100 * 5 * D * 8)  # two writes and three states of 100 tokens
    rec = record(model, x)
    sheet = rec.balances["stream"]
    assert (sheet.tokens, sheet.total_tokens) == (100, 1000)
    parts = addnorm.decompose(model, x)
    chosen = torch.zeros(1000, dtype=torch.bool)
    chosen[::10] = True
    sources, shares = rec.memory_maps["stream"]
    assert dict(zip(sources, shares[-1], strict=True)) == pytest.approx(
        parts.mean_shares(tokens=chosen.reshape(40, 25)), rel=1e-9
    )


def test_mean_shares_refuse_mask_of_other_tokens():
    model, x = make(3, 5)
    parts = addnorm.decompose(model, x)
    with pytest.raises(ValueError, match=r"tokens has shape \(3, 4\), expected \(3, 5\)"):
        parts.mean_shares(tokens=torch.ones(3, 4, dtype=torch.bool))


class Rounded(nn.Module):
    """Float32 model whose writes are rounded to bfloat16."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.n, self.f = nn.LayerNorm(D), nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x):
        self.writes = []
        for f in self.f:
            self.writes.append(f(self.n(x)).bfloat16())
            x = x + self.writes[-1]
        return x


def test_write_is_rounded_as_it_is_added():
    model, x = Rounded(), torch.randn(3, 5, D)
    rec = record(model, x)
    writes = [write.double() for write in model.writes]
    assert [value for _, value in rec.series("write", "l2")] == pytest.approx(
        [float(write.norm(dim=-1).mean()) for write in writes], rel=1e-6
    )
    assert [value for _, value in rec.series("raw", "l2")] != pytest.approx(
        [float(write.norm(dim=-1).mean()) for write in writes], rel=1e-6
    )


class Image(nn.Module):
    """Attention over the pixels of (batch, height, width, features)."""

    def __init__(self):
        super().__init__()
        self.block = make()[0]

    def forward(self, x):
        y = self.block.attention(*[self.block.n(x).flatten(1, 2)] * 3, need_weights=False)[0].view(x.shape)
        x = x + y
        return x + self.block.down(torch.tanh(self.block.up(self.block.m(x))))


def test_mask_of_image_holds_for_flat_values():
    torch.manual_seed(2)
    model, x = Image(), torch.randn(3, 2, 4, D, dtype=torch.float64)
    mask = torch.rand(3, 2, 4) > 0.3
    rec = record(model, x, tokens=mask)
    assert "omitted" not in rec.metadata
    flat = record(model, x, tokens=mask.flatten(1))
    assert rec.table() == flat.table()
