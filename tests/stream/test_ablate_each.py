"""Tests of `ablate_each`: loss and divergence of the model without each sublayer, without side effects."""

import io

import pytest
import torch
from rich.console import Console
from torch.nn import functional as F

import addnorm
from addnorm.stream.find.equation_errors import check_repeated
from addnorm.stream.outputs import find_loss
from support.scaled_model import D, Model, run_scaled
from support.several_streams import make_mhc
from support.stacks import torch_encoder
from support.stream_steps import X


@pytest.fixture
def inspected():
    model = Model().eval()
    return addnorm.inspect(model, X), model


def test_effects_equal_those_without_the_write(inspected):
    inspection, model = inspected
    each = addnorm.ablate_each(inspection, X, loss=lambda y: y.square().mean())
    assert [effect.loss for effect in addnorm.ablate_each(inspection, X)] == [None] * 4
    with torch.no_grad():
        whole = model(X)
        p = F.log_softmax(whole.double(), -1)
        for k, ablation in enumerate(each):
            y = run_scaled(model, k, 0.0)
            loss = float(y.square().mean())
            assert ablation.loss == pytest.approx(loss, rel=1e-5)
            assert ablation.loss_change == pytest.approx(loss - float(whole.square().mean()), abs=1e-6)
            kl = F.kl_div(F.log_softmax(y.double(), -1), p, log_target=True, reduction="none").sum(-1).mean()
            assert ablation.kl == pytest.approx(float(kl), rel=1e-5)


def test_runs_use_the_same_dropout():
    model = torch_encoder(dropout=0.5).train()
    inspection = addnorm.inspect(model, X)
    changes = []
    for _ in range(2):
        torch.manual_seed(5)
        (effect,) = addnorm.ablate_each(inspection, X, sites=inspection.sites[:1])
        changes.append(effect.output_change)
    assert changes[0] == changes[1]


def test_output_may_differ_by_round_off_when_called_again():
    y = X.bfloat16()
    check_repeated(y * (1 + 2.0**-7), y)  # as a sum in another order, rounded to 8 bits
    with pytest.raises(RuntimeError, match=r"returns another output when it is called again .*shape"):
        check_repeated(torch.cat([y, y]), y)


@pytest.mark.parametrize("first", [torch.tensor(3), torch.tensor(3.0), torch.ones(2)], ids=["count", "loss", "losses"])
def test_only_a_number_is_the_loss(first):
    number = first if first.is_floating_point() and not first.dim() else None
    assert find_loss((first, torch.ones(2, 3))) is number
    assert find_loss({"loss": first, "logits": torch.ones(2, 3)}) is number


FORMS = {
    "number": lambda loss, y: loss,
    "dict": lambda loss, y: {"loss": loss, "logits_": y},
    "tuple": lambda loss, y: (loss, y),
}


@pytest.mark.parametrize("form", FORMS)
def test_loss_of_the_output(form):
    class Lossy(Model):
        def forward(self, x):
            y = super().forward(x).masked_fill(torch.arange(D) == 3, -float("inf"))  # a class of probability 0
            return FORMS[form](y[..., :3].square().mean(), y)

    model = Lossy().eval()
    effects = addnorm.ablate_each(addnorm.inspect(model, X), X)
    assert len(effects) == 4
    for ablation in effects:
        with torch.no_grad():
            whole = find_loss(model(X))
            with addnorm.ablate(ablation.site):
                change = float(find_loss(model(X)) - whole)
        assert ablation.loss_change == pytest.approx(change, abs=1e-6) != 0.0
        assert 0.0 < ablation.output_change < float("inf")
        assert ablation.kl is None if form == "number" else 0.0 < ablation.kl < float("inf")


def test_refuses_a_model_in_place_of_its_inspection():
    with pytest.raises(TypeError, match=r"inspection is Model, expected the result of addnorm\.inspect"):
        addnorm.ablate_each(Model(), X)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (3, "loss is int, expected a function"),
        (lambda y: y, "loss returned a tensor of shape .*, expected a number"),
        (lambda y: None, "loss returned NoneType, expected a number"),
    ],
)
def test_refuses_a_loss_without_a_number(inspected, loss, says):
    inspection, _ = inspected
    with pytest.raises(TypeError, match=says):
        addnorm.ablate_each(inspection, X, loss=loss)


def test_progress_bar(inspected):
    inspection, _ = inspected
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    addnorm.ablate_each(inspection, X, progress=console)
    assert "ablate Model" in console.file.getvalue()


@pytest.mark.parametrize("shape", [(0, 5, D), (2, 0, D)])
def test_refuses_an_empty_batch(inspected, shape):
    with pytest.raises(ValueError, match="the model's output has no numbers, expected some"):
        addnorm.ablate_each(inspected[0], torch.randn(shape))


def test_ablate_each_has_an_effect_of_each_sublayer():
    inspection = addnorm.inspect(make_mhc(), X)
    effects = addnorm.ablate_each(inspection, X)
    assert [one.site.id for one in effects] == [site.id for site in inspection.program.sites]
    assert all(one.output_change > 0.01 for one in effects)
