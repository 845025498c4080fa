"""What is not proven, interrupted or refused is left as it was."""

import pytest
import torch
from torch import nn

import addnorm
from addnorm.fusion import fused_call
from support.fusing import QUIET, D, Model, X, fused

pytestmark = QUIET


@pytest.fixture(autouse=True)
def _fresh():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("fault", ["eps", "swap", "weight"])
def test_a_wrong_rewrite_is_not_proven_and_changes_nothing(monkeypatch, fault):
    def wrong(x, f, weight=None, bias=None, eps=1e-5, **options):
        if fault == "eps":
            return addnorm.add_layer_norm(x, f, weight, bias, 1.001 * eps + 1e-4, **options)
        if fault == "swap":
            return addnorm.add_layer_norm(f, x, bias, weight, eps, **options)
        return addnorm.add_layer_norm(x, f, weight if weight is None else weight * 1.0001, bias, eps, **options)

    monkeypatch.setitem(fused_call.OPERATIONS, "layer", wrong)
    monkeypatch.setattr(fused_call, "_agree", lambda *_: True)  # else it would be left
    model = Model().eval()
    with torch.no_grad():
        before = model(X)
    with pytest.raises(
        addnorm.VerificationError, match=r"is not fused: .* differs by .*, tolerance .* \(twice the model's own error\)"
    ) as error:
        fused(model, X)
    assert not error.value.fusion.proof.holds
    assert model._compiled_call_impl is None
    with torch.no_grad():
        assert model(X).equal(before)


def test_a_rewrite_that_computes_something_else_is_left_boundary_by_boundary(monkeypatch):
    def wrong(x, f, weight=None, bias=None, eps=1e-5, **options):
        return addnorm.add_layer_norm(x, f, weight, bias, eps + 1e-4, **options)

    monkeypatch.setitem(fused_call.OPERATIONS, "layer", wrong)
    done = fused(Model().eval(), X)
    assert done.fused == ()
    assert {one.reason for one in done.unfused} == {"its norm does not compute the formula that was found"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("no memory")])
def test_an_interrupt_or_an_error_leaves_the_model_as_it_was(monkeypatch, error):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 32, batch_first=True), 2).eval()

    def fails(*_, **__):
        raise error

    monkeypatch.setattr("addnorm.fusion.fuse.prove", fails)
    with pytest.raises(error if isinstance(error, type) else RuntimeError):
        fused(model, X)
    assert model._compiled_call_impl is None
    assert all("forward" not in vars(module) for module in model.modules())


def test_what_the_model_raises_is_raised():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fused(Model(), torch.randn(2, 5, D + 1))


def test_a_proof_without_float64_says_what_it_was_judged_by():
    class Random(Model):
        def forward(self, x):
            return super().forward(x) + self.noise.pop()  # other numbers in every run

    model = Random().eval().double()
    model.noise = [float(k) for k in range(99)]
    with pytest.raises(addnorm.VerificationError, match="a number of roundings"):
        fused(model, X.double())


def test_a_scripted_model_is_not_captured_and_left():
    model = torch.jit.script(nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D)))
    done = fused(model, X)
    assert (done.num_graphs, done.fused) == (0, ())
    assert "torch.compile captures no graph of it" in str(done)


REFUSED = {
    "model is int, expected a torch.nn.Module": lambda: addnorm.fuse(3, X),
    "which is not initialized yet": lambda: addnorm.fuse(nn.Sequential(nn.LazyLinear(D)), X),
    "on the meta device": lambda: addnorm.fuse(nn.Linear(D, D, device="meta"), X),
    "is compiled already": lambda: addnorm.fuse(torch.compile(Model()), X),
    "is not fused: fuse it with": lambda: addnorm.unfuse(Model()),
    "model is int, which is not fused": lambda: addnorm.unfuse(3),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_fused_is_refused_in_a_sentence(sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        REFUSED[sentence]()


def test_a_model_that_is_fused_or_compiled_is_not_fused_again():
    model = Model().eval()
    fused(model, X)
    with pytest.raises(ValueError, match="model is fused already"):
        addnorm.fuse(model, X)
    addnorm.unfuse(model)
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="model is compiled already"):
        addnorm.fuse(model, X)
