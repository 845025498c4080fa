"""Tests of faults of the rewrite, interrupts, refusals and freed memory; the model stays unchanged in each case."""

import gc

import pytest
import torch
from torch import fx, nn
from torch.func import functional_call

import addnorm
from addnorm.fusion import benchmark, fused_call
from addnorm.fusion.backend import CAPTURED_ANEW
from addnorm.fusion.proof import prove
from fusion.test_encoder import encoder
from support.changed_models import with_library_norms
from support.families import families
from support.fused_model import QUIET, D, Model, X, fuse
from support.random_models.graphs import Graph
from support.refusals import assert_refused, make_test

pytestmark = QUIET


# --- faults and refusals ---------------------------------------------------------------------------------------------------


def test_wrong_rewrite_fails_the_proof(monkeypatch):
    def wrong(*args, eps, **options):
        return addnorm.add_layer_norm(*args, eps=1.001 * eps + 1e-4, **options)

    monkeypatch.setitem(fused_call.OPERATIONS, "layer", wrong)
    monkeypatch.setattr(fused_call, "agree", lambda *_: True)  # otherwise it would not be fused
    model = Model().eval()
    with torch.no_grad():
        before = model(X)
    with pytest.raises(
        addnorm.VerificationError,
        match=r"is not fused: layers.0.n: .*, in float64 differs by .*, tolerance .* \(of its fused call by itself\)",
    ) as error:
        fuse(model, X)
    assert not error.value.fusion.proof.holds
    assert model._compiled_call_impl is None
    with torch.no_grad():
        assert model(X).equal(before)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no memory")], ids=["interrupt", "error"])
@pytest.mark.parametrize("place", ["prove", "measure"])
def test_error_in_proof_or_benchmark_restores_the_model(monkeypatch, place, error):
    model = encoder()

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(f"addnorm.fusion.fuse.{place}", fails)
    with pytest.raises(type(error)):
        addnorm.fuse(model, X)
    assert model._compiled_call_impl is None
    assert all("forward" not in vars(module) for module in model.modules())


def test_fuse_raises_the_error_of_the_model():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fuse(Model(), torch.randn(2, 5, D + 1))


@pytest.mark.filterwarnings("ignore:a call of Random changed the place of a range_iterator")
def test_verification_error_names_the_tolerance_without_float64():
    class Random(Model):
        def forward(self, x):
            return super().forward(x) + next(self.noise)  # differs in every run: an iterator is not restored

    model = Random().eval().double()
    model.noise = map(float, range(99))
    with pytest.raises(addnorm.VerificationError, match="a number of roundings"):
        fuse(model, X.double())


def test_scripted_model_is_not_captured():
    model = torch.jit.script(nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D)))
    fusion = fuse(model, X)
    assert (fusion.num_graphs, fusion.fused) == (0, ())
    assert "torch.compile captures no graph of it" in str(fusion)


REFUSED = {
    "model is int, expected a torch.nn.Module": lambda: fuse(3, X),
    "which is not initialized yet": lambda: fuse(nn.Sequential(nn.LazyLinear(D)), X),
    "on the meta device": lambda: fuse(nn.Linear(D, D, device="meta"), X),
    "is compiled already": lambda: fuse(torch.compile(Model()), X),
    "is not fused: fuse it with": lambda: addnorm.unfuse(Model()),
    "model is int, which is not fused": lambda: addnorm.unfuse(3),
}


test_fuse_refuses_bad_models = make_test(REFUSED)


def test_fuse_refuses_fused_and_compiled_models():
    model = Model().eval()
    fuse(model, X)
    assert_refused("ValueError: model is fused already", lambda: fuse(model, X))
    addnorm.unfuse(model)
    model.compile(backend="eager")
    assert_refused("ValueError: model is compiled already", lambda: fuse(model, X))


def test_fuse_refuses_graphs_that_no_other_call_uses():
    model, seen = Model().eval(), []
    model.register_forward_hook(
        lambda _, inputs, y: seen.append(y.detach())
    )  # a guard on its length fails at every call
    fusion = fuse(model, X)
    assert not fusion.fused
    assert {boundary.reason for boundary in fusion.unfused} == {CAPTURED_ANEW}
    assert model._compiled_call_impl is None


