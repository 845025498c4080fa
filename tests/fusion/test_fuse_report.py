"""What `addnorm.fuse` tells: what was fused, what was not and why, what was proven and measured."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import addnorm
from support.fusing import QUIET, D, Model, X, fused

pytestmark = QUIET


@pytest.fixture(autouse=True)
def _fresh():
    yield
    torch._dynamo.reset()


def test_the_report_tells_what_was_fused_and_what_was_not():
    class Two(Model):
        def __init__(self):
            super().__init__(layers=1)
            self.places = nn.Parameter(torch.randn(5, D))
            self.first = nn.LayerNorm(D)

        def forward(self, x):
            return super().forward(self.first(x + self.places))

    done = fused(Two().eval(), X)
    assert [(one.add, one.norm, one.reason) for one in done.boundaries] == [
        ("", "first", "its add broadcasts"), ("layers.0", "layers.0.n", None), ("layers.0", "layers.0.m", None),
    ]  # fmt: skip
    assert (len(done.fused), len(done.unfused), done.num_graphs) == (2, 1, 1)
    found = done.to_dict()
    assert found["fused"] == 2
    assert found["proof"]["holds"]
    assert found["benchmark"] is None
    assert 0 < found["share"] < 1


def test_two_norms_in_one_module_are_told_apart():
    class Both(Model):
        def forward(self, x):
            z = x + self.layers[0].f(x)
            return F.layer_norm(z, (D,)) * torch.sigmoid(F.layer_norm(z, (D,), eps=1e-3))

    done = fused(Both().eval(), X)
    assert [(one.eps, one.is_fused) for one in done.boundaries] == [(1e-5, True), (1e-3, False)]
    assert done.unfused[0].reason.startswith("its sum is already fused with the norm in")


def test_what_is_measured_is_measured():
    done = addnorm.fuse(Model(p=0.1).train(), X, benchmark=True)
    took = done.benchmark
    assert took.inference.before > 0 < took.training.after
    assert min(took.saved_bytes) > X.nbytes
    assert done.to_dict()["benchmark"]["saved_bytes"]["before"] == took.saved_bytes[0]


def test_a_frozen_model_has_no_gradients_to_prove():
    model = Model().requires_grad_(False)
    done = addnorm.fuse(model, X, benchmark=True)
    assert done.proof.holds
    assert done.proof.gradients == ()
    assert done.benchmark.training is done.benchmark.saved_bytes is None


def test_graphs_that_break_between_add_and_norm_leave_it_and_say_so():
    class Broken(Model):
        def forward(self, x):
            x = x + self.layers[0].f(x)
            torch._dynamo.graph_break()
            return self.layers[1](self.layers[0].n(x))

    done = fused(Broken().eval(), X)
    assert done.num_graphs == 2
    assert [(one.norm, one.reason) for one in done.boundaries] == [
        ("layers.1.n", None), ("layers.1.m", None), ("layers.0.n", "a graph break separates its add and its norm"),
    ]  # fmt: skip


def test_one_graph_that_runs_for_every_layer_is_told_for_every_layer():
    class Looped(Model):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                torch._dynamo.graph_break()
            return x

    done = fused(Looped(layers=3).eval(), X)
    assert [(one.add, one.norm) for one in done.fused] == [
        (f"layers.{k}", f"layers.{k}.{norm}") for k in range(3) for norm in "nm"
    ]
    assert done.unfused == ()


def test_a_model_without_add_and_norm_is_left_as_it_is():
    model = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.LayerNorm(D))
    done = fused(model, X)
    assert done.boundaries == ()
    assert model._compiled_call_impl is None
    with pytest.raises(ValueError, match="which is not fused"):
        addnorm.unfuse(model)
