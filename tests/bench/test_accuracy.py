"""Tests of the facts of the CPU benchmark: they hold on every machine, and an error in any output or gradient shows."""

import functools
import itertools

import pytest
import torch

from addnorm import bench
from addnorm.bench import accuracy, facts
from support.wrong_gradient import scale_gradient

ITEM = {torch.float32: 4, torch.bfloat16: 2}


def test_facts_hold_and_orders_of_rounding_differ(monkeypatch):
    monkeypatch.setattr(facts, "MODEL_SHAPE", (512, 768))
    monkeypatch.setattr(facts, "errors", functools.partial(facts.errors, rows=1024))
    rows = facts.facts()
    assert [row for row in rows if not row["met"]] == []
    assert len(rows) == 1 + 6 + 3 + 3 + 4 * 3
    unlike = [row["torch"] for row in rows if row["name"].startswith("share of elements unlike")]
    assert len(unlike) == len(facts.MODELS)
    assert min(unlike) > 0.1


def test_errors_with_all_options_are_round_off(monkeypatch):
    monkeypatch.setattr(accuracy, "SHAPE", (512, 256))
    table = accuracy.table()
    assert [(row["norm"], row["dtype"], row["variant"]) for row in table] == [
        *itertools.product(bench.NORMS, ("float32", "bfloat16", "float16", "float64"), ("addnorm", "eager"))
    ]
    for row in table:
        assert set(accuracy.COLUMNS) - row.keys() == ({"dbias"} if row["norm"] == "rms" else set())
    rows = facts.of_accuracy(table)
    assert len(rows) == 8
    assert all(row["met"] for row in rows), rows
    assert all(row["torch"] > 1 for row in rows if "float16" in row["name"])  # eager rounds more than once


@pytest.mark.parametrize("column", accuracy.COLUMNS)
def test_error_in_any_output_or_gradient_shows(monkeypatch, column):
    ours, arguments = accuracy._ours, ["dresidual", "dbranch", *(f"d{name}" for name in accuracy.PARAMETERS)]

    def wrong(norm, args, seed):
        args = [scale_gradient(t, 1.01) if name == column else t for name, t in zip(arguments, args, strict=True)]
        y, z = ours(norm, args, seed)
        return (y * 1.01 if column == "y" else y), (z * 1.01 if column == "z" else z)

    monkeypatch.setattr(accuracy, "_ours", wrong)
    errors = accuracy.errors("layer", torch.float32, 64, 32)["addnorm"]
    assert errors[column] > 1e-3
    rows = [{"norm": "layer", "dtype": "float32", "variant": name, **errors} for name in ("addnorm", "eager")]
    assert facts.of_accuracy(rows)[0]["met"] is False
