"""Tests of the in-place forms and out=: they have the functions' bits, write to the right memory and to no other."""

import pytest
import torch

import addnorm
from addnorm.ops import cpu
from support.cases import BASIC, DTYPES, FUNCTIONS, VARIANTS, Call, bf16, f32, f64, make
from support.inplace_calls import IN_PLACE, OWN_DTYPES, in_place, into, nan, same
from support.memory_layouts import LAYOUTS
from support.pairwise import product, rotate

ALONE = {"layer": addnorm.layer_norm, "rms": addnorm.rms_norm}
NORMED = [name for name, variant in VARIANTS.items() if variant.norm != "none"]
SHAPES = [(9, 100), (2, 1, 3, 65), (17,), (1, 768), (0, 8), (3, 0), (2, 0, 5)]


# ------------------------------------------------------------------------------------------------------ the same bits


@pytest.mark.parametrize(("variant", "dtypes"), rotate(OWN_DTYPES, list(DTYPES), 3))
def test_in_place_has_the_bits_of_the_function(variant, dtypes):
    for shape in SHAPES if variant in BASIC else SHAPES[:3]:
        call = make(variant, dtypes, shape)
        with torch.no_grad():
            assert same(in_place(call), call()), shape


@pytest.mark.parametrize(("variant", "dtypes"), rotate(list(VARIANTS), list(DTYPES), 3))
def test_out_has_the_bits_of_the_function_and_is_returned(variant, dtypes):
    for shape in SHAPES if variant in BASIC else SHAPES[:3]:
        call = make(variant, dtypes, shape)
        before = {name: t.clone() for name, t in call.tensors.items()}
        expected = call()
        out = tuple(map(nan, expected.values()))
        if call.norm == "none":
            assert into(call, out[0]) is out[0]
        else:
            y, z = into(call, out)
            assert y is out[0]
            assert z is out[1]
            alone = nan(expected["y"])
            assert into(call, alone) is alone
            assert alone.equal(call.y_alone())
        assert same(dict(zip(expected, out, strict=True)), expected), shape
        assert same(call.tensors, before)


@pytest.mark.parametrize(
    ("norm", "stream", "dtype"),
    product(list(FUNCTIONS), [f32, bf16, torch.float16, f64], [f32, bf16, torch.float16, f64]),
)
def test_out_dtypes_choose_the_result_dtypes(norm, stream, dtype):
    call = make({"layer": "LayerNorm", "rms": "RMSNorm", "none": "the add alone"}[norm], "bfloat16", (5, 33))
    with_dtypes = Call(
        norm, call.eps, call.tensors, {"residual_dtype": stream} | ({"out_dtype": dtype} if norm != "none" else {})
    )
    expected = with_dtypes()
    out = tuple(map(nan, expected.values()))
    into(call, out if norm != "none" else out[0])
    assert same(dict(zip(expected, out, strict=True)), expected)


def test_default_eps_follows_the_dtype_of_outs_z():
    x, b = 1e-9 * torch.randn(4, 8), 1e-9 * torch.randn(4, 8)
    y, z = addnorm.add_rms_norm(x, b, residual_dtype=f64, return_residual=True)
    out = (nan(y), nan(z))
    addnorm.add_rms_norm(x, b, return_residual=True, out=out)
    assert same({"y": out[0], "z": out[1]}, {"y": y, "z": z})
    x64, y64 = x.to(f64), b.to(f64)
    expected = addnorm.add_rms_norm(x64, y64)
    assert addnorm.add_rms_norm_(x64, y64).equal(expected)


@pytest.mark.parametrize("casting", ["llama", "t5"])
def test_casting_is_an_option_in_place_too(casting):
    call = make("RMSNorm", "bfloat16", (50, 64))
    call.options["casting"] = casting
    assert not call()["y"].equal(make("RMSNorm", "bfloat16", (50, 64))()["y"])
    assert same(in_place(call), call())


@pytest.mark.parametrize("norm", FUNCTIONS)
def test_in_place_dropout_equals_the_functions(norm):
    call = make({"layer": "LayerNorm", "rms": "RMSNorm", "none": "the add alone"}[norm], "float32", (16, 16))
    undropped = call()
    call.options = {"dropout_p": 0.5}
    torch.manual_seed(7)
    expected = call()
    torch.manual_seed(7)
    assert same(in_place(call), expected)
    assert not expected["z"].equal(undropped["z"])
    call.options["training"] = False
    assert same(in_place(call), undropped)


@pytest.mark.parametrize("normalized_shape", [6, (5, 6), [4, 5, 6]])
@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
def test_normalized_shape_may_have_several_dimensions(normalized_shape, transposed):
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    residual, branch, weight, bias = torch.randn(4, 5, 6), torch.randn(4, 5, 6), torch.randn(shape), torch.randn(shape)
    if transposed:
        residual, branch = (t.transpose(0, 2).contiguous().transpose(0, 2) for t in (residual, branch))
    options = {"normalized_shape": normalized_shape, "layer_scale": 0.5}
    y, z = addnorm.add_layer_norm(residual, branch, weight, bias, return_residual=True, **options)
    alone = addnorm.rms_norm(residual, weight, normalized_shape=normalized_shape)
    assert addnorm.rms_norm(residual, weight, normalized_shape=normalized_shape, out=nan(residual)).equal(alone)
    a, b = residual.clone(), branch.clone()
    assert a.is_contiguous() != transposed
    assert addnorm.add_layer_norm(a, b, weight, bias, out=a, **options).equal(y)
    addnorm.add_layer_norm_(residual, branch, weight, bias, **options)
    assert same({"y": branch, "z": residual}, {"y": y, "z": z})


