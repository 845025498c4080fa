"""Tests of the fusion benchmark: times, memory and the share of Add & Norm."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import addnorm
from addnorm.fusion.benchmark import Timing, saved_bytes
from support.changed_models import Function
from support.random_models.graphs import Graph
from support.stream_steps import noise

X = noise(4, 8, seed=1)
BYTES = 4 * 8 * 4


# --- seconds --------------------------------------------------------------------------------------------------------------


def test_timing_knows_ratio_and_significance():
    timing = Timing(3.0, 1.5, 5, (2.5, 3.5), (1.0, 2.0))
    assert timing.ratio == 2
    assert timing.is_significant
    assert not Timing(3.0, 1.5, 5, (1.9, 3.5), (1.0, 2.0)).is_significant
    assert timing.to_dict() == {
        "before": 3.0, "after": 1.5, "ratio": 2.0, "rounds": 5, "before_quartiles": (2.5, 3.5), "after_quartiles": (1.0, 2.0),
        "is_significant": True,
    }  # fmt: skip


# --- bytes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda m, x: x * m.w, 0),  # an argument, and a parameter
        (lambda m, x: m.w * m.b, 0),  # a buffer
        (lambda m, x: m.w + x, 0),  # an add saves nothing
        (lambda m, x: (m.w + x).exp(), BYTES),  # the add's result
        (lambda m, x: (m.w + x).exp().exp(), 2 * BYTES),
        (lambda m, x: (y := m.w + x) * y, BYTES),  # the same tensor twice
        (lambda m, x: (y := m.w + x)[:2] * y[2:], BYTES),  # two views of one tensor
        (lambda m, x: (m.w + x).detach().exp(), 0),  # without a gradient
        (lambda m, x: (m.w + x)[:1].sin(), BYTES),  # a part keeps all of the storage
    ],
)
def test_saved_bytes_counts_each_storage_once(function, expected):
    model = Function(function, 8, b=torch.ones(8))
    assert saved_bytes(lambda: model(X), model, X) == expected


# --- the share ------------------------------------------------------------------------------------------------------------


def two_norms(m, x):
    """Run a norm that reads no sum, one that does, and three linear layers."""
    x = m.norm(m.f(x))
    return m.f(F.layer_norm(x + m.f(x), (8,)))


def make_model():
    return Graph(two_norms, f=nn.Linear(8, 8), norm=nn.LayerNorm(8)).requires_grad_(False)


def test_share_counts_adds_and_the_norms_that_read_them(monkeypatch):
    ticks = iter(range(10_000))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(ticks))  # each node takes one tick
    model = make_model()
    share = addnorm.fuse(model, X).share
    nodes = round(2 / share)  # beside inputs and the output: linear, norm, linear, add, norm, linear
    assert 2 / nodes == share
    assert nodes >= 6


def test_share_is_unknown_with_checkpoints():
    model = make_model()
    forward = model.forward
    model.forward = lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)
    fusion = addnorm.fuse(model, X)
    assert len(fusion.fused) == 1
    assert fusion.share is None
