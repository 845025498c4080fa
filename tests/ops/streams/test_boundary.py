"""Tests of the boundary of n streams against float64: kernels and reference, every kind, dtype and form of the coefficients."""

import pytest
import torch

from addnorm.ops.streams.kinds import GATE_KINDS
from support.equality import assert_same
from support.pairwise import rotate
from support.second_order import assert_second_order, entangle
from support.stream_calls import (
    MODES,
    UNIT,
    assert_accurate,
    bf16,
    f32,
    f64,
    in_float64,
    make_call,
    make_cotangents,
    make_varied_call,
    run,
    worst,
)

SIZES = ((1, 40), (2, 7), (3, 64), (4, 200), (5, 33), (8, 130))  # n and d_model


@pytest.mark.parametrize("kind", GATE_KINDS)
@pytest.mark.parametrize("dtype", [f32, bf16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_boundary_is_accurate(kind, dtype, mode):
    assert_accurate(make_varied_call(kind, mode, dtype, SIZES))


@pytest.mark.parametrize("kind", ["manifold", "hyper"])
@pytest.mark.parametrize(("n", "d"), [(4, 512), (4, 1028), (2, 4096)])
def test_long_rows_and_many_tokens_are_accurate(kind, n, d):
    assert_accurate(make_call(n, d, (300,), kind, norm="rms"))


FROZEN = ((), ("streams",), ("weight", "bias"), ("project", "scale"), ("branch", "collapse"))


@pytest.mark.parametrize(("kind", "mode"), rotate([*GATE_KINDS], MODES, 2))
def test_second_derivative_of_inputs_that_depend_on_each_other(kind, mode):
    index = list(GATE_KINDS).index(kind) + MODES.index(mode)
    call = make_call(3, 5, (2,), kind, mode=mode, norm=("layer", "rms", "none")[index % 3], eps=0.1)
    call = in_float64(call, iterations=2)
    for i, frozen in enumerate(FROZEN):
        tensors = {name: t.requires_grad_(name not in frozen) for name, t in call.leaves().items()}
        names = [*call()] if i % 2 == 0 else ["streams", [*call()][index % len(call())]]

        def loss(tensors=tensors, names=names):
            outputs = call(entangle(tensors))
            return sum((outputs[name] * torch.linspace(-1, 1, outputs[name].shape[-1])).sin().sum() for name in names)

        assert_second_order(loss, [t for t in tensors.values() if t.requires_grad])


DTYPES = (
    (f32, {}),
    (bf16, {}),
    (f32, {"streams_dtype": bf16}),
    (f32, {"streams_dtype": f64}),
    (bf16, {"out_dtype": f32}),
)


@pytest.mark.parametrize(("kind", "dtypes"), rotate([*GATE_KINDS], DTYPES, 2))
def test_create_graph_gives_the_gradients_of_the_kernels(kind, dtypes):
    call = make_call(3, 16, (2, 5), kind, dtype=dtypes[0], **dtypes[1])
    results = []
    for create_graph, autocast in ((False, False), (True, False), (True, True)):
        leaves = call.leaves()
        with torch.autocast("cpu", bf16, enabled=autocast):
            loss = sum(t.double().sin().sum() for t in call(leaves).values())
            grads = torch.autograd.grad(loss, [*leaves.values()], create_graph=create_graph)
        results.append([grad.detach().to(f64) for grad in grads])
    largest = max(map(worst, results[0]))
    for other in results[1:]:
        for name, actual, expected in zip(call.tensors, other, results[0], strict=True):
            # Both are as far from the exact gradient as `assert_accurate` allows.
            bound = 32 * UNIT[f32] * largest + 2 * UNIT[call.tensors[name].dtype] * worst(expected)
            assert worst(actual, expected) <= bound, name


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
    assert_same(results[1:], results[:1] * 2)


def test_far_means_do_not_cost_accuracy_in_hyper():
    """The mean of a stream's first chunk is far from that of the rest."""
    call = make_call(2, 2000, (5,), "hyper", mode="read")
    call.tensors["streams"][..., :512] += 1000.0
    assert_accurate(
        call, roundings=24
    )  # vectors of 4 numbers, as on CPUs without AVX2, add a row in 4 times as many steps
