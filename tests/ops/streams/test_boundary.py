"""Tests of the boundary of n streams against float64: kernels and reference, every kind, dtype and form of the coefficients."""

import pytest
import torch

import addnorm
from addnorm.ops.streams.kinds import KINDS
from support.pairwise import rotate
from support.second_order import assert_second_order, entangle
from support.stream_calls import (
    UNIT,
    StreamCall,
    assert_accurate,
    bf16,
    f32,
    f64,
    in_float64,
    make_call,
    make_cotangents,
    run,
    worst,
)

MODES = ("write", "shared", "given", "features", "identity", "read")
SHAPES = ((1, 40), (2, 7), (3, 64), (4, 200), (5, 33), (8, 130))  # n and d_model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [f32, bf16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_boundary_is_accurate(kind, dtype, mode):
    index = list(KINDS).index(kind) * 7 + MODES.index(mode)
    n, d = SHAPES[index % len(SHAPES)]
    norm = ("layer", "rms", "none")[index % 3]
    assert_accurate(make_call(n, d, ((), (1,), (2, 9), (37,))[index % 4], kind, dtype=dtype, mode=mode, norm=norm))


@pytest.mark.parametrize("kind", ["manifold", "hyper"])
@pytest.mark.parametrize(("n", "d"), [(4, 512), (4, 1028), (2, 4096)])
def test_long_rows_and_many_tokens_are_accurate(kind, n, d):
    assert_accurate(make_call(n, d, (300,), kind, norm="rms"))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_torch_in_float64(kind):
    """The reference's own gradients against torch's differentiation of the formula."""
    call = make_call(3, 10, (2, 5), kind, dtype=f64, mode="write")
    call = StreamCall({name: t.to(f64) for name, t in call.tensors.items()}, kind, iterations=3)
    cotangents = make_cotangents(call)
    ours, theirs = (run(f, call.leaves(), cotangents) for f in (call, call.formula))
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-10, atol=1e-11 * (1 + expected.abs().max().item()))


FROZEN = ((), ("streams",), ("weight", "bias"), ("project", "scale"), ("branch", "collapse"))


@pytest.mark.parametrize(("kind", "mode"), rotate([*KINDS], MODES, 2))
def test_second_derivative_of_inputs_that_depend_on_each_other(kind, mode):
    index = list(KINDS).index(kind) + MODES.index(mode)
    call = make_call(3, 5, (2,), kind, mode=mode, norm=("layer", "rms", "none")[index % 3], eps=0.1)
    call = in_float64(call, iterations=2)
    for i, frozen in enumerate(FROZEN):
        tensors = {name: t.requires_grad_(name not in frozen) for name, t in call.leaves().items()}
        names = [*call()] if i % 2 == 0 else ["streams", [*call()][index % len(call())]]

        def loss(tensors=tensors, names=names):
            outputs = call(entangle(tensors))
            return sum((outputs[name] * torch.linspace(-1, 1, outputs[name].shape[-1])).sin().sum() for name in names)

        assert_second_order(loss, [t for t in tensors.values() if t.requires_grad])
    values = tuple(call.leaves().values())
    function = lambda *values: tuple(call(entangle(dict(zip(call.tensors, values, strict=True)))).values())  # noqa: E731
    assert torch.autograd.gradgradcheck(function, values, fast_mode=True, atol=1e-6)


DTYPES = (
    (f32, {}),
    (bf16, {}),
    (f32, {"streams_dtype": bf16}),
    (f32, {"streams_dtype": f64}),
    (bf16, {"out_dtype": f32}),
)


@pytest.mark.parametrize(("kind", "dtypes"), rotate([*KINDS], DTYPES, 2))
def test_create_graph_gives_the_gradients_of_the_kernels(kind, dtypes):
    call = make_call(3, 16, (2, 5), kind, dtype=dtypes[0], **dtypes[1])
    results = []
    for create_graph, autocast in ((False, False), (True, False), (True, True)):
        leaves = call.leaves()
        with torch.autocast("cpu", bf16, enabled=autocast):
            loss = sum(t.double().sin().sum() for t in call(leaves).values())
            grads = torch.autograd.grad(loss, [*leaves.values()], create_graph=create_graph)
        results.append([grad.detach().to(f64) for grad in grads])
    largest = max(grad.abs().max() for grad in results[0])
    for other in results[1:]:
        for name, actual, expected in zip(call.tensors, other, results[0], strict=True):
            # Both are as far from the exact gradient as `assert_accurate` allows.
            bound = 32 * UNIT[f32] * largest + 2 * UNIT[call.tensors[name].dtype] * expected.abs().max()
            assert worst(actual, expected) <= bound, name


