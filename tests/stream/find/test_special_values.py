"""Tests of `inspect` on zeros, NaN and overflow. Without finite values nothing closes."""

import math
import re

import pytest
import torch
from torch import nn

from addnorm import inspect
from support.handwritten_models import IDS, D, tiny
from support.inspection_checks import check_tiny


def scaled(factor):
    """Return the tiny model with another scale of its embeddings."""
    model = tiny()
    for embedding in (model.embed, model.positions):
        embedding.weight.data.mul_(factor)
    return model


def test_inspect_constant_tokens():
    check_tiny(inspect(tiny(), torch.zeros_like(IDS)))


def test_inspect_large_values_in_float16():
    check_tiny(inspect(scaled(1e4).half(), IDS), closure=0.01)


def test_inspect_proves_rows_with_one_nan():
    model = tiny()
    model.embed.weight.data[IDS[0, 0], 0] = math.nan  # of the first sample
    inspection = inspect(model, IDS)
    check_tiny(inspection)
    (remark,) = inspection.streams[0].remarks
    odd, total = re.findall(r"[\d,]+", remark)[:2]
    assert "are NaN or infinite; the others prove its equations" in remark
    assert int(odd) in range(D, 2 * 7 * D)
    assert int(total) == 2 * 7 * D


@pytest.mark.parametrize(("model", "ids", "reason"), [
    (lambda: scaled(math.nan), IDS, "no number of the stream is finite"),
    (tiny, IDS[:0], "hold no token"),
    (lambda: scaled(1e30), IDS, "no number of the stream is finite"),
], ids=["nan", "no batch", "overflow"])  # fmt: skip
def test_inspect_proves_nothing_without_finite_values(model, ids, reason):
    inspection = inspect(model(), ids)
    assert not inspection.closes
    assert reason in inspection.unknown[0].reason


def test_inspect_sublayers_that_return_zeros():
    model = tiny()
    for part in model.parts:
        last = getattr(part.f, "out", None) or part.f.down
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
    check_tiny(inspect(model, IDS))


@pytest.mark.parametrize(("step", "gamma", "wiring"), [
    (lambda s, x: x + s.scale * s.f(x), 0.0, "skipinit"),
    (lambda s, x: x + s.gamma * s.branch(x), 1e-6, "layer_scale"),
    (lambda s, x: x + s.gamma * s.branch(x), math.nan, "unknown"),  # no equation closes
])  # fmt: skip
def test_inspect_learned_factors_before_training(step, gamma, wiring):
    model = tiny(step, final_norm=wiring != "skipinit")
    for part in model.parts:
        nn.init.constant_(part.scale, gamma)
        nn.init.constant_(part.gamma, gamma)
    assert inspect(model, IDS).wiring == wiring


def test_inspect_explains_zero_factor():
    inspection = inspect(tiny(lambda s, x: x + 0.0 * s.branch(x)), IDS)
    assert inspection.wiring == "unknown"
    assert "multiplied by 0" in inspection.unknown[0].reason
