"""Tests of `record` and `decompose` on NaN, on inputs of one or no token, and on more tokens than a sample holds."""

import math

import pytest
import torch
from torch import Tensor

import addnorm
from addnorm.stream.record import sample
from support.instrumented_model import D, Model, record
from support.random_models.chains import make_chain
from support.recordings import values
from support.stream_steps import make_steps


def pointwise(cast=lambda write: write):
    """Return a model whose tokens do not depend on each other; `cast` rounds its writes."""

    def run(m, x):
        m.writes = []
        for k in range(2):
            m.writes.append(cast(torch.tanh(m.branch(k, x))))
            x = x + m.writes[-1]
        return x

    return make_steps(run)


def make(*shape):
    """Return a post-LN model, in which tokens differ in their shares, and its input."""
    return Model(post=True).blocks[0].double(), torch.randn(*shape, D, dtype=torch.float64)


def similarities(rec):
    found = values(rec, "out", "similarity")
    assert found
    return found


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_similarity_of_token_without_number_is_nan(value):
    model, x = make(3, 5)
    x[1, 2, 3] = value
    assert all(map(math.isnan, similarities(record(model, x))))


def test_similarity_ignores_nan_of_masked_token():
    x, mask = torch.randn(3, 5, D), torch.ones(3, 5, dtype=torch.bool)
    mask[1, 2] = mask[2, 4] = False
    x[~mask] = 0.0
    expected = similarities(record(pointwise(), x, tokens=mask))
    x[~mask] = math.nan
    assert similarities(record(pointwise(), x, tokens=mask)) == expected
    assert all(map(math.isfinite, expected))


def test_one_token_of_sequence_first_has_no_similarity():
    case = make_chain(["sequence"])
    assert all(map(math.isnan, similarities(record(case.model, case.inputs[0][:, :1]))))


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
    parts = addnorm.decompose(model, x)
    sources, rows = parts.memory_map(mask)
    own, shares = rec.memory_maps["stream"]
    assert own == sources
    assert shares == [pytest.approx(row, rel=1e-9, abs=1e-12) for row in rows]
    with pytest.raises(ValueError, match=r"tokens has shape \(5, 60\), expected \(5, 61\)"):
        parts.mean_shares(tokens=mask[:, 1:])


def test_sample_of_tokens_is_bounded(monkeypatch):
    model, x = make(40, 25)
    monkeypatch.setattr(sample, "BYTES", 100 * 5 * D * 8)  # two writes and three states of 100 tokens
    rec = record(model, x)
    sheet = rec.balances["stream"]
    assert (sheet.tokens, sheet.total_tokens) == (100, 1000)
    chosen = torch.zeros(1000, dtype=torch.bool)
    chosen[::10] = True
    expected = addnorm.decompose(model, x).mean_shares(tokens=chosen.reshape(40, 25))
    sources, shares = rec.memory_maps["stream"]
    assert dict(zip(sources, shares[-1], strict=True)) == pytest.approx(expected, rel=1e-9)


def test_write_is_rounded_as_it_is_added():
    model = pointwise(Tensor.bfloat16)
    rec = record(model, torch.randn(3, 5, D))
    writes = [float(write.double().norm(dim=-1).mean()) for write in model.writes]
    assert values(rec, "write", "l2") == pytest.approx(writes, rel=1e-6)
    assert values(rec, "raw", "l2") != pytest.approx(writes, rel=1e-6)


def test_mask_of_image_holds_for_flat_values():
    case = make_chain(["image"])
    mask = torch.rand(3, 2, 3) > 0.3
    rec = record(case.model, *case.inputs, tokens=mask)
    assert "omitted" not in rec.metadata
    assert rec.table() == record(case.model, *case.inputs, tokens=mask.flatten(1)).table()


def test_gradients_whose_features_are_moved_are_omitted():
    def run(m, x):
        for k in range(3):
            x = x.flip(-1) + m.branch(k, x)
        return x

    model = make_steps(run)
    with addnorm.record(model) as rec:
        model(torch.randn(2, 5, D)).square().sum().backward()
    assert any("features" in reason for reason in rec.metadata["omitted"].values())