@pytest.mark.parametrize("kind", ["manifold", "hyper"])
def test_a_token_does_not_depend_on_the_others(kind):
    call = make_call(4, 72, (70,), kind)
    whole = call()
    for i in (0, 33, 69):
        per_token = {"streams", "branch", "mix", "inject", "collapse"}
        alone = call({name: t[i : i + 1] if name in per_token else t for name, t in call.tensors.items()})
        assert all(torch.equal(alone[name][0], whole[name][i]) for name in whole)


@pytest.mark.parametrize(
    ("kind", "mode"), [("given", "write"), ("given", "shared"), ("manifold", "write"), ("hyper", "shared")]
)
def test_results_do_not_depend_on_threads(kind, mode, threads):
    call = make_call(4, 24, (9000,), kind, mode=mode)
    cotangents = make_cotangents(call)
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(run(call, call.leaves(), cotangents))
    assert all(torch.equal(results[0][name], other[name]) for other in results[1:] for name in other)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_one_stream_has_the_bits_of_the_operation(norm, dtype):
    x, w, weight = torch.randn(9, 1, 200).to(dtype), torch.randn(9, 200).to(dtype), torch.randn(200)
    step = addnorm.add_norm_streams(x, w, inject=torch.ones(1), collapse=torch.ones(1), weight=weight, norm=norm)
    function = addnorm.add_layer_norm if norm == "layer" else addnorm.add_rms_norm
    y, z = function(x[:, 0], w, weight, eps=1e-5, return_residual=True)
    assert torch.equal(step.streams[:, 0], z)
    assert torch.equal(step.read, y)


def test_far_means_do_not_cost_accuracy_in_hyper():
    """The mean of a stream's first chunk is far from that of the rest."""
    call = make_call(2, 2000, (5,), "hyper", mode="read")
    call.tensors["streams"][..., :512] += 1000.0
    assert_accurate(call)


BAD = {
    "streams": (torch.randn(8), ValueError, r"streams has shape \(8,\), expected \(\*, n, d_model\)"),
    "branch": (torch.randn(3, 9), ValueError, r"branch has shape \(3, 9\), expected \(3, 8\)"),
    "mix": (torch.randn(3, 4, 5), ValueError, r"mix has shape \(3, 4, 5\), expected \(3, 4, 4\) or \(4, 4\)"),
    "inject": (None, ValueError, "inject is None and branch is not, expected both"),
    "collapse": (torch.ones(3, 4, dtype=torch.int64), TypeError, "collapse has dtype int64, expected float32"),
    "weight": (torch.ones(4), ValueError, r"weight has shape \(4,\), expected \(8,\)"),
    "eps": (-1.0, ValueError, "eps is -1.0, expected a number >= 0"),
    "norm": ("batch", ValueError, "norm is 'batch', expected 'layer', 'rms' or 'none'"),
    "out_dtype": (torch.int32, TypeError, "out_dtype is torch.int32, expected one of"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_raise_one_sentence(name):
    value, error, message = BAD[name]
    arguments = {"streams": torch.randn(3, 4, 8), "branch": torch.randn(3, 8), "mix": torch.randn(3, 4, 4)}
    arguments |= {"inject": torch.randn(3, 4), "collapse": torch.randn(4), name: value}
    with pytest.raises(error, match=message):
        addnorm.add_norm_streams(**arguments)


def test_gates_of_other_streams_raise_one_sentence():
    gates = addnorm.StreamGates("manifold", torch.randn(24, 32), torch.ones(3), torch.ones(24))
    with pytest.raises(
        ValueError, match=r"project of the gates has shape \(24, 32\), expected \(24, 36\) for streams \(3, 4, 9\)"
    ):
        addnorm.add_norm_streams(torch.randn(3, 4, 9), gates=gates)
