"""Tests of `measure_streams` against a recording, whose numbers test_programs.py compares with their formulas."""

import json

import pytest
import torch

import addnorm
from addnorm.stream.program.statistics import MATRICES
from support.expansion import record_mhc
from support.instrumented_model import column, record
from support.stacks import encoder
from support.stream_steps import X


def test_statistics_are_those_of_a_recording():
    run = record_mhc("flat", dtype=torch.float64)
    rows = addnorm.stream.measure_streams(addnorm.inspect(run.model, run.x).program)
    rec = record(run.model, run.x)
    for name in MATRICES:
        assert [getattr(row, name) for row in rows] == pytest.approx(column(rec, "matrices", name), abs=1e-12)
    for k in range(4):
        assert [row.rms[k] for row in rows] == pytest.approx(column(rec, "in", f"rms_{k}"))
        assert [row.write_share[k] for row in rows] == pytest.approx(column(rec, "write", f"share_{k}"))
    # The iterations end with the rows.
    assert max(row.forward for row in rows) < 1e-5 < max(row.backward for row in rows)
    (first, *_), text = json.loads(json.dumps(rows.to_dict())), str(rows)
    assert first["site"] == rows[0].site
    assert first["rms"] == [*rows[0].rms]
    assert text.lower().count("backward") == 2  # in the heading, and in the note
    assert "write" in text
    assert "share" in text


def test_statistics_leave_out_constant_matrices():
    model = encoder("attention_residuals")
    rows = addnorm.stream.measure_streams(addnorm.inspect(model, X).program)
    assert all(row.forward is row.backward is row.spread_B is None for row in rows)
    assert rows[0].write_share == (0.0, 1.0)
    assert len(rows[-1].rms) == 4
    assert str(rows).lower().count("backward") == 1
    with pytest.raises(TypeError, match="program is NoneType"):
        addnorm.stream.measure_streams(None)
