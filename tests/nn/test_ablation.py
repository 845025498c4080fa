"""Tests of stacks whose layers and connections are wrapped, shared, replaced or removed."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.testing import assert_close

from addnorm import ResidualStack, SublayerConnection
from addnorm.nn import ResidualLayer
from support.refusals import assert_refused
from support.stacks import D, Masked, Mlp, stack_of


def wrap_checkpoints(stack, kind):
    apply_activation_checkpointing(stack, check_fn=lambda module: isinstance(module, kind))


def compile_layer(stack):
    stack.layers[0] = torch.compile(stack.layers[0], backend="eager")


def compile_connection(stack):
    stack.layers[0].connections[1] = torch.compile(stack.layers[0].connections[1], backend="eager")


WRAPPERS = {
    "no wrapper": lambda stack: None,
    "checkpointed layers": partial(wrap_checkpoints, kind=ResidualLayer),
    "checkpointed connections": partial(wrap_checkpoints, kind=SublayerConnection),
    "compiled layer": compile_layer,
    "compiled connection": compile_connection,
    "layer in a container": lambda stack: stack.layers.__setitem__(0, nn.Sequential(stack.layers[0])),
}


def silence(connection):
    """Let a connection write zero, in place: the oracle of `without`."""
    del connection.sublayer
    connection.sublayer = torch.zeros_like


def test_hooks_of_a_copy_are_independent():
    stack = stack_of(2)
    less = stack.without(0)
    less.register_forward_hook(lambda module, args, out: out * 0)
    x = torch.randn(3, D)
    assert not less(x).any()
    assert stack(x).any()


def test_without_accepts_keywords_of_removed_sublayer():
    stack = ResidualStack([Masked(), Mlp()], D)
    stack.without(0)(torch.randn(3, D), mask=None)


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@torch.no_grad()
def test_without_removes_writes_inside_wrappers(wrap):
    stack, x = stack_of(4), torch.randn(3, D)
    expected = copy.deepcopy(stack)
    silence(expected.layers[0].connections[1])
    before = stack(x)
    wrap(stack)
    assert len(stack.connections) == 4
    assert_close(stack.without(1)(x), expected(x))
    assert_close(stack(x), before)  # the stack keeps its write


def test_without_removes_one_use_of_a_shared_layer():
    stack, x = stack_of(6), torch.randn(3, D)
    stack.layers[2] = stack.layers[0]
    expected = copy.deepcopy(stack)
    expected.layers[2] = copy.deepcopy(expected.layers[0])
    silence(expected.layers[2].connections[1])
    assert_close(stack.without(5)(x), expected(x))


def test_without_counts_connections_of_unequal_layers():
    stack, x = stack_of(6), torch.randn(3, D)
    del stack.layers[0].connections[0]
    expected = copy.deepcopy(stack)
    silence(expected.layers[1].connections[0])
    assert_close(stack.without(1)(x), expected(x))


@pytest.mark.parametrize(
    "change", [lambda stack: stack.double(), lambda s: s.load_state_dict(s.state_dict(), assign=True)]
)
def test_wrapped_connections_keep_shared_factors(change):
    stack = stack_of(4, "rezero")
    wrap_checkpoints(stack, SublayerConnection)
    names = list(stack.state_dict())
    change(stack)
    assert list(stack.state_dict()) == names
    assert all(stack.connections[i].b is stack.connections[i + 1].b for i in (0, 2))


def test_layer_replaced_by_identity():
    stack, x = stack_of(4), torch.randn(3, D)
    expected = copy.deepcopy(stack)
    expected.layers = nn.ModuleList([expected.layers[1]])
    stack.layers[0] = nn.Identity()
    assert torch.equal(stack.double().float()(x), expected(x))
    assert stack.connections == [*stack.layers[1].connections]


def test_layer_that_returns_no_state_is_refused():
    stack, x = stack_of(4), torch.randn(3, D)
    handle = stack.layers[1].register_forward_hook(lambda module, args, state: state.x)
    assert_refused("TypeError: layers[1] (ResidualLayer) returned Tensor, expected a StreamState", lambda: stack(x))
    handle.remove()
    stack(x)


@pytest.mark.parametrize("wiring", ["pre_ln", "post_ln", "parallel", "b2t", "layer_scale"])
def test_layer_alone_returns_a_tensor(wiring):
    """The stream of a stack of one layer without a final norm."""
    stack, x = stack_of(2, wiring, final_norm=False, residual_dtype=torch.float64), torch.randn(3, D)
    y = stack.layers[0](x)
    assert y.dtype == x.dtype
    assert torch.equal(y, stack(x))


def test_layer_alone_refuses_bad_arguments():
    layer, other, x = stack_of(2).layers[0], stack_of(2, "resi_dual").layers[0], torch.randn(3, D)
    assert_refused("TypeError: x is int, expected a tensor of shape", lambda: layer(3))
    assert_refused("TypeError: no sublayer takes the keyword argument 'mask'", lambda: layer(x, mask=None))
    assert_refused("the layer has 2 streams, expected a StreamState", lambda: other(x))
