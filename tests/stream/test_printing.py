"""Tests of what `print` shows of an inspection, a recording, ablations and a decomposition: the tables that README and docs promise."""

import re

import pytest
import torch

import addnorm
from support.families import noise
from support.instrumented_model import record, step
from support.stacks import torch_encoder

X = noise(3, 5, 16)
SITES = ["layers.0.self_attn", "layers.0", "layers.1.self_attn", "layers.1"]


@pytest.fixture(scope="module")
def model():
    return torch_encoder(dropout=0.0).train()


@pytest.fixture
def printed(capsys, monkeypatch):
    """Return a function that prints a value on a terminal of 100 columns and returns the lines."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(value):
        capsys.readouterr()
        print(value)
        return capsys.readouterr().out.splitlines()

    return run


def test_print_recording_shows_header_and_rows(model, printed):
    rec = step(model, X)
    lines = printed(rec)
    assert lines[0] == "Recording of TransformerEncoder: 4 sublayers, step 0, with gradients"
    assert lines[1:3] == ["model: TransformerEncoder", "inputs: argument 1 (3, 5, 16) float32"]
    assert re.fullmatch(r"date: \d{4}-\d\d-\d\d \d\d:\d\d UTC", lines[3])
    assert lines[4] == "loss: that of the caller"
    ratios = {site.id: value for site, value in rec.series("write", "ratio")}
    rows = {row[2]: row for row in map(str.split, lines) if len(row) == 9 and row[2] in SITES}
    assert [*rows] == SITES
    assert {site: float(row[4]) for site, row in rows.items()} == pytest.approx(ratios, rel=6e-3)


def test_print_recording_of_one_token_without_loss(model, printed):
    rec = record(model, X[:1, :1])
    text = " ".join(printed(rec))
    assert "loss: none, forward only" in text
    assert "nan" not in text
    assert text.endswith("-: no sequence has two tokens that are not zero.")
    rec.metadata["loss"] = "cross entropy"
    assert "loss: cross entropy" in printed(rec)


def test_print_ablations_shows_rows(model, printed):
    inspection = addnorm.inspect(model, X)
    ablations = addnorm.ablate_each(inspection, X, loss=lambda y: y.square().mean())
    head, *rows = map(str.split, printed(ablations))
    assert head == ["site", "sublayer", "loss", "change", "KL", "output", "change"]
    assert [row[0] for row in rows] == SITES
    assert [float(row[-1]) for row in rows] == pytest.approx([a.output_change for a in ablations], rel=1e-3)
    head, *rows = map(str.split, printed(addnorm.ablate_each(inspection, X)))
    assert head == ["site", "sublayer", "KL", "output", "change"]
    assert {len(row) for row in rows} == {4}


def test_print_decomposition_shows_shares(model, printed):
    parts = addnorm.decompose(model.eval(), X)
    title, head, *rows = printed(parts)
    assert title.startswith("Decomposition of stream: 6 sources, 4 adds, closure ")
    assert head.split() == ["source", "share"]
    assert dict(row.rsplit(maxsplit=1) for row in rows) == {
        source: f"{share:.2%}" for source, share in parts.mean_shares().items()
    }


def test_print_names_x_0_and_the_norm_of_the_embedding_once(model, printed):
    normed = torch.nn.Sequential(torch.nn.LayerNorm(16), model)
    rec = record(normed, X)
    inspection = addnorm.inspect(normed, X)
    assert "with a norm of the embedding" in inspection.streams[0].remarks
    lines = printed(inspection)
    assert "  embedding norm: LayerNorm 1e-5, 0" in lines
    assert "with a norm of the embedding" not in " ".join(lines)
    assert any(line.split()[:1] == ["x_0"] for line in printed(rec))
