"""Stacks of several streams under transforms, compilation, regularization, decoding, hooks and sharding."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call, jacrev, jvp, vmap

from addnorm import ResidualStack, Wiring
from addnorm.nn import Decoder, KeyValueCache
from addnorm.wirings import Computed, Head, Stage, coefficients, identity
from support.stream_stacks import (
    WIRINGS,
    Branch,
    D,
    distance,
    each,
    make,
    one_of_each_module,
    perturb,
    tokens,
)


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)


# Transforms and compilation


@each
def test_modes_without_gradients_give_the_same_bits(name):
    stack, x = make(name), tokens()
    y = stack(x)
    with torch.no_grad():
        assert torch.equal(stack(x), y)
    with torch.inference_mode():
        assert torch.equal(stack(x), y)


@one_of_each_module
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_function_transforms(name):
    stack, x, v = make(name, torch.float64), tokens(dtype=torch.float64), tokens(dtype=torch.float64)
    y, step = stack(x), 1e-6
    torch.testing.assert_close(vmap(stack.forward)(x), y, rtol=1e-12, atol=1e-12)
    slope = (stack(x + step * v) - stack(x - step * v)) / (2 * step)
    torch.testing.assert_close(jvp(stack.forward, (x,), (v,))[1], slope, rtol=1e-5, atol=1e-6)
    jacobian = jacrev(stack.forward)(x[0, 0])
    torch.testing.assert_close(jacobian @ v[0, 0], slope[0, 0], rtol=1e-5, atol=1e-6)
    parameters = {key: 1.1 * p.detach() for key, p in stack.named_parameters()}
    other = copy.deepcopy(stack)
    other.load_state_dict(parameters)
    torch.testing.assert_close(functional_call(stack, parameters, (x,)), other(x), rtol=1e-12, atol=1e-12)


def check_compiled(name, number=6):
    torch._dynamo.reset()
    stack, x = make(name, number=number), tokens().requires_grad_()
    results = []
    for call in (stack, torch.compile(stack, fullgraph=True, backend="aot_eager")):
        y = call(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *stack.parameters()])))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def check_exported(name, number=6):
    stack, x = make(name, number=number).eval(), tokens()
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    program = torch.export.export(stack, (x,), dynamic_shapes=(sizes,))
    longer = tokens(7, 3)
    torch.testing.assert_close(program.module()(longer), stack(longer))


def test_compiles_without_graph_breaks():
    check_compiled("single_pass_mhc", 2)


@pytest.mark.slow
@each
def test_every_wiring_compiles_and_exports(name):
    check_compiled(name)
    check_exported(name)


def test_exports_with_dynamic_shapes():
    check_exported("attention_residuals_three_reads", 4)


# Dropout, stochastic depth, checkpoints


@pytest.mark.parametrize(
    "options", [{"dropout": 0.5}, {"stochastic_depth": 0.5}, {"dropout": 0.3, "stochastic_depth": 0.3}]
)
@pytest.mark.parametrize("stacked", [False, True])
def test_all_streams_drop_the_same_elements(options, stacked):
    computed = Computed(coefficients.SigmoidRead) if stacked else None
    stage = Stage(3, None if stacked else (1, 0, 0), None if stacked else identity(3), (1, 3, -2), computed)
    wiring = Wiring("mine", stage, embedding=(1.0, 3.0, -2.0), head=Head(3, (1, -1, -1)))  # 1 - 3 + 2 = 0
    stack = ResidualStack([Branch() for _ in range(3)], D, wiring, sublayers_per_layer=1, **options).double()
    x = tokens(20, 5, dtype=torch.float64)
    assert stack(x).abs().max() < 1e-12
    assert (stack.unroll(x).writes[2] == 0).any()
    assert stack.eval()(x).abs().max() < 1e-12


# Decoders, hooks, removal, sharding


@one_of_each_module
def test_decoder_with_cache_equals_the_decoder_without(name):
    decoder = Decoder(3, D, 2, 16, WIRINGS[name], cross_attention=False).eval()
    perturb(decoder)
    x, cache = tokens(2, 6), KeyValueCache()
    y = decoder(x)
    steps = [decoder(x[:, a:b], cache=cache) for a, b in ((0, 3), (3, 4), (4, 6))]
    torch.testing.assert_close(torch.cat(steps, 1), y, rtol=1e-4, atol=1e-5)
    other = x.clone()
    other[:, 4:] += 1.0
    assert torch.equal(decoder(other)[:, :4], y[:, :4])  # causal


@each
def test_every_module_is_called_when_it_has_hooks(name):
    stack, x, called = make(name), tokens(), []
    y = stack(x)
    modules = {key: m for key, m in stack.named_modules() if key and not isinstance(m, nn.ModuleList | nn.ModuleDict)}
    for key, module in modules.items():
        module.register_forward_hook(lambda module, args, output, key=key: called.append(key))
    torch.testing.assert_close(stack(x), y)
    assert {*called} == {*modules}


@each
def test_without_leaves_the_other_writes(name):
    stack, x = make(name), tokens()
    for i in (0, 3, 5):
        expected = copy.deepcopy(stack)
        expected.connections[i].sublayer.forward = lambda x, *others: torch.zeros_like(x)
        expected.connections[i].norm_branch = None
        torch.testing.assert_close(stack.without(i)(x), expected(x))
        assert not torch.equal(stack(x), expected(x))


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # torch's own
@pytest.mark.parametrize(
    ("unit", "names"),
    [
        ("layers", ["static_hyper_connections", "single_pass_mhc", "x0_residual"]),
        pytest.param("layers", WIRINGS, marks=pytest.mark.slow),
        pytest.param("connections", WIRINGS, marks=pytest.mark.slow),
    ],
    ids=["layers", "layers_of_all", "connections_of_all"],
)
def test_sharded_stacks_have_the_same_gradients(unit, names, mesh):
    for name in names:
        stack, x = make(name), tokens()
        plain, half = copy.deepcopy(stack), copy.deepcopy(stack)
        expected = plain(x)
        expected.square().sum().backward()
        for model, options in ((stack, {}), (half, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)})):
            scalars = {p for p in model.parameters() if p.dim() == 0}
            for module in getattr(model, unit):
                fully_shard(module, mesh=mesh, ignored_params=scalars, **options)
            fully_shard(model, mesh=mesh, ignored_params=scalars, **options)
        y = stack(x)
        torch.testing.assert_close(y, expected)
        y.square().sum().backward()
        for (key, p), q in zip(stack.named_parameters(), plain.parameters(), strict=True):
            gradient = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(
                gradient, q.grad, rtol=1e-4, atol=1e-4, msg=lambda m, k=key, n=name: f"{n} {k}: {m}"
            )
        assert distance(half(x), expected) < 0.05
