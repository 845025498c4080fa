"""Tests of the result of `addnorm.fuse`: boundaries, reasons, proof and benchmark."""

import pytest
import torch
from torch import nn

import addnorm
from addnorm.fusion import benchmark
from addnorm.fusion import fuse as fuse_module
from addnorm.fusion.fuse import is_fused
from fusion.test_result import timing
from support.fused_model import QUIET, D, Model, X, fuse

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


def test_fuse_benchmarks_by_default(monkeypatch):
    monkeypatch.setattr(benchmark, "MAX_ROUNDS", 2)
    model, state = Model(p=0.1).train(), torch.get_rng_state()
    fusion = addnorm.fuse(model, X)
    assert torch.get_rng_state().equal(state)
    times = fusion.benchmark
    assert (times.inference.rounds, times.training.rounds) == (2, 2)
    assert times.inference.before > 0 < times.training.after
    assert min(times.saved_bytes) > X.nbytes
    assert fusion.to_dict()["benchmark"]["saved_bytes"]["before"] == times.saved_bytes[0]


SLOWER, EQUAL, FASTER = timing(0.8, 1.0), timing(1.0, 1.0), timing(1.25, 1.0)


@pytest.mark.parametrize(
    ("inference", "training", "is_slower"),
    [(SLOWER, None, True), (EQUAL, SLOWER, True), (SLOWER, FASTER, False), (EQUAL, EQUAL, False)],
)
def test_benchmark_knows_whether_fusing_slows_down(inference, training, is_slower):
    assert benchmark.Benchmark(inference, training).is_slower == is_slower


def test_model_that_fusing_slows_down_is_left(monkeypatch):
    monkeypatch.setattr(fuse_module, "measure", lambda *_: benchmark.Benchmark(SLOWER, EQUAL))
    model = Model().eval()
    expected = model(X)
    for _ in range(2):  # it can be fused again
        fusion = addnorm.fuse(model, X)
        assert (is_fused(model), fusion.is_applied, fusion.to_dict()["changed"]) == (False, False, False)
    assert len(fusion.fused) == 2
    assert (
        "slower here: inference 0.800 times as fast (0.784 to 0.816). benchmark=False (--no-benchmark)" in fusion.note
    )
    assert fusion.to_dict()["benchmark"]["inference"]["ratio"] == 0.8
    assert "the model is unchanged" in str(fusion)
    assert "training step" in str(fusion)
    assert addnorm.unfuse(model)(X).equal(expected)
    assert addnorm.fuse(model, X, benchmark=False).is_applied
    assert is_fused(model)


def test_model_that_one_run_gains_is_fused_with_a_note(monkeypatch):
    monkeypatch.setattr(fuse_module, "measure", lambda *_: benchmark.Benchmark(FASTER, SLOWER))
    model = Model().eval()
    fusion = addnorm.fuse(model, X)
    assert is_fused(model)
    assert fusion.to_dict()["changed"]
    sentence = "training step 0.800 times as fast (0.784 to 0.816) and inference 1.250 times as fast (1.225 to 1.275)."
    assert f"one run is slower and the other faster: {sentence}" in fusion.note == fusion.to_dict()["note"]
    assert sentence in " ".join(str(fusion).split())
    assert "the model is unchanged" not in str(fusion)


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
