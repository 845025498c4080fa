"""Tests of `decompose` and `record` on MiniLM: six trained post-LN layers, real sentences."""

import pytest
import torch

import addnorm
from addnorm.stream.models.load import load


@pytest.fixture(scope="module")
def minilm():
    return load("minilm", batch=3, tokens=24)


def test_decompose_closes(minilm):
    parts = addnorm.decompose(minilm.model, *minilm.args, **minilm.kwargs)
    assert parts.closure <= 1e-5
    total = torch.stack([*parts.components().values()]).sum(0)
    with torch.no_grad():
        end = minilm.model(*minilm.args, **minilm.kwargs).last_hidden_state.double()
    assert float((total - end).norm() / end.norm()) <= 1e-5
    _, shares = parts.memory_map()
    assert all(sum(row) == pytest.approx(1.0) for row in shares)


def test_record_ignores_padding(minilm):
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
