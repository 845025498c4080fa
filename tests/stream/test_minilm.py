"""Tests of `inspect`, `decompose` and `record` on MiniLM: six trained post-LN layers, real sentences."""

from __future__ import annotations

import pytest
import torch

import addnorm
from addnorm.stream.models.load import LoadedModel, load


@pytest.fixture(scope="module")
def minilm() -> LoadedModel:
    return load("minilm", batch=3, tokens=24)


@pytest.fixture(scope="module")
def inspection(minilm: LoadedModel) -> addnorm.stream.find.inspection.Inspection:
    return addnorm.inspect(minilm.model, *minilm.args, **minilm.kwargs)


def test_inspect_finds_post_ln_and_the_embedding_norm(inspection) -> None:
    (stream,) = inspection.streams
    assert inspection.wiring == "post_ln"
    assert (stream.width, stream.num_layers, stream.norm, stream.eps) == (384, 6, "layer", 1e-12)
    assert stream.embedding_norm is not None
    assert stream.embedding_norm.path == "embeddings.LayerNorm"
    assert stream.final_norm is None
    assert [site.kind for site in stream.sites] == ["attention", "feed-forward"] * 6
    assert {str(site.row) for site in stream.sites} == {"x' = N(x + f(x))"}
    assert not inspection.unknown
    assert inspection.closes
    assert 0 < max(site.closure for site in inspection.sites) <= inspection.closure <= 1e-5


def test_inspect_closes_in_float64(minilm: LoadedModel) -> None:
    assert addnorm.inspect(minilm.model, *minilm.args, float64=True, **minilm.kwargs).closure <= 1e-10


def test_decompose_closes(minilm: LoadedModel) -> None:
    parts = addnorm.decompose(minilm.model, *minilm.args, **minilm.kwargs)
    assert parts.closure <= 1e-5
    total = torch.stack([*parts.components().values()]).sum(0)
    with torch.no_grad():
        end = minilm.model(*minilm.args, **minilm.kwargs).last_hidden_state.double()
    assert float((total - end).norm() / end.norm()) <= 1e-5
    _, shares = parts.memory_map()
    assert all(sum(row) == pytest.approx(1.0) for row in shares)


def test_record_ignores_padding(minilm: LoadedModel) -> None:
    """Check that a padded batch gives the same record as each sentence alone."""
    mask = minilm.kwargs["attention_mask"]
    with torch.no_grad(), addnorm.record(minilm.model, tokens="attention_mask") as rec:
        minilm.model(**minilm.kwargs)
        for k, length in enumerate(mask.sum(1).tolist()):
            minilm.model(**{name: t[k : k + 1, :length] for name, t in minilm.kwargs.items()})
    lengths = mask.sum(1)
    for role, name in (("write", "ratio"), ("write", "cosine"), ("out", "l2")):
        together = [v for _, v in rec.series(role, name, step=0)]
        each = torch.tensor([[v for _, v in rec.series(role, name, step=k + 1)] for k in range(len(mask))])
        assert together == pytest.approx(((each * lengths[:, None]).sum(0) / lengths.sum()).tolist(), rel=1e-3)
