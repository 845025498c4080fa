"""Tests of stacks of several streams, and of every wiring: shapes, layouts, dtypes, parameters, dropout."""

import copy

import pytest
import torch
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

from addnorm import Learned, ResidualStack, Wiring
from addnorm.wirings import Computed, Head, Stage, coefficients, identity
from support.oracle import relative, worst
from support.stream_stacks import EVERY, WIRINGS, Branch, D, branches, each, every, make, tokens

f64, f32, bf16 = torch.float64, torch.float32, torch.bfloat16

# Shapes and layouts


@each
def test_layout_of_x_does_not_matter(name):
    stack, x = make(name, f64), tokens(dtype=f64)
    y = stack(x)
    for same, expected in (
        (stack(x.mT.contiguous().mT), y),
        (stack(x.transpose(0, 1)), y.transpose(0, 1)),
        (stack(x[:1].expand(3, 5, D)), y[:1].expand(3, 5, D)),
        (stack(x.repeat_interleave(2, -1)[..., ::2]), y),
        (stack(x[1:2, 2:3]), y[1:2, 2:3]),
        (stack(x[1, 2]), y[1, 2]),
    ):
        assert_close(same, expected, rtol=1e-12, atol=1e-12)


def test_single_sublayer_is_called_with_a_tensor_of_one_stream():
    connection, x = make("gated_mix").connections[1], tokens()
    a, b = (t[0][0] if isinstance(t[0], tuple) else t[0] for t in connection.coefficients((x,))[1:3])
    write = connection.norm_branch(connection.sublayer(connection.norm_in(x)))
    assert_close(connection(x), a * x + b * write)
    for name in ("mhc", "reversible", "attention_residuals"):
        with pytest.raises(
            ValueError, match=r"^x is a tensor and the sublayer has \d streams, expected a StreamState: [^.]*\.$"
        ):
            make(name).connections[0](x)


# Dtypes


def own_parameters(stack):
    """Return the learned coefficients of a stack."""
    return [p for name, p in stack.named_parameters() if ".sublayer." not in name and "norm" not in name]


def find_tensors(value):
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]


def record_streams(stack):
    """Return a list to which each layer appends its streams."""
    streams = []
    for layer in stack.layers:
        layer.register_forward_hook(lambda layer, args, state: streams.append(state.x))
    return streams


@each
@pytest.mark.parametrize(("dtype", "limit", "norm"), [(bf16, 0.03, "layer"), (torch.float16, 0.004, "rms")])
def test_half_precision_keeps_coefficients_in_float32(name, dtype, limit, norm):
    stack = make(name, dtype, norm=norm)
    assert all(p.dtype == f32 for p in own_parameters(stack))
    built = ResidualStack(branches(name), D, WIRINGS[name], dtype=dtype)
    assert all(p.dtype == f32 for p in own_parameters(built))
    exact = copy.deepcopy(stack).double()
    assert all(p.dtype == f64 for p in exact.parameters())
    x, streams = (0.03 * tokens(dtype=dtype)).requires_grad_(), record_streams(stack)  # near half precision's epsilon
    y = stack(x)
    assert {t.dtype for t in (y, *find_tensors(streams))} == {dtype}
    assert relative(y, exact(x.double())) < limit
    for gradient in torch.autograd.grad(y.float().square().sum(), [x, *stack.parameters()]):
        assert gradient.isfinite().all()


@every
def test_residual_dtype_is_that_of_every_stream(name):
    stack, x = make(name, bf16, residual_dtype=f32), tokens(dtype=bf16)
    stack.connections[0].sublayer.register_forward_hook(lambda module, args, output: torch.full_like(output, 256.0))
    exact, streams, reads, wanted = copy.deepcopy(stack).double(), record_streams(stack), [], []
    exact.residual_dtype = None
    for connection in exact.connections:
        connection.residual_dtype = None
        connection.sublayer.register_forward_pre_hook(lambda module, args: wanted.extend(args))
    for connection in stack.connections:
        connection.sublayer.register_forward_pre_hook(lambda module, args: reads.extend(args))
    assert stack(x).dtype == bf16
    assert {t.dtype for t in find_tensors(streams)} == {f32}
    assert {read.dtype for read in reads} == {bf16}
    exact(x.double())
    for read, expected in zip(reads, wanted, strict=True):  # rounded before its norm, a read near 256 has two digits
        assert relative(read, expected) < 0.03


@every
def test_autocast_computes_coefficients_in_float32(name):
    stack, x = make(name), tokens()
    seen, computed = [], [module for module in stack.modules() if hasattr(module, "computes")]
    hooks = [module.register_forward_hook(lambda module, args, output: seen.append(output)) for module in computed]
    expected = stack(x)
    exact, seen[:] = [*seen], []
    with torch.autocast("cpu", bf16):
        y = stack(x)
    assert y.dtype == f32  # that of F.layer_norm there
    assert relative(y, expected) < 0.03
    if exact:  # those of the first computed site but for its streams' rounding
        assert all(t.dtype == f32 for t in find_tensors(seen))
    gradients = torch.autograd.grad(y.float().square().sum(), [*stack.parameters()])
    assert all(g.dtype == p.dtype for g, p in zip(gradients, stack.parameters(), strict=True))
    for hook in hooks:
        hook.remove()
    for connection in stack.connections:  # without an operation that autocast changes nothing is rounded
        connection.sublayer.linear = torch.nn.Tanh()
    expected = stack(x)
    for _ in ("in one call", "norm by norm"):
        with torch.autocast("cpu", bf16):
            assert relative(stack(x), expected) < 2e-6
        for norm in stack.modules():
            if isinstance(norm, torch.nn.LayerNorm):
                norm.register_forward_hook(lambda module, args, output: None)


