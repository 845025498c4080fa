"""Tests of the fusion benchmark: times, memory and the share of Add & Norm."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from addnorm.fusion.benchmark import Timing, compare_times, saved_bytes
from addnorm.stream.dataflow.snapshot import StateSnapshot
from support.changed_models import Function
from support.fused_model import fuse
from support.random_models.graphs import Graph
from support.stream_steps import noise

X = noise(4, 8, seed=1)
BYTES = 4 * 8 * 4


# --- seconds --------------------------------------------------------------------------------------------------------------


class Clock:
    """Clock that moves on by the given seconds in each call of `before` and of `after`; the last ones repeat."""

    def __init__(self, before, after):
        self.now, self.calls = 0.0, {"before": 0, "after": 0}
        self.seconds = {"before": before, "after": after}

    def call(self, name):
        seconds, k = self.seconds[name], self.calls[name]
        self.now += seconds[min(k, len(seconds) - 1)]
        self.calls[name] += 1


@pytest.fixture
def compare(monkeypatch):
    """Return a function that compares calls of these seconds."""

    def compare(before, after):
        clock = Clock(before, after)
        monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
        state = StateSnapshot(nn.Linear(1, 1))
        return compare_times(lambda: clock.call("before"), lambda: clock.call("after"), state), clock

    return compare


def test_times_are_compared_in_pairs(compare):
    """Every round is slower than the one before, and after fusing by 4% in each: the middle halves overlap."""
    before = [1.5, *(0.02 * 1.1**k for k in range(12))]
    timing, _ = compare(before, [1.04 * seconds for seconds in before])
    assert timing.rounds == 12
    assert timing.before_quartiles[1] > timing.after_quartiles[0]
    assert timing.ratio == pytest.approx(1 / 1.04)
    assert timing.is_significant
    assert timing.to_dict()["interval"] == pytest.approx((1 / 1.04, 1 / 1.04))


def test_times_of_a_disturbed_machine_prove_nothing(compare):
    after = [0.02 if k % 5 else 0.06 for k in range(30)]
    timing, _ = compare([0.02], after)
    assert timing.ratio == 1
    assert not timing.is_significant
    assert not Timing(1.0, 1.0, 9, (1.0, 1.0), (1.0, 1.0), 1.0, (0.98, 1.0)).is_significant
    assert Timing(1.0, 1.0, 9, (1.0, 1.0), (1.0, 1.0), 1.0, (0.98, 0.999)).is_significant


@pytest.mark.parametrize(
    ("seconds", "rounds", "total"),
    [
        (1e-3, 101, 0.31),
        (0.01, 33, 1.1),
        (0.1, 12, 4.0),
        (0.4, 8, 11.0),
        (0.7, 4, 11.0),
        (4.0, 1, 12.1),
        (30.0, 1, 90.1),
    ],
)
def test_comparison_is_bounded_in_time(compare, seconds, rounds, total):
    timing, clock = compare([seconds], [2 * seconds])
    assert abs(timing.rounds - rounds) <= 1
    assert clock.now <= total
    assert timing.is_significant == (rounds >= 6)


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
    assert saved_bytes(lambda: model(X), StateSnapshot(model, X)) == expected


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
    share = fuse(model, X).share
    nodes = round(2 / share)  # beside inputs and the output: linear, norm, linear, add, norm, linear
    assert 2 / nodes == share
    assert nodes >= 6


def test_share_is_unknown_with_checkpoints():
    model = make_model()
    forward = model.forward
    model.forward = lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)
    fusion = fuse(model, X)
    assert len(fusion.fused) == 1
    assert fusion.share is None