def test_proof_compares_no_gradients_of_nan():
    x = X.clone()
    x[0] = torch.nan
    fusion = fuse(Model().eval(), x)
    uncompared = [difference.name for difference in fusion.proof.gradients if not difference.is_compared]
    assert len(uncompared) > 1
    assert all(difference.is_compared for difference in fusion.proof.outputs)
    assert f"{len(uncompared)} more without a finite number are not compared" in " ".join(str(fusion).split())


# --- what remains ----------------------------------------------------------------------------------------------------------


class CachingModel(Model):
    """Model that writes into a cache."""

    def forward(self, x, cache):
        x = super().forward(x)
        cache["seen"] = x if cache["seen"] is None else torch.cat([cache["seen"], x], 1)
        return x


def test_benchmark_restores_a_cache(monkeypatch):
    monkeypatch.setattr(benchmark, "MAX_ROUNDS", 2)
    cache = {"seen": None}
    fusion = fuse(CachingModel().eval(), X, benchmark=True, cache=cache)
    assert fusion.benchmark is not None
    assert cache == {"seen": None}


def test_interrupted_benchmark_leaves_the_model(monkeypatch):
    model, cache, calls = CachingModel().eval(), {"seen": None}, []
    hook = model.register_forward_hook(lambda *_: None)

    def interrupt(call):
        calls.append(call())
        if len(calls) == 3:  # in the first round
            raise KeyboardInterrupt
        return 1e-3

    monkeypatch.setattr(benchmark, "_time", interrupt)
    state, is_collecting = torch.get_rng_state(), gc.isenabled()
    with pytest.raises(KeyboardInterrupt):
        addnorm.fuse(model, X, cache=cache)
    assert (len(calls), cache, gc.isenabled()) == (3, {"seen": None}, is_collecting)
    assert model._compiled_call_impl is None
    assert [*model._forward_hooks] == [hook.id]
    assert torch.get_rng_state().equal(state)
    assert_refused("which is not fused", lambda: addnorm.unfuse(model))  # as before


def test_unfuse_frees_all_graphs(frozen_heap):
    model = Model().eval()
    for _ in range(2):
        fuse(model, X)
        addnorm.unfuse(model)
    gc.collect()
    assert not [item for item in gc.get_objects() if issubclass(type(item), fx.GraphModule)]


# --- nothing to compare ----------------------------------------------------------------------------------------------------


class Silent(Model):
    def forward(self, x):
        super().forward(x)


@pytest.mark.parametrize(
    ("model", "x"),
    [(Model, X * torch.nan), (Model, X / 0), (Model, X[:0]), (Silent, X)],
    ids=["nan", "inf", "empty", "none"],
)
def test_fuse_refuses_outputs_without_numbers(model, x):
    model = model().eval()
    sentence = "no finite number for these inputs, so that nothing can be proven"
    assert_refused(sentence, lambda: fuse(model, x))
    assert model._compiled_call_impl is None


# --- models whose own gradients are lost -----------------------------------------------------------------------------------


def saturated():
    """Return a model with some features thirty times the others: its attention selects one token and has no gradient."""
    torch.manual_seed(16)
    model, args, kwargs = families()["roberta"].build()
    generator = torch.Generator().manual_seed(16)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
            if p.dim() == 1:
                p[p.numel() // 3] *= 30
    return model.eval(), args, kwargs


def test_proof_accepts_gradients_lost_in_eager_too():
    model, args, kwargs = saturated()
    proof = prove(model, model, with_library_norms(model), args, kwargs)
    assert proof.oracle == "float64"
    assert proof.holds


@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_proof_finds_faults_beside_lost_gradients(factor):
    model, args, kwargs = saturated()
    norm = "encoder.layer.0.output.LayerNorm.weight"

    def wrong(*args, **kwargs):
        weights = {name: p * factor if name == norm else p for name, p in model.named_parameters()}
        return functional_call(model, weights, args, kwargs)

    assert not prove(model, model, wrong, args, kwargs).holds


def test_fuse_keeps_second_derivatives_of_a_gradient_in_forward():
    """As in models of forces. Between two graphs the frontend would capture the backward, which has no second derivative then."""

    def forces(m, x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            energy = m.model(x).sin().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    fusion = fuse(Graph(forces, model=Model()), X)
    assert len(fusion.fused) == 2
    assert {gradient.name for gradient in fusion.proof.gradients} >= {
        "model.layers.0.f.bias",
        "model.layers.0.n.weight",
    }
