"""Tests of the Triton kernels, interpreted on the CPU, against float64, the reference and the C++ kernels.

test_specification.py (slow) runs all tests of the functions with these kernels. This file has the table of variants and the tests
that only these kernels need.
"""

import pytest
import torch

import addnorm
from addnorm.ops import philox
from addnorm.ops.options import GRADIENTS, NORMS
from addnorm.ops.triton import arguments, gradients, operators, plan
from support import cases
from support.accuracy import agree, assert_accurate, forward_and_backward
from support.cases import (
    BASIC,
    DTYPES,
    OPTIONS,
    SHAPES,
    VARIANTS,
    Call,
    bf16,
    cotangents,
    f32,
    f64,
    leaves,
    make,
    schema_options,
)
from support.memory_layouts import make_layouts
from support.oracle import UNIT, added, arithmetic, magnitudes, philox4x32
from support.pairwise import product, rotate, with_values
from support.triton_interpreter import Interpreted

ops = torch.ops.addnorm
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="nothing is interpreted: test_cuda.py runs on the GPU"
)

TABLE = [
    *with_values(rotate(list(VARIANTS), list(DTYPES), 2), (3, 33)),
    *product(["LayerNorm", "RMSNorm"], ["float32", "bfloat16"], SHAPES),
    ("RMSNorm", "bfloat16", (2, plan.FORWARD_ROW + 5)),  # more than fits in registers
]  # fmt: skip


@pytest.fixture(autouse=True)
def on_triton():
    """Replace the operators by Triton's."""
    with Interpreted() as mode:
        yield mode


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
    right(make(variant, dtypes, shape))


LONG = [
    *product(list(VARIANTS)[::2], ["bfloat16 with float32 parameters"], [50]),
    *product(list(VARIANTS)[1::2], ["bfloat16 with float32 parameters"], [131]),
    *with_values(rotate(list(DTYPES), ["LayerNorm", "RMSNorm", "everything, LayerNorm"], 1), 77, swap=True),
    *(pytest.param(variant, "bfloat16", 100, marks=pytest.mark.slow) for variant in VARIANTS),
]


@pytest.mark.parametrize(("variant", "dtypes", "d"), LONG, ids=str)
def test_long_rows_are_computed_in_parts(short_rows, variant, dtypes, d):
    right(make(variant, dtypes, (3, d)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "d"), [("LayerNorm", 65536), ("RMSNorm without weight", 262144), ("LayerNorm without either", 262144)]
)
def test_the_longest_rows_of_the_benchmark_and_beyond(variant, d):
    right(make(variant, "bfloat16", (1, d)))


def right(call: Call) -> None:
    """Check the bounds of test_functional.py at the call's own z, and that the bits are the same with and without gradients."""
    outputs = call()
    given = cotangents(outputs)
    ours = forward_and_backward(call, call, given)
    assert all(ours[name].equal(t) for name, t in outputs.items())
    assert all(t.is_contiguous() for t in outputs.values())
    assert_accurate(call, ours, given)
    terms, unit = magnitudes(call, ours["z"], given), arithmetic(call)
    exact = added(call, {name: t.to(f64) for name, t in call.tensors.items()})
    assert (
        (ours["z"].to(f64) - exact).abs() <= 4 * unit * terms["z"] + UNIT[ours["z"].dtype] * exact.abs() * 1.001
    ).all()