# ------------------------------------------------------------------------------------------------------------- memory

# The aliases of y and z among residual and branch; None is a separate buffer.
ALIASES = [
    ("residual", None), ("branch", None), (None, "branch"), (None, "residual"), ("residual", "branch"), ("branch", "residual"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("alias", "variant", "dtypes"),
    product(
        ALIASES,
        ["LayerNorm", "RMSNorm without weight", "everything, LayerNorm"],
        ["float32", "bfloat16", "bfloat16 with float32 parameters", "float16", "float64"],
    ),
    ids=str,
)
def test_out_may_be_exactly_residual_or_branch(alias, variant, dtypes):
    y, z = alias
    for shape in [(300, 65), (1, 9)]:
        call = make(variant, dtypes, shape)
        expected = call()
        out = tuple(call.tensors.get(name, nan(t)) for name, t in zip((y, z), expected.values(), strict=True))
        into(call, out if z is not None else out[0])
        assert out[0].equal(expected["y"])
        assert z is None or out[1].equal(expected["z"])


@pytest.mark.parametrize(
    ("norm", "dtypes", "options"),
    product(list(ALONE), ["float32", "bfloat16", "float16", "float64"], [{}, {"weight_offset": 1.0}]),
    ids=str,
)
def test_norm_alone_may_overwrite_its_input(norm, dtypes, options):
    for shape in SHAPES:
        call = make("RMSNorm with bias", dtypes, shape)
        x, weight, bias = (call.tensors[name] for name in ("residual", "weight", "bias"))
        expected = ALONE[norm](x, weight, bias, **options)
        other = nan(x)
        assert ALONE[norm](x, weight, bias, **options, out=other) is other
        assert ALONE[norm](x, weight, bias, **options, out=x) is x
        assert x.equal(expected)
        assert other.equal(expected)


def test_out_may_reuse_memory_of_equal_element_size():
    x, b = torch.randn(6, 8).to(bf16), torch.randn(6, 8).to(bf16)
    expected = addnorm.add_layer_norm(x, b, out_dtype=torch.float16)
    assert addnorm.add_layer_norm(x, b, out=b.view(torch.float16)).equal(expected)


def test_add_residual_may_add_a_tensor_to_itself():
    x = torch.randn(3, 8)
    expected = 2 * x
    assert addnorm.add_residual_(x, x) is x
    assert x.equal(expected)


@pytest.mark.parametrize(
    ("layout", "variant", "dtypes"),
    product(
        list(LAYOUTS),
        ["LayerNorm", "RMSNorm with bias", "everything, RMSNorm", "the add alone"],
        ["float32", "bfloat16", "float32 stream, bfloat16 branch", "float64"],
    ),
)
def test_strided_memory_is_written_and_nothing_beside_it(layout, variant, dtypes):
    call = make(variant, dtypes, (70, 37))
    expected = call()
    tensors = {name: LAYOUTS[layout](t) if name in ("residual", "branch") else t for name, t in call.tensors.items()}
    pairs = {name: (tensors[name], t._base.clone()) for name, t in tensors.items() if t._base is not None}
    assert pairs
    actual = in_place(call, tensors)
    assert same(actual, expected)
    for name, (t, base) in pairs.items():
        unwritten = base.as_strided(t.shape, t.stride(), t.storage_offset())
        unwritten.copy_(t)
        assert base.equal(t._base), f"something beside {name} was written"


def test_interleaved_columns_are_separate_memory():
    for cut in (lambda t: (t[:, :8], t[:, 8:]), lambda t: (t[:, ::2], t[:, 1::2]), lambda t: (t[:3, :8], t[3:, 8:])):
        buffer = torch.randn(6, 16)
        x, b = cut(buffer)
        y, z = addnorm.add_layer_norm(x, b, return_residual=True)
        addnorm.add_layer_norm_(x, b)
        assert same({"y": b, "z": x}, {"y": y, "z": z})


# The reference computes into new tensors and copies.
@pytest.mark.skipif(cpu.ISA is None, reason=f"the C++ kernels: {cpu.DETAIL}")
@pytest.mark.parametrize("dtypes", ["float32", "bfloat16", "float32 stream, bfloat16 branch"])
@pytest.mark.parametrize("variant", ["LayerNorm", "RMSNorm"])
def test_contiguous_memory_is_overwritten_without_any_new(variant, dtypes):
    call = make(variant, dtypes, (64, 64))
    tensors = dict(call.tensors)

    def allocated(function):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            function()
        return [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]

    assert allocated(call)
    assert allocated(lambda: IN_PLACE[call.norm](**tensors)) == []
