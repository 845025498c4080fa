"""The in-place forms and out=: the bits of the functions, in the memory that was given, and nothing else touched."""

import contextlib
import functools
import re

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

import addnorm
from addnorm.ops import cpu
from cases import BASIC, DTYPES, FUNCTIONS, VARIANTS, Call, bf16, f32, f64, make

IN_PLACE = {"layer": addnorm.add_layer_norm_, "rms": addnorm.add_rms_norm_, "none": addnorm.add_residual_}
ALONE = {"layer": addnorm.layer_norm, "rms": addnorm.rms_norm}
# Memory has its dtype, so these options are for out= alone.
OWN_DTYPES = [name for name, variant in VARIANTS.items() if not variant.options.keys() & {"stream_dtype", "out_dtype"}]
NORMED = [name for name, variant in VARIANTS.items() if variant.norm != "none"]
SHAPES = [(9, 100), (2, 1, 3, 65), (17,), (1, 768), (0, 8), (3, 0), (2, 0, 5)]


def in_place(call: Call, tensors: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The call made in place on copies of its tensors, or on those given: what residual and branch have become."""
    tensors = {name: t.clone() for name, t in call.tensors.items()} if tensors is None else tensors
    eps = {} if call.norm == "none" else {"eps": call.eps}
    returned = IN_PLACE[call.norm](**tensors, **call.options, **eps)
    assert returned is tensors["residual" if call.norm == "none" else "branch"]
    for name, t in tensors.items():
        if name != "residual" and (name != "branch" or call.norm == "none"):
            assert t.equal(call.tensors[name]), f"{name} was to be left as it was"
    return {"z": tensors["residual"]} if call.norm == "none" else {"y": tensors["branch"], "z": tensors["residual"]}


def into(call: Call, out, **options):
    """The call with out=; what it returns."""
    arguments = call.tensors | call.options | options
    if call.norm == "none":
        return addnorm.add_residual(**arguments, out=out)
    return FUNCTIONS[call.norm](**arguments, eps=call.eps, return_residual=isinstance(out, tuple), out=out)


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return all(got[name].equal(t) and got[name].dtype == t.dtype for name, t in want.items()) and len(got) == len(want)


def nan(like: Tensor) -> Tensor:
    """Memory in which an element that nobody writes is seen."""
    return torch.full_like(like, float("nan"), memory_format=torch.contiguous_format)


# ------------------------------------------------------------------------------------------------------ the same bits


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("variant", OWN_DTYPES)
def test_in_place_has_the_bits_of_the_function(variant, dtypes):
    for shape in SHAPES if variant in BASIC else SHAPES[:3]:
        call = make(variant, dtypes, shape)
        with torch.no_grad():
            assert same(in_place(call), call()), shape


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_out_has_the_bits_of_the_function_and_is_what_is_returned(variant, dtypes):
    for shape in SHAPES if variant in BASIC else SHAPES[:3]:
        call = make(variant, dtypes, shape)
        before = {name: t.clone() for name, t in call.tensors.items()}
        want = call()
        out = tuple(map(nan, want.values()))
        if call.norm == "none":
            assert into(call, out[0]) is out[0]
        else:
            y, z = into(call, out)
            assert y is out[0]
            assert z is out[1]
            alone = nan(want["y"])
            assert into(call, alone) is alone
            assert alone.equal(call.y_alone())
        assert same(dict(zip(want, out, strict=True)), want), shape
        assert same(call.tensors, before)


@pytest.mark.parametrize("dtype", [f32, bf16, torch.float16, f64])
@pytest.mark.parametrize("stream", [f32, bf16, torch.float16, f64])
@pytest.mark.parametrize("norm", FUNCTIONS)
def test_the_dtypes_of_out_are_those_of_the_results(norm, stream, dtype):
    call = make({"layer": "LayerNorm", "rms": "RMSNorm", "none": "the add alone"}[norm], "bfloat16", (5, 33))
    told = Call(
        norm, call.eps, call.tensors, {"stream_dtype": stream} | ({"out_dtype": dtype} if norm != "none" else {})
    )
    want = told()
    out = tuple(map(nan, want.values()))
    into(call, out if norm != "none" else out[0])
    assert same(dict(zip(want, out, strict=True)), want)


def test_without_eps_rms_norm_takes_that_of_the_streams_memory():
    x, b = 1e-9 * torch.randn(4, 8), 1e-9 * torch.randn(4, 8)
    y, z = addnorm.add_rms_norm(x, b, stream_dtype=f64, return_residual=True)
    out = (nan(y), nan(z))
    addnorm.add_rms_norm(x, b, return_residual=True, out=out)
    assert same({"y": out[0], "z": out[1]}, {"y": y, "z": z})
    x64, y64 = x.to(f64), b.to(f64)
    want = addnorm.add_rms_norm(x64, y64)
    assert addnorm.add_rms_norm_(x64, y64).equal(want)


@pytest.mark.parametrize("casting", ["llama", "t5"])
def test_casting_is_an_option_in_place_too(casting):
    call = make("RMSNorm", "bfloat16", (50, 64))
    call.options["casting"] = casting
    assert not call()["y"].equal(make("RMSNorm", "bfloat16", (50, 64))()["y"])
    assert same(in_place(call), call())


@pytest.mark.parametrize("norm", FUNCTIONS)
def test_dropout_draws_what_the_function_draws_and_is_off_when_not_training(norm):
    call = make({"layer": "LayerNorm", "rms": "RMSNorm", "none": "the add alone"}[norm], "float32", (16, 16))
    undropped = call()
    call.options = {"dropout_p": 0.5}
    torch.manual_seed(7)
    want = call()
    torch.manual_seed(7)
    assert same(in_place(call), want)
    assert not want["z"].equal(undropped["z"])
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

# Which of residual and branch y and z are written over; None is memory of their own.
ALIASES = [
    ("residual", None), ("branch", None), (None, "branch"), (None, "residual"), ("residual", "branch"), ("branch", "residual"),
]  # fmt: skip


@pytest.mark.parametrize("dtypes", ["float32", "bfloat16", "bfloat16 with float32 parameters", "float16", "float64"])
@pytest.mark.parametrize("variant", ["LayerNorm", "RMSNorm without weight", "everything, LayerNorm"])
@pytest.mark.parametrize(("y", "z"), ALIASES, ids=str)
def test_out_may_be_exactly_residual_or_branch(y, z, variant, dtypes):
    for shape in [(300, 65), (1, 9)]:
        call = make(variant, dtypes, shape)
        want = call()
        out = tuple(call.tensors.get(name, nan(t)) for name, t in zip((y, z), want.values(), strict=True))
        into(call, out if z is not None else out[0])
        assert out[0].equal(want["y"])
        assert z is None or out[1].equal(want["z"])


@pytest.mark.parametrize("norm", ALONE)
@pytest.mark.parametrize("dtypes", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("options", [{}, {"weight_offset": 1.0}], ids=str)
def test_the_norm_alone_may_be_written_over_its_input(norm, dtypes, options):
    for shape in SHAPES:
        call = make("RMSNorm with bias", dtypes, shape)
        x, weight, bias = (call.tensors[name] for name in ("residual", "weight", "bias"))
        want = ALONE[norm](x, weight, bias, **options)
        other = nan(x)
        assert ALONE[norm](x, weight, bias, **options, out=other) is other
        assert ALONE[norm](x, weight, bias, **options, out=x) is x
        assert x.equal(want)
        assert other.equal(want)


def test_memory_of_another_dtype_with_elements_of_the_same_size_may_be_written_over():
    x, b = torch.randn(6, 8).to(bf16), torch.randn(6, 8).to(bf16)
    want = addnorm.add_layer_norm(x, b, out_dtype=torch.float16)
    assert addnorm.add_layer_norm(x, b, out=b.view(torch.float16)).equal(want)


def test_the_add_alone_may_add_a_tensor_to_itself():
    x = torch.randn(3, 8)
    want = 2 * x
    assert addnorm.add_residual_(x, x) is x
    assert x.equal(want)


LAYOUTS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "every second column": lambda t: torch.stack([t, t], -1)[..., 0],
    "a slice of wider rows": lambda t: torch.cat([t, t, t], 1)[:, t.shape[1] : 2 * t.shape[1]],
    "some rows of a longer tensor": lambda t: torch.cat([t, t, t])[t.shape[0] : 2 * t.shape[0]],
    "one element off alignment": lambda t: torch.cat([t.new_zeros(1), t.flatten(), t.new_zeros(1)])[1:-1].view(t.shape),
    "seven elements off alignment": lambda t: torch.cat([t.new_zeros(7), t.flatten(), t.new_zeros(1)])[7:-1].view(
        t.shape
    ),
}


@pytest.mark.parametrize("dtypes", ["float32", "bfloat16", "float32 stream, bfloat16 branch", "float64"])
@pytest.mark.parametrize("variant", ["LayerNorm", "RMSNorm with bias", "everything, RMSNorm", "the add alone"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_in_any_layout_is_written_and_nothing_beside_it(layout, variant, dtypes):
    call = make(variant, dtypes, (70, 37))
    want = call()
    tensors = {name: LAYOUTS[layout](t) if name in ("residual", "branch") else t for name, t in call.tensors.items()}
    pairs = {name: (tensors[name], t._base.clone()) for name, t in tensors.items() if t._base is not None}
    assert pairs
    got = in_place(call, tensors)
    assert same(got, want)
    for name, (t, base) in pairs.items():
        unwritten = base.as_strided(t.shape, t.stride(), t.storage_offset())
        unwritten.copy_(t)
        assert base.equal(t._base), f"something beside {name} was written"


def test_interleaved_columns_and_the_halves_of_one_buffers_rows_share_nothing():
    for cut in (lambda t: (t[:, :8], t[:, 8:]), lambda t: (t[:, ::2], t[:, 1::2]), lambda t: (t[:3, :8], t[3:, 8:])):
        buffer = torch.randn(6, 16)
        x, b = cut(buffer)
        y, z = addnorm.add_layer_norm(x, b, return_residual=True)
        addnorm.add_layer_norm_(x, b)
        assert same({"y": b, "z": x}, {"y": y, "z": z})


# The reference computes aside and copies.
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


# ----------------------------------------------------------------------------------------------------------- refusals

x, b, row = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
buffer = torch.randn(100)
first, half_over = buffer[:32].view(4, 8), buffer[16:48].view(4, 8)
YZ = functools.partial(addnorm.add_layer_norm, return_residual=True)

# The call, and its sentence.
REFUSED = {
    "residual and branch are one": (
        lambda: addnorm.add_layer_norm_(x, x), ValueError,
        "branch shares memory with residual, expected memory of its own, since both are written: pass branch.clone().",
    ),
    "residual and branch overlap": (
        lambda: addnorm.add_rms_norm_(first, half_over), ValueError, "branch shares memory with residual, expected memory of"
    ),
    "residual and branch overlap under an option": (
        lambda: addnorm.add_rms_norm_(first, half_over, layer_scale=0.5), ValueError,
        "branch shares memory with residual, expected memory of",
    ),
    "residual and branch overlap, strided": (
        lambda: addnorm.add_layer_norm_(buffer[:96].view(6, 16)[:, :8], buffer[:96].view(6, 16)[:, 7:15]), ValueError,
        "branch shares memory with residual, expected memory of its own",
    ),
    "residual and branch overlap, several dimensions": (
        lambda: addnorm.add_layer_norm_(first, half_over, normalized_shape=(4, 8)), ValueError,
        "branch shares memory with residual, expected memory of its own",
    ),
    "the add alone overlaps": (
        lambda: addnorm.add_residual_(first, half_over), ValueError,
        "residual shares memory with branch, expected exactly its memory or none of it: pass residual.clone().",
    ),
    "out is one tensor twice": (
        lambda: YZ(x, b, out=(row.expand(4, 8).clone(),) * 2), ValueError,
        "out[0] shares memory with out[1], expected memory of its own, since both are written: pass out[0].clone().",
    ),
    "y and z overlap": (lambda: YZ(x, b, out=(first, half_over)), ValueError, "out[0] shares memory with out[1], expected"),
    "out overlaps residual": (
        lambda: addnorm.add_layer_norm(first, b, out=half_over), ValueError,
        "out shares memory with residual, expected exactly its memory or none of it: pass out.clone().",
    ),
    "out overlaps branch": (
        lambda: addnorm.add_rms_norm(x, first, weight_offset=1.0, weight=row, out=half_over), ValueError,
        "out shares memory with branch, expected exactly its memory or none of it: pass out.clone().",
    ),
    "z overlaps branch": (lambda: YZ(x, first, out=(b.clone(), half_over)), ValueError, "out[1] shares memory with branch, exp"),
    "out overlaps x": (
        lambda: addnorm.layer_norm(first, out=half_over), ValueError,
        "out shares memory with x, expected exactly its memory or none of it: pass out.clone().",
    ),
    "out overlaps x by one row": (
        lambda: addnorm.rms_norm(buffer[:96].view(12, 8)[1:5], out=buffer[:96].view(12, 8)[4:8]), ValueError,
        "out shares memory with x, expected exactly its memory or none of it: pass out.clone().",
    ),
    "out is x the other way round": (
        lambda: addnorm.layer_norm(buffer[:64].view(8, 8), out=buffer[:64].view(8, 8).t()), ValueError,
        "out shares memory with x, expected exactly its memory or none of it",
    ),
    "out is x in elements of another size": (
        lambda: addnorm.layer_norm(first, out=first.view(bf16)[:, :8]), ValueError, "out shares memory with x, expected exactly"
    ),
    "the weight is a row of residual": (
        lambda: addnorm.add_layer_norm_(first, b, first[2]), ValueError,
        "residual shares memory with weight, expected memory of its own: pass residual.clone().",
    ),
    "the bias is a row of branch": (
        lambda: addnorm.add_layer_norm_(x, first, row, first[2]), ValueError, "branch shares memory with bias, expected memory"
    ),
    "layer_scale is a row of residual": (
        lambda: addnorm.add_residual_(first, b, layer_scale=first[1]), ValueError,
        "residual shares memory with layer_scale, expected memory of its own: pass residual.clone().",
    ),
    "residual_scale is an element of out": (
        lambda: addnorm.add_layer_norm(x, b, residual_scale=first[1, 1], out=first), ValueError,
        "out shares memory with residual_scale, expected memory of its own",
    ),
    "row_scale is a column of branch": (
        lambda: addnorm.add_rms_norm_(x, first, row_scale=first[:, 0]), ValueError, "branch shares memory with row_scale, expe"
    ),
    "branch_bias is a row of branch": (
        lambda: addnorm.add_rms_norm_(x, first, branch_bias=first[0]), ValueError, "branch shares memory with branch_bias, exp"
    ),
    "residual is expanded": (
        lambda: addnorm.add_layer_norm_(row.expand(4, 8), b), ValueError,
        "residual has elements that share memory (it is expanded, say), expected a place for each: pass residual.clone().",
    ),
    "out is a sliding window": (
        lambda: addnorm.add_layer_norm(x, b, out=torch.randn(11).unfold(0, 8, 1)), ValueError,
        "out has elements that share memory (it is expanded, say), expected a place for each: pass out.clone().",
    ),
    "out has another shape": (
        lambda: addnorm.add_layer_norm(x, b, out=torch.empty(8, 4)), ValueError,
        "out has shape (8, 4), expected (4, 8), that of the result: nothing is resized. Make it with torch.empty(4, 8).",
    ),
    "out is empty": (lambda: addnorm.add_rms_norm(x, b, out=torch.empty(0)), ValueError, "out has shape (0,), expected (4, 8),"),
    "out has another shape of several dimensions": (
        lambda: addnorm.layer_norm(x, normalized_shape=(4, 8), out=torch.empty(8, 4)), ValueError,
        "out has shape (8, 4), expected (4, 8), that of the result",
    ),
    "z has another shape": (
        lambda: YZ(x, b, layer_scale=2.0, out=(x.clone(), torch.empty(3, 8))), ValueError,
        "out[1] has shape (3, 8), expected (4, 8), that of the result",
    ),
    "out is elsewhere": (
        lambda: addnorm.add_residual(x, b, out=torch.empty(4, 8, device="meta")), ValueError,
        "out is on meta, expected cpu, the device of the inputs: make it with device='cpu'.",
    ),
    "out is an integer": (
        lambda: addnorm.rms_norm(x, out=torch.empty(4, 8).int()), TypeError,
        "out has dtype int32, expected float32, bfloat16, float16 or float64: ",
    ),
    "out has not the out_dtype": (
        lambda: addnorm.layer_norm(x, out_dtype=bf16, out=torch.empty(4, 8)), TypeError,
        "out has dtype float32, expected bfloat16, which was asked for: leave the dtype to the memory, or make it with "
        "dtype=torch.bfloat16.",
    ),
    "z has not the stream_dtype": (
        lambda: YZ(x, b, stream_dtype=f64, out=(x.clone(), x.clone())), TypeError,
        "out[1] has dtype float32, expected float64, which was asked for",
    ),
    "out is a pair for y alone": (
        lambda: addnorm.add_layer_norm(x, b, out=(x.clone(), x.clone())), TypeError,
        "out is a tuple, expected one tensor: for (y, z) pass return_residual=True.",
    ),
    "out is a tensor for both": (
        lambda: YZ(x[:2], b[:2], out=torch.empty(2, 2, 8)), TypeError,
        "out is a float32 tensor of shape (2, 2, 8), expected two tensors (y, z): for y alone leave return_residual at False.",
    ),
    "out has no z": (
        lambda: addnorm.add_rms_norm(x, b, return_residual=True, out=(x.clone(), None)), TypeError, "out is a tuple, expected two"
    ),
    "out is a number": (lambda: addnorm.add_residual(x, b, out=1.0), TypeError, "out is a float, expected one tensor"),
    "branch is a list": (lambda: addnorm.add_layer_norm_(x, [1.0]), TypeError, "branch is a list, expected a tensor"),
    "branch is None": (lambda: addnorm.add_residual_(x, None), TypeError, "branch is None, expected a tensor of residual's"),
    "residual is an integer": (lambda: addnorm.add_rms_norm_(x.int(), b), TypeError, "residual has dtype int32, expected"),
    "branch is shorter": (
        lambda: addnorm.add_layer_norm_(x, b[:3], layer_scale=0.5), ValueError,
        "branch has shape (3, 8), expected (4, 8), the shape of residual",
    ),
    "branch is shorter, several dimensions": (
        lambda: addnorm.add_layer_norm_(x, b[:3], normalized_shape=8), ValueError,
        "branch has shape (3, 8), expected (4, 8), the shape of residual",
    ),
    "the weight is shorter": (lambda: addnorm.add_layer_norm_(x, b, row[:7]), ValueError, "weight has shape (7,), expected"),
    "eps is negative": (lambda: addnorm.add_layer_norm_(x, b, eps=-1.0), ValueError, "eps is -1.0, expected a number that is"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_refused_in_a_sentence_and_nothing_is_written(name):
    function, error, sentence = REFUSED[name]
    before = [t.clone() for t in (x, b, row, buffer)]
    with pytest.raises(error, match=f"^{re.escape(sentence)}"):
        function()
    assert all(t.equal(old) for t, old in zip((x, b, row, buffer), before, strict=True))


def test_what_has_no_elements_shares_none():
    empty = torch.randn(0, 8)
    assert addnorm.add_layer_norm_(empty, empty) is empty


# ----------------------------------------------------------------------------------------------------------- autograd

WANTING = ["residual", "branch", "weight", "bias", "residual_scale", "row_scale", "layer_scale", "branch_bias"]


@pytest.mark.parametrize("name", WANTING)
def test_a_gradient_that_is_wanted_is_refused_and_is_fine_under_no_grad(name):
    call = make("everything, LayerNorm" if name in WANTING[4:] else "LayerNorm", "float32", (4, 8))
    call.tensors[name].requires_grad_()
    before = {key: t.detach().clone() for key, t in call.tensors.items()}
    sentence = (
        f"{name} wants a gradient, expected none: what writes into given memory keeps nothing for the backward. Call"
    )
    arguments = {**call.tensors, **call.options}
    with pytest.raises(RuntimeError, match=f"^{re.escape(sentence)} .*, or use the function without the underscore.$"):
        addnorm.add_layer_norm_(**arguments)
    with pytest.raises(RuntimeError, match=f"^{re.escape(sentence)} it under torch.no_grad\\(\\), or leave out out=.$"):
        addnorm.add_layer_norm(**arguments, out=torch.empty(4, 8))
    assert same(call.tensors, before)
    with torch.no_grad():
        want = call()
        assert same({"y": addnorm.add_layer_norm_(**arguments), "z": call.tensors["residual"]}, want)


def test_memory_that_wants_a_gradient_is_refused_too():
    out = torch.empty(4, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"^out wants a gradient, expected none"):
        addnorm.add_layer_norm(x, b, out=out)
    with pytest.raises(RuntimeError, match=r"^x wants a gradient, expected none"):
        addnorm.layer_norm(out, out=out)
    with torch.no_grad():
        assert addnorm.add_layer_norm(x, b, out=out) is out
    assert out.requires_grad
    assert out.is_leaf


OVERWRITING = {
    "add_layer_norm_": addnorm.add_layer_norm_,
    "add_layer_norm_ with an option": lambda t, s, w: addnorm.add_layer_norm_(t, s, w, layer_scale=0.5),
    "add_layer_norm_ over several dimensions": lambda t, s, w: addnorm.add_layer_norm_(t, s, normalized_shape=(4, 8)),
    "add_layer_norm_ of what is strided": lambda t, s, w: addnorm.add_layer_norm_(t.t(), s.t()),
    "add_residual_": lambda t, s, w: (addnorm.add_residual_(t, w.expand(4, 8)), addnorm.add_residual_(s, t)),
    "out": lambda t, s, w: addnorm.add_rms_norm(t, s, w, return_residual=True, out=(t, s)),
    "out of the norm alone": lambda t, s, w: (addnorm.rms_norm(t, out=t), addnorm.layer_norm(t, out=s)),
}


@pytest.mark.parametrize("name", OVERWRITING)
def test_a_backward_that_saved_what_was_overwritten_is_refused_by_torch(name):
    factor = torch.randn(4, 8, requires_grad=True)
    saved = [torch.randn(4, 8), torch.randn(4, 8)]
    products = [factor * t for t in saved]  # each saves its t
    versions = [t._version for t in (*saved, row)]
    OVERWRITING[name](*saved, row)
    assert row._version == versions[2]
    for t, product in zip(saved, products, strict=True):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
        assert t._version > versions[0]


def test_what_is_only_read_keeps_its_version():
    t, s = torch.randn(4, 8), torch.randn(4, 8)
    addnorm.add_residual_(t, s)
    addnorm.add_layer_norm(t, s, out=torch.empty(4, 8))
    assert (t._version, s._version) == (1, 0)


@pytest.mark.parametrize("options", [{}, {"layer_scale": 0.5}, {"normalized_shape": (4, 8)}], ids=str)
def test_tensors_of_inference_mode_are_written(options):
    with torch.inference_mode():
        t, s = torch.randn(4, 8), torch.randn(4, 8)
        y, z = addnorm.add_layer_norm(t, s, **options, return_residual=True)
        addnorm.add_layer_norm_(t, s, **options)
        assert same({"y": s, "z": t}, {"y": y, "z": z})
        outside = torch.randn(4, 8).clone()
    with torch.no_grad():
        want = addnorm.layer_norm(outside)
        assert addnorm.layer_norm(outside, out=outside).equal(want)


# --------------------------------------------------------------------------------------- autocast, transforms, compile


@pytest.mark.parametrize("options", [{}, {"weight_offset": 1.0}], ids=str)
def test_under_autocast_y_has_the_dtype_of_its_memory(options):
    call = make("LayerNorm", "float32 stream, bfloat16 branch", (5, 33))
    call.options |= options
    want = call()
    with torch.autocast("cpu", dtype=bf16):
        assert call()["y"].dtype == f32  # as F.layer_norm of the stream has it
        assert same(in_place(call), want)
        out = nan(want["y"])
        assert into(call, out).equal(want["y"])


@pytest.mark.parametrize("variant", ["LayerNorm", "row_scale and layer_scale", "the add alone"])
def test_inside_vmap_every_sample_is_written(variant):
    call = make(variant, "float64", (6, 5, 8))
    want = call()
    tensors = {name: t.clone() for name, t in call.tensors.items()}
    batched = {name: 0 if t.dim() > 1 else None for name, t in tensors.items()}
    vmap(lambda arguments: IN_PLACE[call.norm](**arguments), in_dims=(batched,))(tensors)
    torch.testing.assert_close(tensors["residual"], want["z"])
    if "y" in want:
        torch.testing.assert_close(tensors["branch"], want["y"])


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("options", [{}, {"layer_scale": 0.5}], ids=str)
def test_forward_mode_carries_the_tangents_into_the_memory(options):
    t, s, dt, ds = (torch.randn(4, 8, dtype=f64) for _ in range(4))
    both = functools.partial(addnorm.add_layer_norm, **options, return_residual=True)

    def in_place(t, s):
        t, s = t.clone(), s.clone()
        return addnorm.add_layer_norm_(t, s, **options), t

    values, tangents = jvp(both, (t, s), (dt, ds))
    torch.testing.assert_close(jvp(in_place, (t, s), (dt, ds)), (values, tangents))
    with forward_ad.dual_level():
        t, s = forward_ad.make_dual(t.clone(), dt), forward_ad.make_dual(s.clone(), ds)
        addnorm.add_layer_norm_(t, s, **options)
        torch.testing.assert_close(
            [forward_ad.unpack_dual(s).tangent, forward_ad.unpack_dual(t).tangent], list(tangents)
        )


@pytest.mark.parametrize("options", [{}, {"layer_scale": 0.5}], ids=str)
def test_func_grad_is_a_gradient_that_is_wanted(options):
    with pytest.raises(RuntimeError, match=r"^residual wants a gradient, expected none"):
        grad(lambda t: addnorm.add_layer_norm_(t.clone(), b.clone(), **options).sum())(x)


def stack(t, s, w):
    """Steps of a pre-LN stack in the memory of its inputs, with what Inductor may fuse or reuse in between."""
    y = addnorm.add_layer_norm_(t, s, w)
    other = torch.empty_like(y)
    addnorm.add_rms_norm(t, y * 2.0, w, return_residual=True, out=(other, t))
    addnorm.add_rms_norm_(t, other, w, layer_scale=0.5, dropout_p=0.3, seed=torch.tensor(5))
    addnorm.layer_norm(other, out=other)
    addnorm.add_residual_(t, other)
    return y, other + 0.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtypes", ["float32", "float32 stream, bfloat16 branch"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_in_one_graph_the_same_memory_has_the_same_bits(backend, dtypes):
    torch._dynamo.reset()
    call = make("RMSNorm", dtypes, (6, 40))
    with torch.no_grad():
        want_inputs, inputs = ([t.clone() for t in call.tensors.values()] for _ in range(2))
        want = stack(*want_inputs)
        versions = [t._version for t in inputs]
        got = torch.compile(stack, fullgraph=True, backend=backend)(*inputs)
    assert all(a.equal(b) for a, b in zip((*got, *inputs), (*want, *want_inputs), strict=True))
    assert got[0] is inputs[1]
    if backend != "eager":  # which runs the graph as it is traced; the others tell autograd themselves
        assert [t._version > version for t, version in zip(inputs, versions, strict=True)] == [True, True, False]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("variant", [name for name in OWN_DTYPES if "everything" in name or name in BASIC])
def test_every_variant_compiles_in_place_with_the_bits_of_eager(variant):
    torch._dynamo.reset()
    call = make(variant, "bfloat16 with float32 parameters", (2, 3, 17))
    tensors = {name: t.clone() for name, t in call.tensors.items()}
    eps = {} if call.norm == "none" else {"eps": call.eps}

    def function(tensors):
        return IN_PLACE[call.norm](**tensors, **call.options, **eps)

    want = call()
    torch.compile(function, fullgraph=True, backend="aot_eager")(tensors)
    assert same({"y": tensors["branch"], "z": tensors["residual"]} if "y" in want else {"z": tensors["residual"]}, want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_an_overlap_is_refused_or_computed_aside(backend):
    torch._dynamo.reset()
    one = torch.randn(4, 8)
    # What the kernels find is told in the words of the reference, by way of libtorch.
    with pytest.raises((ValueError, RuntimeError), match=r"shares memory with y, expected .*: pass z\.clone\(\)\.$"):
        torch.compile(addnorm.add_layer_norm_, fullgraph=True, backend=backend)(one, one)
    rows = torch.randn(5, 8)
    before, want = rows.clone(), addnorm.layer_norm(rows[1:])
    refused = False
    try:
        torch.compile(lambda t, out: addnorm.layer_norm(t, out=out), fullgraph=True, backend=backend)(
            rows[1:], rows[:4]
        )
    except (ValueError, RuntimeError):
        refused = True
    assert rows.equal(before) if refused else rows[:4].equal(want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_what_is_wrong_is_refused_with_the_sentence():
    for function, sentence in (
        (lambda t: addnorm.add_layer_norm_(t, b), "wants a gradient, expected none"),
        (
            lambda t: addnorm.add_layer_norm(t.detach(), b, out=torch.empty(3, 8)),
            "y has shape (3, 8), expected (4, 8)",  # by the name that the operator knows
        ),
    ):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=re.escape(sentence)):
            torch.compile(function, fullgraph=True, backend="aot_eager")(x.clone().requires_grad_())


@pytest.mark.parametrize("fake", [False, True], ids=["meta", "fake"])
@pytest.mark.parametrize("variant", OWN_DTYPES)
def test_meta_and_fake_tensors_go_through(variant, fake):
    call = make(variant, "float32 stream, bfloat16 branch", (3, 8))
    eps = {} if call.norm == "none" else {"eps": call.eps}
    with FakeTensorMode() if fake else contextlib.nullcontext() as mode:

        def moved(arguments):
            move = mode.from_tensor if fake else lambda t: t.to("meta")
            return {name: move(t) if isinstance(t, Tensor) else t for name, t in arguments.items()}

        tensors, options = moved(call.tensors), moved(call.options)
        returned = IN_PLACE[call.norm](**tensors, **options, **eps)
        assert returned is tensors["residual" if call.norm == "none" else "branch"]
        out = torch.empty(8, 3, device=returned.device)
        with pytest.raises(ValueError, match=r"^out has shape \(8, 3\), expected \(3, 8\)"):
            FUNCTIONS[call.norm](**tensors, **options, **eps, out=out)


@pytest.mark.parametrize("options", [{}, {"layer_scale": 0.5}])
def test_what_is_refused_writes_nothing_and_disturbs_no_backward(options):
    x, w = torch.randn(4, 8), torch.randn(8, requires_grad=True)
    before, loss = x.clone(), (x * w).sum()
    for wrong in (
        lambda: addnorm.add_layer_norm_(x, x, **options),
        lambda: addnorm.add_rms_norm_(x, torch.randn(4, 7), **options),
        lambda: addnorm.add_layer_norm_(x, torch.randn(4, 8), eps=-1.0, **options),
        lambda: addnorm.add_layer_norm_(x, torch.randn(4, 8), torch.ones(7), **options),
    ):
        with torch.no_grad(), pytest.raises(ValueError, match="expected"):
            wrong()
    assert x.equal(before)
    loss.backward()
    assert w.grad.equal(before.sum(0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"layer_scale": torch.ones(7)}, "layer_scale has shape (7,)"),
        ({"seed": torch.tensor([1]), "dropout_p": 0.5}, "seed is a int64 tensor of shape (1,)"),
    ],
)
def test_compiled_wrong_options_are_refused_by_name(options, sentence):
    torch._dynamo.reset()
    function = torch.compile(lambda x, b: addnorm.add_layer_norm_(x, b, **options), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=re.escape(sentence)):
        function(torch.randn(4, 8), torch.randn(4, 8))
