"""A fused model trains as before."""

import copy

import pytest
import torch
from torch.nn import functional as F

from support.fusing import QUIET, D, Model, X, calls, fused

pytestmark = QUIET


@pytest.fixture(autouse=True)
def _fresh():
    yield
    torch._dynamo.reset()


def losses(model, dtype, x, target, fuse=False, steps=5):
    """Of a few steps with AdamW, dropout and all."""
    model = copy.deepcopy(model).to(dtype).train()
    x, target = (t.to(dtype) for t in (x, target))
    if fuse:
        assert fused(model, x).proof.mode == "training"
        assert calls(model, x) == 4
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return torch.tensor(found, dtype=torch.float64), {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_five_steps_of_training_have_the_same_losses_and_weights_either_way(dtype):
    model = Model(p=0.2)
    x, target = torch.randn(16, 5, D), torch.randn(16, 5, D)
    before, weights = losses(model, dtype, x, target)
    after, trained = losses(model, dtype, x, target, fuse=True)
    assert before[4] < 0.95 * before[0]  # it learns
    eps = torch.finfo(dtype).eps
    assert (before - after).abs().max() <= 8 * eps * before.max()
    step = 5 * 1e-2  # of AdamW, whose steps have the size of the learning rate however small a gradient is
    assert all((weights[name].double() - trained[name].double()).abs().mean() < 0.02 * step + eps for name in weights)


def test_gradients_accumulate_and_parameters_may_be_frozen():
    model = Model().train()
    model.layers[0].n.weight.requires_grad_(False)
    fused(model, X)
    for _ in range(2):
        model(X).sum().backward()
    assert model.layers[0].n.weight.grad is None
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_switching_between_training_and_evaluation_goes_on_being_fused():
    model = Model(p=0.5)
    fused(model.eval(), X)
    with torch.no_grad():
        assert model(X).equal(model(X))
        model.train()
        assert not model(X).equal(model(X))
        assert calls(model, X) == 4
