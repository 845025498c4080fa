"""Tests of a recording's gradients, which belong to the step of their forward."""

import pytest
import torch
from torch import nn

import addnorm
from support.instrumented_model import Block, D, Model, backward, column, compute_loss, parameter_gradients


def norms(rec, step):
    return column(rec, "params", "grad_l2", step)


def test_two_backwards_after_two_forwards(ids):
    model = Model()
    with addnorm.record(model) as rec:
        loss, ten = compute_loss(model(ids)), compute_loss(model(ids)) * 10
        loss.backward()
        ten.backward()
    assert norms(rec, 1) == pytest.approx([10 * value for value in norms(rec, 0)], rel=1e-4)


def test_evaluation_before_the_backward(ids):
    model = Model()
    with addnorm.record(model) as rec:
        loss = compute_loss(model(ids))
        with torch.no_grad():
            model(ids)
        loss.backward()
    assert len(norms(rec, 0)) == 4
    assert rec.steps == (0,)


def test_input_with_gradient_in_two_forwards():
    model = Model()
    model.embed = nn.Identity()
    x = torch.randn(2, 5, D, requires_grad=True)
    with addnorm.record(model) as rec:
        backward(model, x)
        before = rec.series("grad", "l2", step=0)
        (compute_loss(model(x)) * 10).backward()
    assert rec.series("grad", "l2", step=0) == before


def test_unrecorded_backward_after_a_failed_one_changes_nothing(ids):
    model = Model()

    def fail(grad):
        raise RuntimeError("stop")

    with addnorm.record(model, every=2) as rec:
        handle = model.embed.weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="stop"):
            backward(model, ids)
        handle.remove()
        before = norms(rec, 0)
        (compute_loss(model(ids)) * 10).backward()
    assert norms(rec, 0) == before


def test_replaced_module_gets_hooks(ids):
    model = Model()
    with addnorm.record(model) as rec:
        backward(model, ids)
        model.blocks[0] = Block(False)
        model.zero_grad()
        backward(model, ids)
    assert norms(rec, 1) == pytest.approx(parameter_gradients(model), rel=1e-4)
    assert "note" not in rec.metadata
