"""Tests of the result of `addnorm.fuse`: boundaries, reasons, proof and benchmark."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import addnorm
from addnorm import fuse
from addnorm.fusion import benchmark
from support.fused_model import QUIET, D, Model, X

pytestmark = QUIET


def test_fuse_reports_boundaries_and_reasons():
    class Two(Model):
        def __init__(self):
            super().__init__(layers=1)
            self.places = nn.Parameter(torch.randn(5, D))
            self.first = nn.LayerNorm(D)

        def forward(self, x):
            return super().forward(self.first(x + self.places))

    done = fuse(Two().eval(), X)
    assert [(one.add, one.norm, one.reason) for one in done.boundaries] == [
        ("", "first", "its add broadcasts"), ("layers.0", "layers.0.n", None), ("layers.0", "layers.0.m", None),
    ]  # fmt: skip
    assert (len(done.fused), len(done.unfused), done.num_graphs) == (2, 1, 1)
    document = done.to_dict()
    assert document["fused"] == 2
    assert document["proof"]["holds"]
    assert document["benchmark"] is None
    assert 0 < document["share"] < 1


def test_fuse_reports_two_norms_of_one_sum():
    class Both(Model):
        def forward(self, x):
            z = x + self.layers[0].f(x)
            return F.layer_norm(z, (D,)) * torch.sigmoid(F.layer_norm(z, (D,), eps=1e-3))

    done = fuse(Both().eval(), X)
    assert [(one.eps, one.is_fused) for one in done.boundaries] == [(1e-5, True), (1e-3, False)]
    assert done.unfused[0].reason.startswith("its sum is already fused with the norm in")


def test_fuse_benchmarks_on_request(monkeypatch):
    monkeypatch.setattr(benchmark, "SECONDS", 0.0)
    done = fuse(Model(p=0.1).train(), X, benchmark=True)
    took = done.benchmark
    assert took.inference.before > 0 < took.training.after
    assert min(took.saved_bytes) > X.nbytes
    assert done.to_dict()["benchmark"]["saved_bytes"]["before"] == took.saved_bytes[0]


def test_frozen_model_has_no_gradients(monkeypatch):
    monkeypatch.setattr(benchmark, "SECONDS", 0.0)
    model = Model().requires_grad_(False)
    done = fuse(model, X, benchmark=True)
    assert done.proof.holds
    assert done.proof.gradients == ()
    assert done.benchmark.training is done.benchmark.saved_bytes is None


def test_fuse_reports_graph_breaks():
    class Broken(Model):
        def forward(self, x):
            x = x + self.layers[0].f(x)
            torch._dynamo.graph_break()
            return self.layers[1](self.layers[0].n(x))

    done = fuse(Broken().eval(), X)
    assert done.num_graphs == 2
    assert [(one.norm, one.reason) for one in done.boundaries] == [
        ("layers.1.n", None), ("layers.1.m", None), ("layers.0.n", "a graph break separates its add and its norm"),
    ]  # fmt: skip


def test_fuse_reports_each_layer_of_a_shared_graph():
    class Looped(Model):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                torch._dynamo.graph_break()
            return x

    done = fuse(Looped(layers=3).eval(), X)
    assert [(one.add, one.norm) for one in done.fused] == [
        (f"layers.{k}", f"layers.{k}.{norm}") for k in range(3) for norm in "nm"
    ]
    assert done.unfused == ()


def test_model_without_add_and_norm_is_unchanged():
    model = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.LayerNorm(D))
    done = fuse(model, X)
    assert done.boundaries == ()
    assert model._compiled_call_impl is None
    with pytest.raises(ValueError, match="which is not fused"):
        addnorm.unfuse(model)
