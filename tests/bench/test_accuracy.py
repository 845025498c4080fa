"""Tests of the benchmark of accuracy: facts that hold on every machine, and errors with every option."""

import itertools

import pytest
import torch

from addnorm import bench
from addnorm.bench import accuracy, facts

ITEM = {torch.float32: 4, torch.bfloat16: 2}


def test_facts_hold():
    found = facts.facts()
    assert [fact for fact in found if not fact["met"]] == []
    assert len(found) == 1 + 6 + 3 + 3 + 4 * 3


@pytest.mark.parametrize(("norm", "dtype"), [("layer", torch.bfloat16), ("rms", torch.float32)])
def test_saved_bytes_count_stream_statistics_seed_and_branch(norm, dtype):
    stream, statistics, seed = 7 * 32 * ITEM[dtype], 8 * 7, 8
    saved = {job: facts.saved_bytes(norm, dtype, job, 7, 32) for job in ("forward_stream", "dropout", "everything")}
    assert saved["forward_stream"]["addnorm"] == stream + statistics
    assert saved["dropout"]["addnorm"] == stream + statistics + seed
    assert saved["everything"]["addnorm"] == 2 * stream + statistics + seed
    # Eager also saves the noise, and for the gradient of the scale the branch after dropout.
    grows = [saved[job]["eager"] - saved["forward_stream"]["eager"] for job in ("dropout", "everything")]
    assert grows == [stream, 2 * stream]


def test_errors_with_all_options_are_round_off(monkeypatch):
    monkeypatch.setattr(accuracy, "SHAPE", (512, 256))
    found = accuracy.table()
    assert [(one["norm"], one["dtype"], one["variant"]) for one in found] == [
        *itertools.product(bench.NORMS, ("float32", "bfloat16", "float16", "float64"), ("addnorm", "eager"))
    ]
    for one in found:
        assert set(accuracy.COLUMNS) - one.keys() == ({"dbias"} if one["norm"] == "rms" else set())
    rows = facts.of_accuracy(found)
    assert len(rows) == 8
    assert all(row["met"] for row in rows), rows
    assert all(row["torch"] > 1 for row in rows if "float16" in row["name"])  # eager rounds more than once


@pytest.mark.parametrize("column", accuracy.COLUMNS)
def test_error_in_any_output_or_gradient_shows(column, monkeypatch):
    real = accuracy._ours

    class Wrong(torch.autograd.Function):
        """Identity with a gradient that is 1 % too large."""

        @staticmethod
        def forward(ctx, t):
            return t.clone()

        @staticmethod
        def backward(ctx, dt):
            return dt * 1.01

    def wrong(norm, args, seed):
        at = ["dresidual", "dbranch", *(f"d{name}" for name in accuracy.PARAMETERS)]
        args = [Wrong.apply(t) if at[k] == column else t for k, t in enumerate(args)]
        y, z = real(norm, args, seed)
        return (y * 1.01 if column == "y" else y), (z * 1.01 if column == "z" else z)

    monkeypatch.setattr(accuracy, "_ours", wrong)
    found = accuracy.errors("layer", torch.float32, 64, 32)["addnorm"]
    assert found[column] > 1e-3
    rows = [{"norm": "layer", "dtype": "float32", "variant": name, **found} for name in ("addnorm", "eager")]
    assert facts.of_accuracy(rows)[0]["met"] is False


@pytest.mark.parametrize("model", facts.MODELS)
def test_casting_gives_the_models_elements_and_another_does_not(model):
    right, other = facts.unlike(model)
    assert right < 1e-4
    assert other > 0.1
