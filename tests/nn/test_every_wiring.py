"""Tests of what stacks of every wiring support: gradient modes, hooks, removal, copies, decoding, derivatives, compilation."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.testing import assert_close

from addnorm import ResidualStack
from addnorm.nn import Decoder, KeyValueCache
from support.equality import assert_same
from support.pairwise import rotate, some
from support.second_order import assert_second_order
from support.stream_stacks import EVERY, D, branches, every, make, one_of_each_module, perturb, tokens
from support.transformer_inputs import compute_gradients

f64 = torch.float64


@pytest.mark.parametrize(("name", "norm"), rotate([*EVERY], ["layer", "rms"], 1))
def test_gradient_modes_and_checkpoints_keep_the_bits(name, norm):
    stack, x, results = make(name, norm=norm, dropout=0.1, stochastic_depth=0.2), tokens(), []
    before = x.clone()
    for stack.checkpoint in (False, True, 2):
        results.append(compute_gradients(stack, stack.parameters(), [x]))
    for other in results[1:]:
        assert_same(other, results[0])
    for mode in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(5)  # that of compute_gradients
        with mode():
            assert torch.equal(stack(x), results[0][0])
    assert torch.equal(x, before)


@every
def test_every_module_is_called_once_when_it_has_hooks(name):
    stack, x, called = make(name), tokens(), []
    y = stack(x)
    modules = {key: m for key, m in stack.named_modules() if key and not isinstance(m, nn.ModuleList | nn.ModuleDict)}
    for key, module in modules.items():
        module.register_forward_hook(lambda module, args, output, key=key: called.append(key))
    assert_close(stack(x), y)
    assert sorted(called) == sorted(modules)


@every
def test_layer_by_layer_equals_the_stack(name):
    """A state that is passed on by hand, as between pipeline stages."""
    stack, x = make(name), tokens()
    state = stack._start(x)
    for layer in stack.layers:
        state = copy.deepcopy(layer)(state)
    assert stack._finish(state)[1].equal(stack(x))


@every
def test_without_leaves_the_other_writes(name):
    stack, x = make(name), tokens()
    for i in (0, 3, -1):
        expected = copy.deepcopy(stack)
        expected.connections[i].sublayer.forward = lambda x, *others: torch.zeros_like(x)
        expected.connections[i].norm_branch = None
        less = stack.without(i)
        assert_close(less(x), expected(x))
        less.unroll(x)  # which compares the sum of its writes with the stream
        assert {*map(id, less.parameters())} < {*map(id, stack.parameters())}  # without those of the sublayer
        assert not torch.equal(stack(x), expected(x))


@every
def test_copies_and_state_dicts_compute_the_same(name):
    stack, x, file = make(name), tokens(), io.BytesIO()
    y = stack(x)
    assert torch.equal(copy.deepcopy(stack)(x), y)
    assert torch.equal(pickle.loads(pickle.dumps(stack))(x), y)
    torch.save(stack.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    with torch.device("meta"):
        assigned = ResidualStack(branches(name), D, EVERY[name])
    for other, assign in ((ResidualStack(branches(name), D, EVERY[name]), False), (assigned, True)):
        other.load_state_dict(state, assign=assign)
        assert torch.equal(other(x), y)


@every
def test_decoder_with_cache_equals_the_decoder_without(name):
    decoder = Decoder(3, D, 2, 16, EVERY[name], cross_attention=False).double().eval()
    perturb(decoder)
    x, cache = tokens(2, 6, dtype=f64), KeyValueCache()
    y = decoder(x)
    steps = [decoder(x[:, a:b], cache=cache) for a, b in ((0, 3), (3, 4), (4, 6))]
    assert_close(torch.cat(steps, 1), y, rtol=1e-11, atol=1e-11)
    other = x.clone()
    other[:, 4:] += 1.0
    assert torch.equal(decoder(other)[:, :4], y[:, :4])  # causal


# Derivatives

OPTIONS = (
    {"norm": "rms", "dropout": 0.3},
    {"checkpoint": True},
    {"stochastic_depth": 0.5, "checkpoint": 2},
    {"frozen": "parameters"},
    {"residual_dtype": torch.float32},
    {"frozen": "input", "norm": "rms", "eps": 0.1},
    {"dropout": 0.2, "elementwise_affine": False},
)


@pytest.mark.parametrize(("name", "options"), rotate([*EVERY], OPTIONS, 1))
def test_second_derivatives_of_every_wiring(name, options):
    frozen = options.get("frozen")
    options = {key: value for key, value in options.items() if key != "frozen"}
    stack = make(name, f64, 4, **options).requires_grad_(frozen != "parameters")
    x = tokens(2, 2, dtype=f64).requires_grad_(frozen != "input")

    def loss(x=x):
        torch.manual_seed(5)
        return (stack(x).sin() * torch.linspace(-1, 1, D, dtype=f64)).sum()

    tolerance = 1e-5 if "residual_dtype" in options else 1e-10  # the arithmetic of a float32 stream is in float32
    assert_second_order(loss, [t for t in (x, *stack.parameters()) if t.requires_grad], tolerance)
    if frozen != "input" and "checkpoint" not in options:
        v = torch.randn_like(x)
        (gradient,) = torch.autograd.grad(loss(), x, create_graph=True)
        (product,) = torch.autograd.grad((gradient * v).sum(), x)
        expected = jvp(grad(loss), (x.detach(),), (v,))[1]  # of the formula
        assert (product - expected).norm() <= 10 * tolerance * expected.norm()


@one_of_each_module
def test_function_transforms(name):
    stack, x, v = make(name, f64), tokens(dtype=f64), tokens(dtype=f64)
    y, step = stack(x), 1e-6
    assert_close(vmap(stack.forward)(x), y, rtol=1e-12, atol=1e-12)
    slope = (stack(x + step * v) - stack(x - step * v)) / (2 * step)
    assert_close(jvp(stack.forward, (x,), (v,))[1], slope, rtol=1e-5, atol=1e-6)
    parameters = {key: 1.1 * p.detach() for key, p in stack.named_parameters()}
    other = copy.deepcopy(stack)
    other.load_state_dict(parameters, strict=False)  # a shared parameter has one of its names
    of_samples = vmap(grad(lambda p, t: functional_call(stack, p, (t,)).sin().sum()), (None, 0))(parameters, x)
    for k, sample in enumerate(x):
        expected = torch.autograd.grad(other(sample).sin().sum(), [*other.parameters()])
        for gradient, g in zip(of_samples.values(), expected, strict=True):
            assert_close(gradient[k], g, rtol=1e-10, atol=1e-10)


# Compilation

QUICK = ["pre_ln", "single_pass_mhc"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # warnings of torch.compile about itself
@pytest.mark.parametrize("name", some([*EVERY], QUICK))
def test_compiles_without_graph_breaks(name):
    stack, x = make(name, number=2 if name in QUICK else 6, checkpoint=name == "pre_ln"), tokens()
    calls = stack, torch.compile(stack, fullgraph=True, backend="aot_eager")
    assert_close(*(compute_gradients(call, stack.parameters(), [x]) for call in calls), rtol=1e-4, atol=1e-4)
