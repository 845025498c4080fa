"""Tests of ResidualStack: dropout, stochastic depth, memory of checkpoints."""

import pytest
import torch

from addnorm import ResidualStack
from support.stacks import D, stack_of

# Dropout and stochastic depth


def test_dropout_applies_to_writes_in_training():
    stack = ResidualStack([torch.ones_like], 1000, dropout=0.25, final_norm=False)
    x = torch.zeros(50, 1000)
    y = stack(x)
    assert set(y.unique().tolist()) == {0.0, 1 / 0.75 * 1.0} or y.unique().numel() == 2
    assert abs(float((y == 0).double().mean()) - 0.25) < 5 * (0.25 * 0.75 / 50_000) ** 0.5
    assert torch.equal(stack.eval()(x), torch.ones(50, 1000))


def test_dropout_may_be_changed_later():
    stack, x = stack_of(2, final_norm=False), torch.randn(3, D)
    y = stack(x)
    for here in stack.connections:
        here.dropout = 1.0
    assert torch.equal(stack(x), x)
    assert torch.equal(stack.eval()(x), y)


def test_stochastic_depth_rises_linearly_and_keeps_the_mean():
    stack = ResidualStack([torch.ones_like] * 8, 2, stochastic_depth=0.4, final_norm=False)
    assert [here.stochastic_depth for here in stack.connections] == pytest.approx(
        [0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4]
    )
    samples = 20_000
    writes = stack.unroll(torch.zeros(samples, 3, 2)).writes
    for write, p in zip(writes, [0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4], strict=True):
        whole = write.flatten(1)
        assert torch.equal(whole, whole[:, :1].expand_as(whole))  # a sample keeps or loses its whole branch
        lost = float((whole[:, 0] == 0).double().mean())
        assert abs(lost - p) < 5 * (p * (1 - p) / samples) ** 0.5
        torch.testing.assert_close(whole[whole != 0], torch.full_like(whole[whole != 0], 1 / (1 - p)))
    assert torch.equal(stack.eval()(torch.zeros(3, 2)), torch.full((3, 2), 8.0))


def test_stochastic_depth_of_one_drops_the_last_layer():
    stack = stack_of(2, stochastic_depth=1.0, final_norm=False)
    x = torch.randn(3, D)
    assert torch.equal(stack(x), x)
    assert not torch.equal(stack.eval()(x), x)


# Checkpoints


def saved_tensors(stack, x):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        y = stack(x)
    del y
    return sum(saved)


def test_checkpointed_layer_saves_only_its_input():
    x = torch.randn(64, D)
    assert saved_tensors(stack_of(8, checkpoint=True), x) <= 4 * 2 * x.nbytes  # the stream and the read of four layers
    assert saved_tensors(stack_of(8), x) > 3 * 4 * 2 * x.nbytes