@pytest.mark.parametrize(
    ("variant", "dtypes"),
    rotate(list(OPTIONS), ["float32", "bfloat16", "float32 stream, bfloat16 branch", "float64"], 2),
)
def test_each_gradient_alone_equals_all_at_once(on_triton, variant, dtypes):
    call = make(variant, dtypes, (5, 19))
    tensors = {name: call.tensors.get(name) for name in ("residual", "branch", "weight", "bias")}
    if "row_scale" in call.tensors:  # the operators take one element a row
        call.tensors["row_scale"] = call.tensors["row_scale"].expand(5).clone()
    options = schema_options(call)
    _, z, stats = ops.add_norm_forward(*tensors.values(), call.eps, NORMS[call.norm], **options)
    given = cotangents({"z": z} if call.norm == "none" else {"y": z.to(call.out_dtype), "z": z})
    wants = sum(1 << bit for bit, name in enumerate(GRADIENTS) if name in call.tensors)
    named = {name: option for name, option in options.items() if name not in ("residual_dtype", "out_dtype")} | {
        "dresidual_dtype": DTYPES[dtypes].residual, "branch_dtype": DTYPES[dtypes].branch,
        "bias_dtype": DTYPES[dtypes].parameter, "residual": tensors["residual"], "branch": tensors["branch"],
    }  # fmt: skip
    backward = (given.get("y"), given["z"], z, stats, tensors["weight"], NORMS[call.norm])
    whole = ops.add_norm_backward(*backward, **named, grad_mask=wants)
    alone = {
        bit: ops.add_norm_backward(*backward, **named, grad_mask=1 << bit)
        for bit in range(len(GRADIENTS))
        if wants >> bit & 1
    }
    assert set(on_triton.ran) == {"add_norm_forward", "add_norm_backward"}
    with on_triton.off():
        _, z_want, stats_want = ops.add_norm_forward(*tensors.values(), call.eps, NORMS[call.norm], **options)
        want = ops.add_norm_backward(*backward, **named, grad_mask=wants)
    assert z.equal(z_want)
    assert stats.shape == stats_want.shape
    assert stats.dtype == stats_want.dtype
    terms, unit = magnitudes(call, z, given), arithmetic(call)
    for bit, name in enumerate(GRADIENTS):
        assert whole[bit].shape == want[bit].shape
        assert whole[bit].dtype == want[bit].dtype
        if name in call.tensors:
            assert agree(whole[bit], want[bit], unit, terms[name].reshape(want[bit].shape)), name
            assert [other.numel() > 0 for other in alone[bit]] == [place == bit for place in range(len(GRADIENTS))]
            assert alone[bit][bit].equal(whole[bit]), name


@pytest.mark.parametrize(
    ("seeds", "shape", "dtype"),
    product(
        [(0, 0), (-1, 2**32 - 2), (2**63 - 1, 2**40 + 7), (-(2**63), 2**61)],
        [(3, 1), (5, 2), (4, 3), (9, 7), (3, 64), (2, 65), (2, 1001), (2, 77), (2, 100)],
        [f32, bf16],
    ),
    ids=str,
)
def test_dropout_mask_equals_the_cpu_kernels(short_rows, seeds, shape, dtype):
    (seed, offset), (rows, d) = seeds, shape
    branch = torch.ones(rows, d, dtype=dtype, requires_grad=True)
    for p in (0.1, 1 - 2**-20):
        seeded = torch.tensor(seed)
        z = addnorm.add_residual(torch.zeros(rows, d, dtype=dtype), branch, dropout_p=p, seed=seeded, offset=offset)
        mask = philox.keep_mask((rows, d), p, seeded, offset)
        assert (z != 0).equal(mask), p
        branch.grad = None
        z.backward(torch.ones_like(z))
        assert (branch.grad != 0).equal(mask), p


def test_a_word_equal_to_the_threshold_is_kept():
    """The comparison is `>=`. With p = word / 2^32 for the word of the first element, the threshold is exactly that word."""
    word = philox4x32(0, 77)[0]
    for p, kept in [(word / 2**32, True), ((word + 1) / 2**32, False)]:
        z = addnorm.add_residual(torch.zeros(1, 4), torch.ones(1, 4), dropout_p=p, seed=torch.tensor(77))
        assert bool(z[0, 0] != 0) == kept


@pytest.mark.parametrize("p", [0.0, 2.0**-33, 1.0])
def test_the_ends_of_the_scale_of_dropout(p):
    residual, branch = torch.randn(3, 20), torch.randn(3, 20)
    branch[0, 0] = torch.inf
    z = addnorm.add_residual(residual, branch, dropout_p=p, seed=torch.tensor(1))
    assert z.equal(residual if p == 1.0 else residual + branch)  # below 2^-32 nothing is dropped


@pytest.mark.parametrize("variant", ["LayerNorm", "everything, RMSNorm"])
def test_where_an_input_or_a_gradient_lies_changes_no_bit(variant):
    call = make(variant, "bfloat16", (5, 24))
    given = cotangents(call())
    want = forward_and_backward(call, call, given)
    for place in make_layouts(call.tensors["residual"]):
        tensors, gradient = (
            {key: make_layouts(t).get(place, t) for key, t in some.items()} for some in (call.tensors, given)
        )
        other = Call(call.norm, call.eps, tensors, call.options)
        got = forward_and_backward(other, other, gradient)
        assert all(got[key].equal(t) for key, t in want.items()), place


