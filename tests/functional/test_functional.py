"""Tests of the functions against a float64 oracle: every option and dtype, forward and gradients (see support/accuracy.py)."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import addnorm
from addnorm.bench import exactness
from support.accuracy import assert_accurate, forward_and_backward
from support.cases import BASIC, DTYPES, OPTIONS, SHAPES, bf16, cotangents, f32, f64, make
from support.fuzz_bits import check_norm_alone, compute_results, find_differences
from support.fuzz_calls import take
from support.oracle import UNIT, plain, relative, rms, truth, worst
from support.pairwise import mark_slow, product, rotate, with_values

# Each variant in some dtypes; test_operators.py compares every option in every dtype with the reference.
NORMS = ("LayerNorm", "RMSNorm")
THREADED = ("everything, LayerNorm", "row_scale and layer_scale", "residual_scale 0-d")
TABLE = [
    *with_values(rotate(list(OPTIONS), list(DTYPES), 3), (6, 11, 33)),
    *with_values(rotate(list(BASIC), list(DTYPES), 3), (70, 65)),
    *mark_slow(
        itertools.product(NORMS, DTYPES, SHAPES),
        [(NORMS[(i + k) % 2], [*DTYPES][(3 * i + k) % 10], shape) for i, shape in enumerate(SHAPES) for k in range(3)],
    ),
]
# Large enough for several threads, in the rows or in the sums over them.
LARGE = [
    *with_values(rotate(list(NORMS), list(DTYPES), 5), (300, 257)),
    *with_values(rotate(list(NORMS), list(DTYPES), 5), (1, 40001)),
    *itertools.product(THREADED, ("float32", "bfloat16 with float32 parameters", "float64"), [(2000, 24)]),
]


@pytest.mark.parametrize(("variant", "dtypes", "shape"), TABLE, ids=str)
def test_outputs_and_gradients_are_as_accurate_as_torch(variant, dtypes, shape):
    """And have the same bits in every way to call: see support/fuzz_bits.py."""
    case = take(make(variant, dtypes, shape))
    results = compute_results(case)
    assert_accurate(case.call, {name.removeprefix("d"): t for name, t in results.items()}, case.grad_outputs)
    assert find_differences(case, results) + check_norm_alone(case) == []


@pytest.mark.parametrize(("variant", "dtypes", "shape"), LARGE, ids=str)
def test_bits_do_not_depend_on_threads_or_batch(variant, dtypes, shape):
    case = take(make(variant, dtypes, shape))
    assert find_differences(case, compute_results(case)) == []


@pytest.mark.parametrize("d", [48, 64, 80, 129, 192, 1000])
@pytest.mark.parametrize("norm", [0, 1], ids=NORMS)
def test_many_bfloat16_rows_have_the_bits_of_one(norm, d):
    """Rows without options are read in pairs of elements; one row is not."""
    residual, branch = (torch.randn(11, d) + torch.linspace(-9, 9, 11)[:, None] for _ in range(2))
    residual[3, d // 3], residual[5, 7], branch[6, d - 1] = math.inf, math.nan, 3e38
    residual[8] *= 1e-38  # subnormal
    residual, branch = residual.to(bf16), branch.to(bf16)
    weight = torch.rand(d).add(0.5)
    weight[11:13] = torch.tensor([0x7FFFFFFF, -0x007F0001], dtype=torch.int32).view(
        f32
    )  # NaNs, with bits in both halves

    def compute(rows):
        bias = torch.linspace(-1, 1, d) if norm == 0 else None
        y, z, stats = torch.ops.addnorm.add_norm_forward(residual[rows], branch[rows], weight, bias, 1e-5, norm)
        return y.view(torch.int16), z.view(torch.int16), stats.view(torch.int32)

    single = [compute(slice(k, k + 1)) for k in range(11)]
    for k, every in enumerate(compute(slice(None))):
        assert every.equal(torch.cat([results[k] for results in single]))


@pytest.mark.parametrize("dtypes", list(DTYPES)[:5])
@pytest.mark.parametrize("variant", ["LayerNorm", "RMSNorm"])
def test_error_on_many_elements_is_at_most_torchs(variant, dtypes):
    call = make(variant, dtypes, (128, 768))
    grad_outputs = cotangents(call())
    ours = forward_and_backward(call, call, grad_outputs)
    theirs = forward_and_backward(lambda tensors: plain(call, tensors), call, grad_outputs)
    assert ours["z"].equal(theirs["z"])
    expected = truth(call, ours["z"], grad_outputs)
    for name in ("y", "residual", "branch"):
        own, torchs = (results[name].to(f64) - expected[name] for results in (ours, theirs))
        assert rms(own) <= 1.02 * rms(torchs), name
        assert worst(own) <= 2 * worst(torchs), name


@pytest.mark.parametrize(
    ("variant", "stream", "parameter"),
    product(["LayerNorm", "RMSNorm with bias", "everything, LayerNorm"], [f32, bf16], [f32, bf16]),
)
def test_parameter_gradients_are_accumulated_in_float32(variant, stream, parameter):
    """The sums over rows are computed in blocks, from 1024 rows on of several chunks each."""
    call = make(variant, DTYPES["bfloat16"]._replace(residual=stream, parameter=parameter), (4096 + 37, 96))
    grad_outputs = cotangents(call())
    ours = forward_and_backward(call, call, grad_outputs)
    expected = truth(call, ours["z"], grad_outputs)
    # float32 sums over fixed chunks, and for bfloat16 parameters one rounding, whose relative L2 error over many elements
    # is at most 2^-9 = 2e-3 (its largest is 2^-8).
    for name in call.tensors.keys() - {"residual", "branch"}:
        assert relative(ours[name], expected[name]) < (1e-6 if parameter == f32 else 2e-3), name


@pytest.mark.parametrize(
    ("dtype", "residual_dtype"), [(f32, None), (bf16, None), (torch.float16, None), (f64, None), (f32, f64)]
)
def test_rms_norm_without_eps_takes_torchs(dtype, residual_dtype):
    x = 1e-3 * torch.randn(4, 50).to(dtype)  # values small enough for eps to matter
    wide = residual_dtype or dtype
    expected = F.rms_norm(x.to(f64), (50,), eps=torch.finfo(f64 if wide == f64 else f32).eps)
    y = addnorm.add_rms_norm(x, torch.zeros_like(x), residual_dtype=residual_dtype)
    for result in (y, addnorm.rms_norm(x.to(wide)), F.rms_norm(x.to(wide), (50,))):
        assert relative(result, expected) < 2 * UNIT[dtype]


@pytest.mark.parametrize(
    ("name", "dtypes", "options"),
    [
        ("Llama", (bf16, bf16), {}),
        ("Llama", (torch.float16, torch.float16), {}),
        ("T5", (bf16, bf16), {}),
        ("T5", (f32, bf16), {"out_dtype": bf16}),
        ("Gemma", (bf16, bf16), {}),
    ],
)
def test_casting_rounds_where_the_model_rounds(name, dtypes, options):
    call, (formula, casting, offset) = make("RMSNorm", "float64", (200, 64)), exactness.MODELS[name]
    residual, branch, weight = (call.tensors[name] for name in ("residual", "branch", "weight"))
    residual, branch, weight = residual.to(dtypes[0]), branch.to(dtypes[0]), weight.to(dtypes[1])
    options = {"casting": casting, "weight_offset": offset, **options}
    y = addnorm.add_rms_norm(residual, branch, weight, eps=exactness.MODEL_EPS, **options)
    expected = formula(residual + branch, weight)
    other = addnorm.add_rms_norm(
        residual, branch, weight, eps=exactness.MODEL_EPS, casting="float32", out_dtype=y.dtype
    )
    # Another order of summation may round one or two of ten thousand elements the other way.
    assert (y != expected).float().mean() < 1e-3
    assert (other != expected).float().mean() > 1e-2, "the order of rounding should matter here"


def test_dropout_is_off_when_not_training():
    residual, branch = torch.randn(4, 8), torch.randn(4, 8)
    for function in (addnorm.add_layer_norm, addnorm.add_rms_norm, addnorm.add_residual):
        assert function(residual, branch, dropout_p=0.5, training=False).equal(function(residual, branch))
        assert not function(residual, branch, dropout_p=0.5, training=True).equal(function(residual, branch))


@pytest.mark.parametrize("function", [addnorm.add_residual, addnorm.add_residual_])
def test_dropout_draws_its_seed_from_torchs_generator(function):
    def call():
        return function(torch.zeros(16, 16), torch.ones(16, 16), dropout_p=0.5)

    torch.manual_seed(7)
    first, second = call(), call()
    torch.manual_seed(7)
    assert call().equal(first)
    assert not first.equal(second)
