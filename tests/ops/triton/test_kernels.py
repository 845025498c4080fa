"""Tests of the Triton kernels, interpreted on the CPU, against float64, the reference and the C++ kernels.

test_specification.py (slow) runs all tests of the functions with these kernels. This file has the table of variants and the tests
that only these kernels need.
"""

import itertools

import pytest
import torch

import addnorm
from addnorm.ops.triton import gradients, operators, plan
from ops.test_philox import (  # noqa: F401
    test_dropout_keeps_a_word_equal_to_the_threshold,
    test_dropout_mask_equals_reference,
)
from support import cases
from support.accuracy import assert_accurate, forward_and_backward
from support.cases import (
    DTYPES,
    OPTIONS,
    SHAPES,
    VARIANTS,
    bf16,
    cotangents,
    make,
)
from support.operator_calls import assert_equal_references, record_calls
from support.pairwise import mark_slow, rotate, some, with_values
from support.triton_operators import TRITON

pytestmark = pytest.mark.usefixtures("on_triton")

TABLE = [
    *with_values(rotate(list(VARIANTS), list(DTYPES), 1), (3, 33)),
    *mark_slow(
        itertools.product(["LayerNorm", "RMSNorm"], ["float32", "bfloat16"], SHAPES),
        [(("LayerNorm", "RMSNorm")[i % 2], ("float32", "bfloat16")[i // 2 % 2], shape) for i, shape in enumerate(SHAPES)],
    ),
    pytest.param("RMSNorm", "bfloat16", (2, plan.FORWARD_ROW + 5), marks=pytest.mark.slow),  # more than fits in registers
]  # fmt: skip


@pytest.fixture
def short_rows(monkeypatch):
    """Limit registers and programs to a few elements, so that short rows take the code paths of long ones."""
    sizes = {
        "FORWARD_ROW": 64,
        "FORWARD_TILE": 32,
        "READ_ONCE_BYTES": 64,
        "READ_TWICE_BYTES": 128,
        "MIN_PROGRAMS": 1,
        "BACKWARD_TILE": 16,
        "MIN_TILE": 64,
        "SUM_TILE": 64,
        "BACKWARD_ELEMENTS": 256,
    }
    for name, size in sizes.items():
        monkeypatch.setattr(plan, name, size)
    cached = (plan.forward, plan.backward)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.mark.parametrize(("variant", "dtypes", "shape"), TABLE, ids=str)
def test_outputs_and_gradients_are_as_accurate_as_torch(monkeypatch, variant, dtypes, shape):
    for module in (operators, gradients):
        monkeypatch.setattr(module, "eager", None)  # no fallback to the reference
    assert_right(make(variant, dtypes, shape))


LONG = [
    *mark_slow(
        itertools.product(VARIANTS, ["bfloat16 with float32 parameters"], [50, 131]),
        [
            (variant, "bfloat16 with float32 parameters", (50, 131)[i % 2])
            for i, variant in enumerate(VARIANTS)
            if i % 4 == 2 or "everything" in variant
        ],
    ),
    *with_values(rotate(list(DTYPES), ["LayerNorm", "RMSNorm", "everything, LayerNorm"], 1), 77, swap=True),
    *(pytest.param(variant, "bfloat16", 100, marks=pytest.mark.slow) for variant in VARIANTS),
]


@pytest.mark.parametrize(("variant", "dtypes", "d"), LONG, ids=str)
def test_long_rows_are_computed_in_parts(short_rows, variant, dtypes, d):
    assert_right(make(variant, dtypes, (3, d)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "d"), [("LayerNorm", 65536), ("RMSNorm without weight", 262144), ("LayerNorm without either", 262144)]
)
def test_longest_rows_are_accurate(variant, d):
    assert_right(make(variant, "bfloat16", (1, d)))


def assert_right(call):
    """Check the bounds of test_functional.py at the call's own z, and that the bits are the same with and without gradients."""
    outputs = call()
    grad_outputs = cotangents(outputs)
    ours = forward_and_backward(call, call, grad_outputs)
    assert all(ours[name].equal(t) for name, t in outputs.items())
    assert all(t.is_contiguous() for t in outputs.values())
    assert_accurate(call, ours, grad_outputs)


@pytest.mark.parametrize(
    ("variant", "dtypes"),
    rotate(list(OPTIONS), ["float32", "bfloat16", "float32 stream, bfloat16 branch", "float64"], 1),
)
def test_each_output_alone_equals_the_reference(on_triton, variant, dtypes):
    call, grad_outputs, calls = record_calls(variant, dtypes, (5, 19))
    assert_equal_references(call, grad_outputs, calls)
    assert not [name for name in on_triton.ran if name.endswith("_reference")]


def test_row_stride_may_exceed_32_bits():
    """Two rows in memory that is allocated and hardly touched."""
    far = torch.empty(2**31 + 64, dtype=bf16)
    x = far.as_strided((2, 16), (2**31 + 16, 1))
    x.copy_(torch.randn(2, 16))
    branch = torch.randn(2, 16).to(bf16)
    assert addnorm.add_layer_norm(x, branch).equal(addnorm.add_layer_norm(x.clone(), branch))


@pytest.mark.parametrize(
    "variant", some(["LayerNorm", "layer_scale (d,)", "everything, LayerNorm"], ["layer_scale (d,)"])
)
def test_sums_over_chunks_of_rows_are_sums_over_all_rows(short_rows, variant):
    """As with many more rows than programs: chunks of several tiles, the last of them not full."""
    call = make(variant, "bfloat16", (51, 20))
    cut = plan.backward(51, 20, 2, 2)
    assert (cut.tile.rows, cut.chunk, cut.parts, cut.programs) == (2, 14, 1, 4)
    assert_right(call)


@pytest.mark.parametrize(("value", "d"), rotate([0.0, 0.1, 1e4 + 0.3, 5e36], [1, 65, 100], 1))
def test_constant_row_gives_exactly_the_bias(short_rows, d, value):
    bias = torch.randn(d)
    y = addnorm.add_layer_norm(torch.full((2, d), value), torch.zeros(2, d), torch.randn(d), bias)
    assert y.equal(bias.expand(2, d))


@pytest.mark.parametrize(
    ("variant", "value"),
    rotate(
        ["everything, LayerNorm", "everything, RMSNorm", "residual_scale (d,)"], [torch.inf, -torch.inf, torch.nan], 1
    ),
)
def test_non_finite_parameters_act_as_on_the_cpu(on_triton, variant, value):
    """A program's tile has more rows than there are. The others must not enter the sums."""
    for name in set(make(variant, "float32", (3, 8)).tensors) - {"residual", "branch"}:
        call = make(variant, "float32", (3, 8))
        call.tensors[name].view(-1)[0] = value
        grad_outputs = cotangents(call())
        actual = cases.gradients(call, grad_outputs)
        with on_triton.off():
            expected = cases.gradients(call, grad_outputs)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_overlap_raises_and_writes_nothing():
    buffer = torch.randn(9, 16)
    before = buffer.clone()
    with pytest.raises(ValueError, match="out shares memory with residual, expected exactly its memory or none of it"):
        addnorm.add_layer_norm(buffer[:8], torch.randn(8, 16), out=buffer[1:])
    assert buffer.equal(before)


def test_y_alone_has_the_bits_beside_another_z_dtype():
    """The dtype changes how the compiler distributes the elements, and with them the order of the sums (test_compiled.py)."""
    call = make("residual_dtype bfloat16", "float32", (5, 200))
    assert call.y_alone().equal(call()["y"])


@pytest.mark.parametrize("name", ["add_norm", "add_norm_stream", "add_norm_forward"])
def test_unknown_kind_of_norm_is_refused(name):
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match="norm is 3, expected 0 to 2"):
        TRITON[name](x, x, None, None, 1e-5, 3)


@pytest.mark.parametrize("variant", ["LayerNorm", "everything, RMSNorm", "the add alone"])
def test_rows_beyond_the_grid_use_the_reference(monkeypatch, variant):
    call = make(variant, "float32", (2, 20))
    expected = forward_and_backward(call, call, grad_outputs := cotangents(call()))
    monkeypatch.setattr(plan, "MAX_ROW", 19)
    for module in (operators, gradients):
        monkeypatch.setattr(module, "launch", None)  # nothing is launched
    actual = forward_and_backward(call, call, grad_outputs)
    assert all(torch.allclose(actual[name], t, rtol=1e-4, atol=1e-5) for name, t in expected.items())


@pytest.mark.parametrize("d", [plan.MAX_ROW, 2**20, 2**16])
def test_grid_axes_fit_cudas_limits(d):
    for sums in range(6):
        cut = plan.backward(2**40 // d, d, sums, 2)
        assert cut.parts <= 65535
        assert cut.programs < 2**31
