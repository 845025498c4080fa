"""Tests of results: what `print` shows of them, the tables that README and docs promise, and `copy.deepcopy` and `pickle`."""

import copy
import pickle
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


# `copy.deepcopy` and `pickle`.

RESULTS = {
    "inspection": addnorm.inspect,
    "site": lambda model, x: addnorm.inspect(model, x).sites[0],
    "verification": lambda model, x: addnorm.verify(model, x, wiring="pre_ln"),
    "reference": lambda model, x: addnorm.verify(model, x, like=model),
    "decomposition": addnorm.decompose,
    "ablations": lambda model, x: addnorm.ablate_each(addnorm.inspect(model, x), x),
    "program": lambda model, x: addnorm.inspect(addnorm.nn.Encoder(1, 16, nhead=2, wiring="mhc").eval(), x),
}


@pytest.mark.parametrize("name", RESULTS)
def test_result_with_a_run_is_not_copied(model, name):
    result = RESULTS[name](model, X)
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"the run of a model cannot be copied or pickled: keep its to_dict\(\)"):
            make(result)


def test_recording_is_pickled(model):
    recording = record(model, X)
    again = pickle.loads(pickle.dumps(recording))
    assert str(again) == str(recording)
    assert again.to_dict() == recording.to_dict()
