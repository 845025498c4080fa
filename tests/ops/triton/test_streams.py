"""Tests of the Triton kernels of n streams, interpreted on the CPU, against float64 and the reference."""

import itertools
from dataclasses import replace

import pytest
import torch

import addnorm
from addnorm.ops.streams.kinds import GATE_KINDS
from addnorm.ops.triton import plan
from addnorm.ops.triton.streams import operators
from support.equality import assert_same
from support.pairwise import mark_slow
from support.stream_calls import (
    BY_TOKEN,
    MODES,
    assert_accurate,
    bf16,
    f32,
    in_float64,
    make_call,
    make_cotangents,
    make_varied_call,
    run,
)

pytestmark = pytest.mark.usefixtures("on_triton")

f16 = torch.float16
SIZES = [(8, 33), (4, 200), (1, 64), (7, 40), (2, 129), (3, 16), (6, 7), (5, 100)]  # n and d_model
# The cases that run by default.
SOME = [
    ("given", "write", f32), ("given", "shared", bf16), ("given", "features", f16), ("given", "read", bf16),
    ("manifold", "write", f32), ("manifold", "given", bf16), ("manifold", "identity", f32), ("independent", "features", f32),
    ("independent", "shared", f16), ("gates", "read", f32), ("hyper", "write", f32), ("hyper", "shared", bf16), ("hyper", "read", f32),
]  # fmt: skip


@pytest.fixture
def no_reference(monkeypatch):
    """Make every operator fail that falls back to the reference."""
    monkeypatch.setattr(operators, "eager", None)


@pytest.mark.parametrize(
    ("kind", "mode", "dtype"), mark_slow(itertools.product(GATE_KINDS, MODES, (f32, bf16, f16)), SOME), ids=str
)
def test_boundary_is_accurate(no_reference, kind, mode, dtype):
    assert_accurate(make_varied_call(kind, mode, dtype, SIZES))


def test_other_dtypes_of_outputs_are_accurate(no_reference):
    options = {"streams_dtype": f32, "out_dtype": f16}
    assert_accurate(make_call(3, 20, (5,), "manifold", dtype=bf16, **options))
    call = make_call(2, 20, (5,), "hyper", dtype=bf16)
    tensors = {name: t if name in ("streams", "branch") else t.to(bf16) for name, t in call.tensors.items()}
    assert_accurate(replace(call, tensors=tensors))


@pytest.mark.parametrize("kind", ["given", "independent", pytest.param("hyper", marks=pytest.mark.slow)])
def test_sums_over_chunks_of_tokens_are_accurate(no_reference, monkeypatch, kind):
    """As with many more tokens than programs: several chunks of several blocks, the last of them not full."""
    for module, sizes in ((operators, {"PROJECT_TOKENS": 16, "PROJECT_PROGRAMS": 2}),
                          (plan, {"MIN_TILE": 64, "MIN_PROGRAMS": 1, "BACKWARD_ELEMENTS": 128})):  # fmt: skip
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)
    plan.forward.cache_clear()
    assert_accurate(make_call(2, 20, (35,), kind, norm="layer"))
    plan.forward.cache_clear()


@pytest.mark.parametrize("kind", ["manifold", "hyper"])
def test_token_does_not_depend_on_the_others(kind):
    call = make_call(3, 40, (35,), kind)
    whole = call()
    for i in (0, 34):
        alone = call({name: t[i : i + 1] if name in BY_TOKEN else t for name, t in call.tensors.items()})
        assert all(torch.equal(alone[name][0], whole[name][i]) for name in whole)


def test_strided_and_expanded_inputs_give_the_same_bits(no_reference):
    call = replace(make_call(3, 24, (2, 3), "manifold"), iterations=2)
    cotangents = make_cotangents(call)
    expected = run(call, call.leaves(), cotangents)
    strided = {name: t.transpose(0, -1).contiguous().transpose(0, -1) for name, t in call.tensors.items()}
    actual = run(call, {name: t.requires_grad_() for name, t in strided.items()}, cotangents)
    assert_same(actual, expected)
    x = torch.randn(5, 1, 24).expand(5, 4, 24)
    reads = [addnorm.add_norm_streams(t, collapse=torch.arange(4.0)).read for t in (x, x.contiguous())]
    assert torch.equal(*reads)


def test_unused_outputs_add_no_gradient(no_reference):
    call = replace(make_call(2, 20, (3,), "manifold"), iterations=2)
    cotangents = make_cotangents(call)
    for name in cotangents:
        one = {key: t if key == name else torch.zeros_like(t) for key, t in cotangents.items()}
        actual, expected = (run(call, call.leaves(), c) for c in ({name: cotangents[name]}, one))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_far_means_do_not_cost_accuracy_in_hyper(no_reference):
    call = make_call(2, 300, (3,), "hyper", mode="read")
    call.tensors["streams"][..., :64] += 1000.0
    assert_accurate(call)


OTHERS = {
    "no tokens": make_call(4, 16, (0, 3), "manifold"),
    "float64": in_float64(make_call(2, 8, (3,), "gates")),
    "nine streams": make_call(9, 8, (3,), "independent"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_use_the_reference(monkeypatch, name):
    monkeypatch.setattr(operators, "launch", None)  # nothing is launched
    call = OTHERS[name]
    results = run(call, call.leaves(), make_cotangents(call))
    assert results["streams"].shape == call.tensors["streams"].shape


@pytest.mark.parametrize(("limit", "value"), [("MAX_FEATURES", 15), ("COMPUTED", {})])
def test_calls_beyond_a_limit_use_the_reference(monkeypatch, limit, value):
    monkeypatch.setattr(operators, limit, value)
    monkeypatch.setattr(operators, "launch", None)
    call = make_call(2, 16, (3,), "manifold")
    run(call, call.leaves(), make_cotangents(call))