@pytest.mark.parametrize("name", ["peri_ln", "x0_residual", "ngpt"])
def test_norm_of_the_embedding_has_residual_dtype(name):
    stack, states = ResidualStack([Branch(), Branch()], D, name, residual_dtype=bf16), []
    stack.norm_embedding.register_forward_hook(lambda norm, args, y: y.float())  # as under autocast on CUDA
    stack.layers[0].register_forward_pre_hook(lambda layer, args: states.append(args[0].x))
    with torch.autocast("cpu", bf16):
        stack(tokens())
    assert {t.dtype for t in find_tensors(states)} == {bf16}


SMALL = 2**-9  # 1 + SMALL is 1 in bfloat16
STATIC = Computed(coefficients.HyperConnection, {"dynamic": False})
CONSTANTS = {  # a wiring that leaves SMALL times x where its constants are not rounded, and what its sublayer returns for x
    "read": (Stage(2, (1 + SMALL, -1.0), inject=(1.0, 1.0), norm_in=True), Head(2, (1.0, 0.0)), 0.0),
    "read of norms": (Stage(2, (1.0, -1.0), inject=(1.0, 1.0), norm_streams=True, norm_in=True), Head(2, (1.0, 0.0)), 0.0),
    "head of streams in one tensor": (Stage(2, coefficients=STATIC, norm_in=True), Head(2, (1 + SMALL, -1.0)), 0.0),
    "write to streams in one tensor": (
        Stage(2, coefficients=Computed(coefficients.SigmoidRead), inject=(1 + SMALL, 1.0), norm_in=True), Head(2, (-1.0, 0.0)), -1.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("residual_dtype", [None, f32])
@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_and_norms_of_streams_are_not_rounded(name, residual_dtype):
    stage, head, factor = CONSTANTS[name]
    x, seen = torch.nn.functional.layer_norm(tokens(dtype=bf16), (D,)), []
    wiring = Wiring("small", stage, embedding=(1.0, 1.0), head=head, final_norm=True)
    stack = ResidualStack([lambda read: seen.append(read) or factor * x], D, wiring, residual_dtype=residual_dtype)
    if name == "read of norms":
        torch.nn.init.constant_(stack.connections[0].norm_streams["0"].weight, 1 + SMALL)
    y = stack(x)
    expected = torch.nn.functional.layer_norm(SMALL * x.double(), (D,), eps=1e-5)
    assert relative(seen[0] if "read" in name else y, expected) < 0.01


@each
def test_x_may_be_wider_than_the_parameters(name):
    stack, x = make(name), tokens(dtype=f64)
    exact = copy.deepcopy(stack).double()
    for connection in stack.connections:
        connection.sublayer.double()
    assert relative(stack(x), exact(x)) < 1e-6


# Parameters


@every
def test_reset_parameters_sets_what_the_constructor_sets(name):
    stack = ResidualStack(branches(name), D, EVERY[name])
    with torch.device("meta"):
        other = ResidualStack(branches(name), D, EVERY[name])
    assert all(p.is_meta for p in other.parameters())
    assert other(torch.empty(2, 3, D, device="meta")).is_meta
    other = other.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(float("nan"))
    other.reset_parameters()
    for (key, expected), (same, actual) in zip(stack.named_parameters(), other.named_parameters(), strict=True):
        assert key == same
        assert actual.dtype == expected.dtype
        if ".sublayer." not in key:
            assert actual.isfinite().all(), key
            if len(expected.unique()) <= 2:  # not drawn
                assert torch.equal(actual, expected), key
            elif not torch.equal(actual, expected):
                # Five standard deviations of the difference of two samples, which is 0.8 at most for a few numbers.
                assert_close(actual.std(), expected.std(), rtol=min(0.8, 5 * actual.numel() ** -0.5), atol=0)


def test_entries_of_one_name_are_one_parameter():
    pair = (Learned(0.7, name="share"), Learned(0.7, name="share"))
    wiring = Wiring("mine", Stage(2, pair, inject=(1, 0)), embedding=(1.0, 1.0), head=Head(2, (1, 0)))
    stack = ResidualStack([Branch()], D, wiring)
    assert [key for key, _ in stack.named_parameters() if "sublayer" not in key] == ["layers.0.connections.0.share"]


# Dropout


@pytest.mark.parametrize(
    "options", [{"dropout": 0.5}, {"stochastic_depth": 0.5}, {"dropout": 0.3, "stochastic_depth": 0.3}]
)
@pytest.mark.parametrize("stacked", [False, True])
def test_all_streams_drop_the_same_elements(options, stacked):
    computed = Computed(coefficients.SigmoidRead) if stacked else None
    stage = Stage(3, None if stacked else (1, 0, 0), None if stacked else identity(3), (1, 3, -2), computed)
    wiring = Wiring("mine", stage, embedding=(1.0, 3.0, -2.0), head=Head(3, (1, -1, -1)))  # 1 - 3 + 2 = 0
    stack = ResidualStack([Branch() for _ in range(3)], D, wiring, sublayers_per_layer=1, **options).double()
    x = tokens(20, 5, dtype=f64)
    assert worst(stack(x)) < 1e-12
    assert (stack.unroll(x).writes[2] == 0).any()
    assert worst(stack.eval()(x)) < 1e-12
