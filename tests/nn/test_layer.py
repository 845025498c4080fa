"""Tests that layers and connections are modules like any other: hooks, compilation, checkpoints, exports, state dicts."""

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

from addnorm import SublayerConnection
from addnorm.nn import ResidualLayer
from addnorm.nn.state import StreamState
from support.equality import assert_same
from support.stacks import D, stack_of

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
def test_outputs_of_modules_with_hooks_are_no_views(kind):
    """FSDP2 warns of outputs that are views, as those of a projection are."""
    stack, x = stack_of(4), torch.randn(3, 4, D)
    expected = run(stack, x)
    bases = []
    modules = [module for module in stack.modules() if isinstance(module, kind)]
    for module in modules:
        module.register_forward_hook(lambda module, args, out: bases.append(out.pending.branch._base))
    assert_same(run(stack, x), expected)
    assert bases == [None] * len(modules)


def test_hook_may_change_the_stream():
    stack, x = stack_of(4), torch.randn(3, 4, D)
    stack.layers[0].register_forward_hook(lambda module, args, out: out._replace(x=torch.zeros_like(x), pending=None))
    state = StreamState(torch.zeros_like(x))
    assert stack(x).equal(stack._finish(stack.layers[1](state))[1])


def test_pre_hook_of_a_connection_sees_the_pending_write():
    stack, x = stack_of(2), torch.randn(3, D)
    seen = []
    stack.connections[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    stack(x)
    first = stack.connections[0]
    (state,) = seen
    assert_close(state.pending.branch, first.sublayer(first.norm_in(x)))
    assert state.x is x
    assert state.pending.options == {}


@KINDS
@pytest.mark.parametrize("name", ["pre_ln", "post_ln", "parallel", "layer_scale"])
def test_checkpoints_of_torch_keep_the_bits(kind, name):
    stack = stack_of(4, name, dropout=0.3, stochastic_depth=0.2)
    x = torch.randn(3, 4, D)
    expected = run(stack, x)
    apply_activation_checkpointing(stack, check_fn=lambda module: isinstance(module, kind))
    assert sum("CheckpointWrapper" in type(m).__name__ for m in stack.modules()) in (2, 4)
    assert_same(run(stack, x), expected)
    assert len(stack.connections) == 4


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
def test_each_module_compiles_by_itself(kind, training):
    torch._dynamo.reset()
    stack, x = stack_of(4).train(training), torch.randn(3, 4, D)
    with torch.set_grad_enabled(training):
        expected = stack(x)
        counter = CompileCounter()
        modules = [module for module in stack.modules() if isinstance(module, kind)]
        for module in modules:
            module.compile(backend=counter, fullgraph=True)
        assert stack(x).equal(expected)
    assert 1 <= counter.frame_count <= len(modules)
    torch._dynamo.reset()


def test_state_dict_of_the_old_names_loads():
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
    x = torch.randn(3, D)
    assert other(x).equal(stack(x))
    with pytest.raises(RuntimeError, match=r"connections\.9\.|layers\.4\.connections\.1\."):
        other.load_state_dict({**other.state_dict(), "connections.9.sublayer.up.weight": torch.ones(1)})


@pytest.mark.parametrize(
    ("wiring", "own", "norms"),
    [
        ("pre_ln", (), ("norm_in",)),
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
