"""Tests of `measure_streams` against the recorded coefficients of a model written by hand."""

import json

import pytest
import torch

import addnorm
from support.expansion import record_mhc
from support.stacks import encoder


def test_statistics_equal_formulas_of_recorded_run():
    run = record_mhc("flat", dtype=torch.float64)
    rows = addnorm.stream.measure_streams(addnorm.inspect(run.model, run.x).program)
    for k, (row, site) in enumerate(zip(rows, run.sites, strict=True)):
        write = site.b[..., None] * site.w[..., None, :]
        after = run.states[k + 1]
        p = site.c / site.c.sum(-1, keepdim=True)
        assert row.rms == pytest.approx(run.states[k].square().mean((0, 1, 3)).sqrt().tolist())
        assert row.write_share == pytest.approx(
            ((write * after).sum(-1) / after.square().sum(-1)).mean((0, 1)).tolist()
        )
        assert row.forward == pytest.approx(float((site.a.sum(-1) - 1).abs().max()), abs=1e-12)
        assert row.backward == pytest.approx(float((site.a.sum(-2) - 1).abs().max()), abs=1e-12)
        assert row.concentration == pytest.approx(float(p.square().sum(-1).mean()))
        assert row.spread_C == pytest.approx(float(site.c.flatten(0, 1).std(0, correction=0).mean()))
        assert row.spread_B == pytest.approx(float(site.b.flatten(0, 1).std(0, correction=0).mean()))
    assert (
        max(row.forward for row in rows) < 1e-5 < max(row.backward for row in rows)
    )  # the iterations end with the rows
    (first, *_), text = json.loads(json.dumps(rows.to_dict())), str(rows)
    assert first["site"] == rows[0].site
    assert first["rms"] == [*rows[0].rms]
    assert text.lower().count("backward") == 2  # in the heading, and in the note
    assert "write" in text
    assert "share" in text


def test_statistics_leave_out_constant_matrices():
    model = encoder("attention_residuals")
    rows = addnorm.stream.measure_streams(addnorm.inspect(model, torch.randn(2, 5, 16)).program)
    assert all(row.forward is row.backward is row.spread_B is None for row in rows)
    assert rows[0].write_share == (0.0, 1.0)
    assert len(rows[-1].rms) == 4
    assert str(rows).lower().count("backward") == 1
    with pytest.raises(TypeError, match="program is NoneType"):
        addnorm.stream.measure_streams(None)
