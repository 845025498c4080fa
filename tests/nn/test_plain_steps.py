"""Tests of the loop without module calls: the bits of the connections' own calls, and these calls wherever one does more."""

from types import MethodType

import pytest
import torch
from torch import nn

import addnorm
from addnorm.nn import plain_steps
from addnorm.nn.connection import SublayerConnection
from addnorm.nn.state import StreamState


def make_stack(wiring="pre_ln", n=6, **options):
    torch.manual_seed(2)
    sublayers = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(n)]
    stack = addnorm.ResidualStack(sublayers, 12, wiring, **options)
    for p in stack.parameters():
        nn.init.normal_(p, 0.3, 0.5)
    return stack


@pytest.fixture
def steps(monkeypatch):
    """Return a list of the numbers of connections that the loop ran in each layer."""
    numbers = []

    def run(connections, state, context):
        result = plain_steps.run_plain(connections, state, context)
        numbers.append(result[1])
        return result

    monkeypatch.setattr("addnorm.nn.layer.run_plain", run)
    return numbers


@pytest.fixture
def general(monkeypatch):
    """Return a function that computes a value with the calls of the connections alone."""

    def compute(function):
        with monkeypatch.context() as patch:
            patch.setattr("addnorm.nn.layer.run_plain", lambda connections, state, context: (state, 0))
            return function()

    return compute


def results(stack, x):
    """Return the output, the gradients, and the gradients of the gradients."""
    x = x.detach().requires_grad_()
    y = stack(x)
    inputs = [x, *stack.parameters()]
    first = torch.autograd.grad(y.sin().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs, allow_unused=True)
    return [y, *first, *second]


def assert_equal(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or torch.equal(mine, other)


@pytest.mark.parametrize("options", [{}, {"norm": "rms"}, {"elementwise_affine": False}, {"dropout": 0.3}, {"residual_dtype": torch.float64}],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize(
    "wiring", ["pre_ln", "post_ln", "peri_ln", "sandwich", "reordered", "layer_scale", "deepnorm", "parallel", "mix_ln"]
)
def test_every_row_has_the_bits_of_the_general_way(wiring, options, general):
    stack, x = make_stack(wiring, **options), torch.randn(4, 12)

    def compute():
        torch.manual_seed(9)
        return results(stack, x)

    assert_equal(compute(), general(compute))


def test_plain_rows_run_in_the_loop(steps):
    make_stack()(torch.randn(4, 12))
    make_stack("post_ln")(torch.randn(4, 12))
    assert steps == [2] * 6
    steps.clear()
    make_stack(dropout=0.5)(torch.randn(4, 12))
    make_stack("deepnorm")(torch.randn(4, 12))
    assert steps == [0] * 6
    stack = make_stack(dropout=0.5).eval()
    stack(torch.randn(4, 12))
    assert steps[6:] == [2] * 3


class Doubled(SublayerConnection):
    def forward(self, x, **context):
        return super().forward(super().forward(x, **context), **context)


def hooked(stack, calls):
    stack.connections[3].register_forward_hook(lambda module, inputs, output: calls.append(output))


def pre_hooked(stack, calls):
    stack.connections[3].register_forward_pre_hook(lambda module, inputs: calls.append(inputs))


def subclassed(stack, calls):
    stack.connections[3].__class__ = Doubled
    calls.append(None)


def patched(stack, calls):
    forward = SublayerConnection.forward

    def replacement(self, x, **context):
        calls.append(x)
        return forward(self, x, **context)

    stack.connections[3].forward = MethodType(replacement, stack.connections[3])


def with_options(stack, calls):
    options = stack.connections[3].options
    stack.connections[3].options = lambda x: calls.append(x) or {**options(x), "residual_scale": 2.0}


def with_factor(stack, calls):
    stack.connections[3].b = 0.5
    calls.append(None)


@pytest.mark.parametrize("change", [hooked, pre_hooked, subclassed, patched, with_options, with_factor])
@pytest.mark.parametrize("wiring", ["pre_ln", "post_ln"])
def test_changed_connection_is_called(change, wiring, steps, general):
    stack, x, calls = make_stack(wiring), torch.randn(4, 12), []
    before = stack(x)
    change(stack, calls)
    ours = results(stack, x)
    assert calls
    assert steps[-2:] in ([1, 2], [1, 0])
    assert_equal(ours, general(lambda: results(stack, x)))
    assert torch.equal(ours[0], before) == (change in (hooked, pre_hooked, patched))


def test_hook_that_a_sublayer_registers_acts_in_the_same_call():
    stack, calls = make_stack(), []

    def register(module, inputs):
        stack.connections[1].register_forward_hook(lambda *_: calls.append("called"))

    stack.connections[0].sublayer.register_forward_pre_hook(register)
    stack(torch.randn(4, 12))
    assert calls == ["called"]


def test_state_with_more_than_a_pending_sum_is_left_alone(steps):
    stack, x = make_stack(), torch.randn(4, 12)
    stack.unroll(x)
    assert steps == [0] * 3
    stack.layers[0](StreamState(x, collapse=(1.0,)))
    assert steps[3:] == [0]
