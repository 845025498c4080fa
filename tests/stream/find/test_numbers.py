"""`inspect` on numbers that are made to break it: zeros, NaN, overflow. Where nothing is proven nothing closes."""

import math

import pytest
import torch
from torch import nn

from addnorm import inspect
from support.families import shake
from support.tiny_models import IDS, judge_tiny, tiny
from support.traps_parts import D, Tiny, pre


class Scaled(Tiny):
    def __init__(self, factor, **options):
        super().__init__(pre, final_norm=True, **options)
        self.factor = factor

    def embedded(self, ids):
        return super().embedded(ids) * self.factor


def test_constant_tokens():
    judge_tiny(inspect(tiny(), torch.zeros_like(IDS)))


def test_values_of_ten_thousand_in_float16():
    judge_tiny(inspect(shake(Scaled(1e4)).half(), IDS), limit=0.01)


def test_a_nan_in_one_feature_leaves_the_rest_proven():
    factor = torch.ones(2, 7, D)
    factor[0, 0, 0] = math.nan
    judge_tiny(inspect(shake(Scaled(factor)), IDS))


@pytest.mark.parametrize(("model", "ids", "why"), [
    (lambda: Scaled(math.nan), IDS, "no number of the stream is finite"),
    (lambda: Scaled(1.0), IDS[:0], "hold no token"),
    (lambda: Scaled(1e30), IDS, "no number of the stream is finite"),
], ids=["nan", "no batch", "overflow"])  # fmt: skip
def test_where_nothing_is_proven_nothing_closes(model, ids, why):
    found = inspect(shake(model()), ids)
    assert not found.closes
    assert why in found.unknown[0].reason


def test_sublayers_that_return_zeros():
    model = tiny()
    for part in model.parts:
        last = getattr(part.f, "out", None) or part.f.down
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
    judge_tiny(inspect(model, IDS))


@pytest.mark.parametrize(("step", "gamma", "wiring"), [
    (lambda s, x: x + s.scale * s.f(x), 0.0, "skipinit"),
    (lambda s, x: x + s.gamma * s.f(s.norm(x)), 1e-6, "layer_scale"),
    (lambda s, x: x + s.gamma * s.f(s.norm(x)), math.nan, "layer_scale"),
])  # fmt: skip
def test_factors_at_their_start(step, gamma, wiring):
    model = tiny(step, final_norm=wiring == "layer_scale")
    for part in model.parts:
        nn.init.constant_(part.scale, gamma)
        nn.init.constant_(part.gamma, gamma)
    assert inspect(model, IDS).wiring == wiring


def test_what_is_multiplied_by_zero_is_told():
    found = inspect(tiny(lambda s, x: x + 0.0 * s.f(s.norm(x))), IDS)
    assert found.wiring == "unknown"
    assert "multiplied by 0" in found.unknown[0].reason
