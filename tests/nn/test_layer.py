"""Tests of layers and connections as modules: hooks, compilation, checkpoints, state dicts, wrappers, sharing, removal."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.testing import assert_close

from addnorm import ResidualStack, SublayerConnection
from addnorm.nn import ResidualLayer
from support.equality import assert_same
from support.refusals import assert_refused
from support.stacks import D, Masked, Mlp, stack_of

KINDS = pytest.mark.parametrize("kind", [ResidualLayer, SublayerConnection])


def run(stack, x, seed=5):
    """Return the output and all gradients of a training step with random numbers from a seed."""
    x = x.detach().clone().requires_grad_()
    stack.zero_grad()
    torch.manual_seed(seed)
    y = stack(x)
    y.sin().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in stack.parameters())]


@KINDS
def test_outputs_of_modules_with_hooks_are_no_views(kind, x):
    """FSDP2 warns of outputs that are views, as those of a projection are."""
    stack = stack_of(4)
    expected = run(stack, x)
    bases = []
    modules = [module for module in stack.modules() if isinstance(module, kind)]
    for module in modules:
        module.register_forward_hook(lambda module, args, out: bases.append(out.pending.branch._base))
    assert_same(run(stack, x), expected)
    assert bases == [None] * len(modules)


@KINDS
@pytest.mark.parametrize("name", ["pre_ln", "post_ln"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
def test_reentrant_checkpoints_of_layers_are_refused(kind, name):
    """They return plain tuples without gradients: the state of the stream is no tensor."""
    stack, x = stack_of(4, name), torch.randn(3, 4, D, requires_grad=True)
    expected = run(stack, x)
    outer = nn.Sequential(stack)
    reentrant = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
    apply_activation_checkpointing(outer, reentrant, check_fn=lambda module: module is stack)
    assert_same(run(outer, x), expected)
    apply_activation_checkpointing(stack, reentrant, check_fn=lambda module: isinstance(module, kind))
    with pytest.raises(
        TypeError, match=r"^x is tuple, expected .*: a reentrant checkpoint .* around the whole stack\.$"
    ):
        stack(x)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # read by Dynamo itself
@KINDS
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_each_module_compiles_by_itself(kind, training, x):
    stack = stack_of(4).train(training)
    with torch.set_grad_enabled(training):
        expected = stack(x)
        counter = CompileCounter()
        modules = [module for module in stack.modules() if isinstance(module, kind)]
        for module in modules:
            module.compile(backend=counter, fullgraph=True)
        assert stack(x).equal(expected)
    assert 1 <= counter.frame_count <= len(modules)


def test_state_dict_of_the_old_names_loads(x):
    stack, other = stack_of(5, "rezero"), stack_of(5, "rezero")
    for p in stack.parameters():
        nn.init.normal_(p)
    outer, old = nn.ModuleDict({"model": stack}), {}
    for name, value in outer.state_dict().items():
        parts = name.split(".")
        if parts[1] == "layers":
            number = 2 * int(parts[2]) + int(parts[4])
            parts = ["model", "connections", str(number), *parts[5:]]
        old[".".join(parts)] = value
    assert any(name.startswith("model.connections.4.") for name in old)
    nn.ModuleDict({"model": other}).load_state_dict(old)
    assert other(x).equal(stack(x))
    with pytest.raises(RuntimeError, match=r"connections\.9\.|layers\.4\.connections\.1\."):
        other.load_state_dict({**other.state_dict(), "connections.9.sublayer.up.weight": torch.ones(1)})


@pytest.mark.parametrize(
    ("wiring", "own", "norms"),
    [
        ("layer_scale", ("b",), ("norm_in",)),
        ("admin", ("a",), ("norm_out",)),
        ("sandwich", (), ("norm_in", "norm_branch")),
        ("resi_dual", (), ("norm_outs.0",)),
        ("siamese_norm", (), ("norm_streams.1", "norm_outs.0")),
        ("x0_residual", ("scale", "x0_scale"), ("norm_in",)),
        ("gated_mix", ("coefficients.gate",), ("norm_in", "norm_branch")),
    ],
)
def test_names_of_parameters(wiring, own, norms):
    """Checkpoints have these names."""
    names = [*stack_of(4, wiring).state_dict()]
    assert "layers.1.connections.1.sublayer.up.bias" in names
    first = {
        name.removeprefix("layers.0.connections.0.") for name in names if name.startswith("layers.0.connections.0.")
    }
    expected = {*own, *(f"{norm}.{parameter}" for norm in norms for parameter in ("weight", "bias"))}
    assert {name for name in first if not name.startswith("sublayer.")} == expected


@pytest.mark.parametrize("wiring", ["pre_ln", "deepnorm"])
def test_sublayer_takes_a_keyword_argument_named_state(wiring, x):
    def recur(read, state):
        return read * state

    expected = ResidualStack([lambda read: read * 2.0] * 2, D, wiring)(x)
    assert_same(ResidualStack([recur] * 2, D, wiring)(x, state=2.0), expected)


# Layers and connections that are wrapped, shared, replaced or removed


def wrap_checkpoints(stack, kind):
    apply_activation_checkpointing(stack, check_fn=lambda module: isinstance(module, kind))


def compile_layer(stack):
    stack.layers[0] = torch.compile(stack.layers[0], backend="eager")


def compile_connection(stack):
    stack.layers[0].connections[1] = torch.compile(stack.layers[0].connections[1], backend="eager")


WRAPPERS = {
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


def test_hooks_of_a_copy_are_independent(x):
    stack = stack_of(2)
    less = stack.without(0)
    less.register_forward_hook(lambda module, args, out: out * 0)
    assert not less(x).any()
    assert stack(x).any()


def test_without_accepts_keywords_of_removed_sublayer(x):
    stack = ResidualStack([Masked(), Mlp()], D)
    stack.without(0)(x, mask=None)


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@torch.no_grad()
def test_without_removes_writes_inside_wrappers(wrap, x):
    stack = stack_of(4)
    expected = copy.deepcopy(stack)
    silence(expected.layers[0].connections[1])
    before = stack(x)
    wrap(stack)
    assert len(stack.connections) == 4
    assert_close(stack.without(1)(x), expected(x))
    assert_close(stack(x), before)  # the stack keeps its write


def test_without_removes_one_use_of_a_shared_layer(x):
    stack = stack_of(6)
    stack.layers[2] = stack.layers[0]
    expected = copy.deepcopy(stack)
    expected.layers[2] = copy.deepcopy(expected.layers[0])
    silence(expected.layers[2].connections[1])
    assert_close(stack.without(5)(x), expected(x))


def test_without_counts_connections_of_unequal_layers(x):
    stack = stack_of(6)
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


def test_layer_replaced_by_identity(x):
    stack = stack_of(4)
    expected = copy.deepcopy(stack)
    expected.layers = nn.ModuleList([expected.layers[1]])
    stack.layers[0] = nn.Identity()
    assert torch.equal(stack.double().float()(x), expected(x))
    assert stack.connections == [*stack.layers[1].connections]


def test_layer_that_returns_no_state_is_refused(x):
    stack = stack_of(4)
    handle = stack.layers[1].register_forward_hook(lambda module, args, state: state.x)
    assert_refused("TypeError: layers[1] (ResidualLayer) returned Tensor, expected a StreamState", lambda: stack(x))
    handle.remove()
    stack(x)


@pytest.mark.parametrize("wiring", ["pre_ln", "post_ln", "parallel", "b2t", "layer_scale"])
def test_layer_alone_returns_a_tensor(wiring, x):
    """The stream of a stack of one layer without a final norm."""
    stack = stack_of(2, wiring, final_norm=False, residual_dtype=torch.float64)
    assert torch.equal(stack.layers[0](x), stack(x))


def test_layer_alone_refuses_bad_arguments(x):
    layer, other = stack_of(2).layers[0], stack_of(2, "resi_dual").layers[0]
    assert_refused("TypeError: x is int, expected a tensor of shape", lambda: layer(3))
    assert_refused("TypeError: no sublayer takes the keyword argument 'mask'", lambda: layer(x, mask=None))
    assert_refused("the layer has 2 streams, expected a StreamState", lambda: other(x))
