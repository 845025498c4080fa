"""Tests of the result of `addnorm.fuse`: boundaries, reasons, proof and benchmark."""

import pytest
import torch
from torch import nn

import addnorm
from addnorm import fuse
from addnorm.fusion import benchmark
from addnorm.fusion import fuse as fuse_module
from addnorm.fusion.fuse import is_fused
from support.fused_model import QUIET, D, Model, X

pytestmark = QUIET


def test_fuse_reports_boundaries_and_reasons():
    class Two(Model):
        def __init__(self):
            super().__init__()
            self.places = nn.Parameter(torch.randn(5, D))
            self.first = nn.LayerNorm(D)

        def forward(self, x):
            return super().forward(self.first(x + self.places))

    fusion = fuse(Two().eval(), X)
    assert [(boundary.add, boundary.norm, boundary.reason) for boundary in fusion.boundaries] == [
        ("", "first", "its add broadcasts"), ("layers.0", "layers.0.n", None), ("layers.0", "layers.0.m", None),
    ]  # fmt: skip
    assert (len(fusion.fused), len(fusion.unfused), fusion.num_graphs) == (2, 1, 1)
    document = fusion.to_dict()
    assert document["fused"] == 2
    assert document["proof"]["holds"]
    assert document["benchmark"] is None
    assert 0 < document["share"] < 1


def test_fuse_benchmarks_on_request(monkeypatch):
    monkeypatch.setattr(benchmark, "SECONDS", 0.0)
    model, state = Model(p=0.1).train(), torch.get_rng_state()
    fusion = fuse(model, X, benchmark=True)
    assert torch.get_rng_state().equal(state)
    times = fusion.benchmark
    assert times.inference.before > 0 < times.training.after
    assert min(times.saved_bytes) > X.nbytes
    assert fusion.to_dict()["benchmark"]["saved_bytes"]["before"] == times.saved_bytes[0]


def timing(before, after):
    return benchmark.Timing(before, after, 9, (before * 0.99, before * 1.01), (after * 0.99, after * 1.01))


SLOWER, EQUAL, FASTER = timing(1.0, 1.25), timing(1.0, 1.0), timing(1.0, 0.8)


@pytest.mark.parametrize(
    ("inference", "training", "slower"),
    [
        (SLOWER, None, {"inference"}), (SLOWER, SLOWER, {"inference", "training step"}), (EQUAL, SLOWER, {"training step"}),
        (FASTER, SLOWER, set()), (SLOWER, FASTER, set()), (EQUAL, EQUAL, set()), (FASTER, None, set()),
    ],
)  # fmt: skip
def test_runs_that_fusing_slows_down(inference, training, slower):
    assert benchmark.Benchmark(inference, training).slower.keys() == slower


@pytest.mark.parametrize("keep_slower", [False, True])
def test_model_that_fusing_slows_down_is_left(keep_slower, monkeypatch):
    monkeypatch.setattr(fuse_module, "measure", lambda *_: benchmark.Benchmark(SLOWER, EQUAL))
    model = Model().eval()
    expected = model(X)
    assert not fuse(model, X, benchmark=True).is_applied  # it can be fused again
    fusion = fuse(model, X, benchmark=True, keep_slower=keep_slower)
    assert is_fused(model) == fusion.is_applied == fusion.to_dict()["changed"] == keep_slower
    assert len(fusion.fused) == 2
    assert ("0.80" in fusion.note and "keep_slower" in fusion.note) != keep_slower
    assert ("the model is unchanged" in str(fusion)) != keep_slower
    assert torch.equal(addnorm.unfuse(model)(X), expected)
    assert not is_fused(model)


def test_fuse_reports_graph_breaks():
    class Broken(Model):
        def forward(self, x):
            x = x + self.layers[0].f(x)
            torch._dynamo.graph_break()
            return self.layers[1](self.layers[0].n(x))

    fusion = fuse(Broken(layers=2).eval(), X)
    assert fusion.num_graphs == 2
    assert [(boundary.norm, boundary.reason) for boundary in fusion.boundaries] == [
        ("layers.1.n", None), ("layers.1.m", None), ("layers.0.n", "a graph break separates its add and its norm"),
    ]  # fmt: skip


def test_fuse_reports_each_layer_of_a_shared_graph():
    class Looped(Model):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                torch._dynamo.graph_break()
            return x

    fusion = fuse(Looped(layers=2).eval(), X)
    assert [(boundary.add, boundary.norm) for boundary in fusion.fused] == [
        (f"layers.{k}", f"layers.{k}.{norm}") for k in range(2) for norm in "nm"
    ]
    assert fusion.unfused == ()


def test_model_without_add_and_norm_is_unchanged():
    model = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.LayerNorm(D))
    fusion = fuse(model, X)
    assert fusion.boundaries == ()
    assert model._compiled_call_impl is None
    assert addnorm.unfuse(model) is model
    with pytest.raises(ValueError, match="which is not fused"):
        addnorm.unfuse(model)