@pytest.mark.parametrize(("d", "where_they_are"), [(24, True), (8, True), (20, False), (3, False)])
def test_aligned_rows_are_read_in_place(d, where_they_are):
    """Rows are aligned if their start and step are multiples of 16 bytes. Others are copied (see test_compiled.py for why)."""
    t = torch.randn(5, d).to(bf16)
    for place, there in {"itself": t, **make_layouts(t)}.items():
        rows, stride = arguments.to_rows(there, d)
        assert rows.equal(t)
        kept = place == "itself" or ("multiple of 16" in place and where_they_are)
        assert (rows.data_ptr() == there.data_ptr()) == kept, place
        assert stride == ((d // 16 + 1) * 16 if kept and place != "itself" else None)
        assert rows.data_ptr() % 16 == 0
    assert arguments.to_rows(None, d) == (None, None)
    assert arguments.to_rows(t[:1].expand(5, d), d)[1] == (0 if where_they_are else None)


def test_a_gradient_that_is_expanded_is_read_where_it_is():
    call = make("LayerNorm", "float32", (7, 24))
    one = torch.randn(24)
    want = cases.gradients(call, {"y": one.expand(7, 24).clone()})
    got = cases.gradients(call, {"y": one.expand(7, 24)})
    assert all(got[name].equal(t) for name, t in want.items())


def test_rows_may_lie_further_apart_than_32_bits_count():
    """Two rows in memory that is allocated and hardly touched."""
    far = torch.empty(2**31 + 64, dtype=bf16)
    x = far.as_strided((2, 16), (2**31 + 16, 1))
    x.copy_(torch.randn(2, 16))
    branch = torch.randn(2, 16).to(bf16)
    assert addnorm.add_layer_norm(x, branch).equal(addnorm.add_layer_norm(x.clone(), branch))


@pytest.mark.parametrize("rows", [1, 2, 31, 64])
@pytest.mark.parametrize("variant", ["LayerNorm", "everything, RMSNorm"])
def test_row_does_not_depend_on_its_neighbours(variant, rows):
    call = make(variant, "bfloat16", (64, 40))
    call.options.pop("dropout_p", None)  # whose mask depends on the row's position
    whole = forward_and_backward(call, call, given := cotangents(call()))
    part = call.rows(slice(64 - rows, 64))
    got = forward_and_backward(part, part, {name: t[64 - rows :] for name, t in given.items()})
    for name in ("y", "z", "residual", "branch"):
        assert got[name].equal(whole[name][64 - rows :]), name


@pytest.mark.parametrize("variant", ["LayerNorm", "everything, LayerNorm"])
def test_sums_over_chunks_of_rows_are_sums_over_all_rows(short_rows, variant):
    """As with many more rows than programs: chunks of several tiles, the last of them not full."""
    call = make(variant, "bfloat16", (51, 20))
    cut = plan.backward(51, 20, 2, 2)
    assert (cut.tile.rows, cut.chunk, cut.parts, cut.programs) == (2, 14, 1, 4)
    right(call)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e4 + 0.3, 5e36])
@pytest.mark.parametrize("d", [1, 65, 100])
def test_a_constant_row_gives_exactly_the_bias(short_rows, d, value):
    bias = torch.randn(d)
    y = addnorm.add_layer_norm(torch.full((2, d), value), torch.zeros(2, d), torch.randn(d), bias)
    assert y.equal(bias.expand(2, d))


@pytest.mark.parametrize("d", [33, 100])
def test_overflow_gives_the_bias_and_nan_stays_in_its_row(short_rows, d):
    bias = torch.randn(d)
    x = torch.randn(4, d)
    x[0] *= 1e30
    x[1, 5] = torch.nan
    y = addnorm.add_layer_norm(x, torch.zeros_like(x), None, bias)
    assert y[0].equal(bias)
    assert y[1].isnan().all()
    assert y[2:].isfinite().all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_parameters_act_as_on_the_cpu(on_triton, value):
    """A program's tile has more rows than there are. The others must not enter the sums."""
    for variant in ("everything, LayerNorm", "everything, RMSNorm", "residual_scale (d,)"):
        for name in set(make(variant, "float32", (3, 8)).tensors) - {"residual", "branch"}:
            call = make(variant, "float32", (3, 8))
            call.tensors[name].view(-1)[0] = value
            given = cotangents(call())
            got = cases.gradients(call, given)
            with on_triton.off():
                want = cases.gradients(call, given)
            for key, t in want.items():
                torch.testing.assert_close(
                    got[key], t, rtol=1e-4, atol=1e-5, equal_nan=True, msg=f"{variant}: {key} of {name}"
                )


