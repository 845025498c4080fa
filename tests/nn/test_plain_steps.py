"""Tests of the loop without module calls: the bits of the connections' own calls, and these calls wherever one does more."""

import copy
import functools

import pytest
import torch
from torch.nn.utils import parametrize

from addnorm.nn import plain_steps
from addnorm.nn.connection import SublayerConnection
from addnorm.nn.layer import ResidualLayer
from addnorm.nn.state import StreamState
from support.equality import assert_same
from support.stacks import stack_of
from support.torch_transformers import randomize
from support.transformer_inputs import compute_gradients

MODULES = ("addnorm.nn.layer", "addnorm.nn.plain_steps")


def make_stack(wiring="pre_ln", **options):
    return randomize(stack_of(6, wiring, **options), size=0.3)


@pytest.fixture
def steps(monkeypatch):
    """Return a list of the numbers of connections that the loop ran, for each time that it was entered."""
    numbers, run_plain = [], plain_steps.run_plain

    def run(connections, state, context):
        result = run_plain(connections, state, context)
        numbers.append(result[1])
        return result

    for module in MODULES:
        monkeypatch.setattr(f"{module}.run_plain", run)
    return numbers


@pytest.fixture
def general(monkeypatch):
    """Return a function that computes a value with the calls of the layers and connections alone."""

    def compute(function):
        with monkeypatch.context() as patch:
            patch.setattr("addnorm.nn.layer.run_plain", lambda connections, state, context: (state, 0))
            patch.setattr("addnorm.nn.stack.run_layers", lambda layers, methods, state, context: (state, 0))
            return function()

    return compute


def test_plain_rows_run_in_the_loop(steps, x):
    make_stack()(x)
    make_stack("post_ln")(x)
    make_stack(norm="rms")(x)
    assert steps == [6] * 3
    steps.clear()
    make_stack(dropout=0.5)(x)
    make_stack("deepnorm")(x)
    assert steps == [0] * 8  # by each stack and its three layers
    stack = make_stack(dropout=0.5).eval()
    stack(x)
    assert steps[8:] == [6]


def double(module):
    """Give a module a class that computes it twice."""

    def forward(self, x, **context):
        return super(doubled, self).forward(super(doubled, self).forward(x, **context), **context)

    module.__class__ = doubled = type("Doubled", (type(module),), {"forward": forward})


def replace_options(connection, calls):
    options = connection.options
    connection.options = lambda x: calls.append(x) or {**options(x), "residual_scale": 2.0}


# test_unmodified.py has every other change: both files ask the same function.
CHANGES = {
    "hook": lambda module, calls: module.register_forward_hook(lambda *_: calls.append(None)),
    "subclass": lambda module, calls: calls.append(double(module)),
    "compiled": lambda module, calls: calls.append(module.compile(backend="eager")),
}
OF_CONNECTIONS = {
    "options": replace_options,
    "factor": lambda connection, calls: calls.append(setattr(connection, "b", 0.5)),
}


@pytest.mark.parametrize(
    ("place", "change"),
    [
        *(("layers", change) for change in CHANGES),
        *(("connections", change) for change in CHANGES | OF_CONNECTIONS),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # read by Dynamo
@pytest.mark.parametrize("wiring", ["pre_ln", "post_ln"])
def test_changed_module_is_called(place, change, wiring, steps, general, x):
    stack, calls = make_stack(wiring), []
    before = stack(x)
    index, ran = {"layers": (1, 2), "connections": (3, 3)}[place]
    (CHANGES | OF_CONNECTIONS)[change](getattr(stack, place)[index], calls)
    steps.clear()
    compute = functools.partial(compute_gradients, stack, [*stack.parameters()], [x])
    ours, theirs = compute(), general(compute)
    assert calls
    assert steps[0] == ran
    assert_same(ours, theirs)
    assert torch.equal(ours[0], before) == (change not in ("subclass", *OF_CONNECTIONS))


@pytest.mark.parametrize(
    ("wiring", "i", "later"),
    [
        ("pre_ln", 0, "layers.0.connections.1"),
        ("pre_ln", 0, "layers.0.connections.1.norm_in"),
        ("post_ln", 0, "layers.0.connections.0.norm_out"),
        ("pre_ln", 1, "layers.1"),  # without connections
        ("pre_ln", 1, "layers.2"),
    ],
)
def test_hook_that_a_sublayer_registers_acts_in_the_same_call(wiring, i, later, x):
    stack, calls = make_stack(wiring), []
    stack.layers.insert(1, ResidualLayer([]))

    def register(module, inputs):
        stack.get_submodule(later).register_forward_hook(lambda *_: calls.append("called"))

    stack.connections[i].sublayer.register_forward_pre_hook(register)
    stack(x)
    assert calls == ["called"]


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize(
    ("wiring", "later"), [("pre_ln", "connections.1.norm_in"), ("post_ln", "connections.0.norm_out")]
)
def test_parametrization_by_a_sublayer_acts_in_the_same_call(wiring, later, name, general, x):
    def compute():
        stack = copy.deepcopy(stack_before)
        norm = stack.layers[0].get_submodule(later)

        def change(module, inputs):
            parametrize.register_parametrization(norm, name, torch.nn.Tanh())

        stack.connections[0].sublayer.register_forward_pre_hook(change)
        return stack(x)

    stack_before = make_stack(wiring)
    ours = compute()
    assert_same(ours, general(compute))
    assert not torch.equal(ours, stack_before(x))


def test_sublayers_run_once_where_one_adds_another(x):
    stack, calls = make_stack(), []
    for connection in stack.connections:
        connection.sublayer.register_forward_pre_hook(lambda module, inputs: calls.append(module))
    expected = [connection.sublayer for connection in stack.connections]
    added = copy.deepcopy(stack.connections[0])

    def add(module, inputs):
        stack.layers[1].connections.append(added)

    expected[0].register_forward_pre_hook(add)
    stack(x)
    assert calls == expected


def test_eps_of_rms_norm_is_that_of_each_dtype(general, x):
    stack = make_stack("post_ln", norm="rms")
    for connection in stack.connections:
        del connection.sublayer
        connection.sublayer = lambda read: -read.double() * (1 - 1e-6)  # the sum is as small as the eps of float32
    assert_same(stack(x), general(lambda: stack(x)))


def test_error_of_a_branch_norm_does_not_blame_the_sublayer(general, x):
    stack = make_stack("sandwich")
    stack.connections[0].norm_branch = torch.nn.AdaptiveAvgPool1d(3)
    errors = []
    for compute in (lambda: stack(x), lambda: general(lambda: stack(x))):
        with pytest.raises(ValueError, match="branch has shape") as error:
            compute()
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_state_with_more_than_a_pending_sum_is_left_alone(steps, x):
    stack = make_stack()
    stack.unroll(x)
    assert steps == [0] * 4
    stack.layers[0](StreamState(x, collapse=(1.0,)))
    assert steps[4:] == [0]


def test_class_that_a_sublayer_patches_acts_in_the_same_call(monkeypatch, x):
    stack, calls, forward = make_stack(), [], SublayerConnection.forward

    def patch(module, inputs):
        monkeypatch.setattr(SublayerConnection, "forward", lambda self, x: calls.append(self) or forward(self, x))

    stack.connections[0].sublayer.register_forward_pre_hook(patch)
    stack(x)
    assert calls == stack.connections[1:]