@pytest.mark.parametrize("dtypes", ["float32", "bfloat16", "float32 stream, bfloat16 branch"])
@pytest.mark.parametrize("variant", [*BASIC, "everything, LayerNorm", "the add alone"])
def test_in_place_has_the_bits_of_the_function(variant, dtypes):
    call = make(variant, dtypes, (5, 19))
    want = call()
    tensors = {name: t.clone() for name, t in call.tensors.items()}
    names = {"layer": addnorm.add_layer_norm_, "rms": addnorm.add_rms_norm_, "none": addnorm.add_residual_}
    eps = {} if call.norm == "none" else {"eps": call.eps}
    with torch.no_grad():
        names[call.norm](**tensors, **call.options, **eps)
    assert tensors["residual"].equal(want["z"])
    assert tensors["branch"].equal(want.get("y", call.tensors["branch"]))


def test_an_overlap_is_refused_and_writes_nothing():
    buffer = torch.randn(9, 16)
    before = buffer.clone()
    with pytest.raises(ValueError, match="out shares memory with residual, expected exactly its memory or none of it"):
        addnorm.add_layer_norm(buffer[:8], torch.randn(8, 16), out=buffer[1:])
    assert buffer.equal(before)


@pytest.mark.parametrize(
    "wrong", [{"weight": torch.ones(5)}, {"row_scale": torch.ones(4)}, {"eps": -1.0}, {"dropout_p": 2.0}], ids=str
)
def test_what_is_wrong_is_refused_with_the_sentence(wrong):
    name = next(iter(wrong))
    with pytest.raises(ValueError, match=rf"^{name} "):
        addnorm.add_layer_norm(torch.randn(3, 4), torch.randn(3, 4), **wrong)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0,)], ids=str)
@pytest.mark.parametrize("variant", ["LayerNorm", "RMSNorm", "everything, LayerNorm", "the add alone"])
def test_empty_inputs_use_the_reference(variant, shape):
    call = make(variant, "bfloat16", shape)
    outputs = call()
    assert all(t.shape == shape for t in outputs.values())
    for name, grad in cases.gradients(call).items():
        assert grad.shape == call.tensors[name].shape
        assert not grad.any()


def test_a_stream_of_a_dtype_of_its_own_is_summed_as_beside_y():
    """The dtype changes how the compiler distributes the elements, and with them the order of the sums (test_compiled.py)."""
    call = make("residual_dtype bfloat16", "float32", (5, 200))
    assert call.y_alone().equal(call()["y"])


@pytest.mark.parametrize("used", [("y",), ("z",), ("y", "z")], ids=str)
@pytest.mark.parametrize("variant", ["LayerNorm", "everything, RMSNorm", "dropout"])
def test_unused_output_adds_no_gradient(variant, used):
    call = make(variant, "float32", (5, 30))
    given = cotangents(call())
    zeros = {name: t if name in used else torch.zeros_like(t) for name, t in given.items()}
    got, want = cases.gradients(call, {name: given[name] for name in used}), cases.gradients(call, zeros)
    for name in leaves(call):
        expected = torch.zeros_like(want[name]) if name in ("weight", "bias") and used == ("z",) else want[name]
        assert (got[name] if got[name] is not None else torch.zeros_like(expected)).equal(expected), name


@pytest.mark.parametrize("variant", ["LayerNorm", "everything, RMSNorm", "the add alone"])
def test_rows_longer_than_a_grid_has_programs_are_the_references(monkeypatch, variant):
    call = make(variant, "float32", (2, 20))
    want = forward_and_backward(call, call, given := cotangents(call()))
    monkeypatch.setattr(plan, "MAX_ROW", 19)
    for module in (operators, gradients):
        monkeypatch.setattr(module, "launch", None)  # nothing is launched
    got = forward_and_backward(call, call, given)
    assert all(torch.allclose(got[name], t, rtol=1e-4, atol=1e-5) for name, t in want.items())


@pytest.mark.parametrize("d", [plan.MAX_ROW, 2**20, 2**16])
def test_no_axis_of_a_grid_is_longer_than_cuda_allows(d):
    for sums in range(6):
        cut = plan.backward(2**40 // d, d, sums, 2)
        assert cut.parts <= 65535
        assert cut.programs < 2**31
