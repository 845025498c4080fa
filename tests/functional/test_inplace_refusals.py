"""Tests of invalid in-place and out= calls, which raise one sentence and write nothing, and of their effects on autograd."""

import functools
import re

import pytest
import torch

import addnorm
from support.cases import Call, bf16, f64, make
from support.equality import assert_same
from support.inplace_calls import in_place, into
from support.refusals import assert_raises

x, b, row = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
buffer = torch.randn(100)
first, half_over = buffer[:32].view(4, 8), buffer[16:48].view(4, 8)
YZ = functools.partial(addnorm.add_layer_norm, return_residual=True)

# The message of each wrong call.
REFUSED = {
    "ValueError: branch shares memory with residual, expected memory of its own, since both are written: pass "
        "branch.clone().": lambda: addnorm.add_layer_norm_(x, x),
    "ValueError: branch shares memory with residual, expected memory of its own":
        lambda: addnorm.add_layer_norm_(first, half_over, normalized_shape=(4, 8)),
    "ValueError: residual shares memory with branch, expected exactly its memory or none of it: pass residual.clone().":
        lambda: addnorm.add_residual_(first, half_over),
    "ValueError: out[0] shares memory with out[1], expected memory of its own, since both are written: pass "
        "out[0].clone().": lambda: YZ(x, b, out=(row.expand(4, 8).clone(),) * 2),
    "ValueError: out shares memory with residual, expected exactly its memory or none of it: pass out.clone().":
        lambda: addnorm.add_layer_norm(first, b, out=half_over),
    "ValueError: out shares memory with branch, expected exactly its memory or none of it: pass out.clone().":
        lambda: addnorm.add_rms_norm(x, first, weight_offset=1.0, weight=row, out=half_over),
    "ValueError: out shares memory with x, expected exactly its memory or none of it: pass out.clone().":
        lambda: addnorm.rms_norm(buffer[:96].view(12, 8)[1:5], out=buffer[:96].view(12, 8)[4:8]),
    "ValueError: residual shares memory with weight, expected memory of its own: pass residual.clone().":
        lambda: addnorm.add_layer_norm_(first, b, first[2]),
    "ValueError: out shares memory with residual_scale, expected memory of its own":
        lambda: addnorm.add_layer_norm(x, b, residual_scale=first[1, 1], out=first),
    "ValueError: residual has elements that share memory (it is expanded, for example), expected separate "
        "elements: pass residual.clone().": lambda: addnorm.add_layer_norm_(row.expand(4, 8), b),
    "ValueError: out has shape (8, 4), expected (4, 8), the shape of the result: out is not resized. Make it "
        "with torch.empty(4, 8).": lambda: addnorm.add_layer_norm(x, b, out=torch.empty(8, 4)),
    "TypeError: out has dtype float32, expected bfloat16, the requested dtype: leave the dtype out, or make out with ":
        lambda: addnorm.layer_norm(x, out_dtype=bf16, out=torch.empty(4, 8)),
    "TypeError: out[1] has dtype float32, expected float64, the requested dtype":
        lambda: YZ(x, b, residual_dtype=f64, out=(x.clone(), x.clone())),
    "TypeError: out is a tuple, expected one tensor: for (y, z) pass return_residual=True.":
        lambda: addnorm.add_layer_norm(x, b, out=(x.clone(), x.clone())),
    "TypeError: out is a float32 tensor of shape (2, 2, 8), expected two tensors (y, z): for y alone leave "
        "return_residual at False.": lambda: YZ(x[:2], b[:2], out=torch.empty(2, 2, 8)),
    "TypeError: out is a tuple, expected two":
        lambda: addnorm.add_rms_norm(x, b, return_residual=True, out=(x.clone(), None)),
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_invalid_targets_raise_and_write_nothing(sentence):
    before = [t.clone() for t in (x, b, row, buffer)]
    assert_raises(sentence, REFUSED[sentence])
    assert_same((x, b, row, buffer), before)


def test_empty_tensors_share_no_memory():
    empty = torch.randn(0, 8)
    assert addnorm.add_layer_norm_(empty, empty) is empty


# ----------------------------------------------------------------------------------------------------------- autograd

# Every function that writes into existing tensors: the variant of the call, and its targets.
WRITERS = [
    (variant, target)
    for variant in ("LayerNorm", "RMSNorm with bias", "the add alone", "residual_scale 0-d", "row_scale a sample",
                    "everything, LayerNorm", "everything, RMSNorm", "everything, the add alone")
    for target in ("in place", "y", "y and z", "norm alone")
    if target in ("in place", "y") or "add" not in variant
]  # fmt: skip


def write(call, target, tensors, outs):
    """Run the call in place or with out=; "norm alone" is the norm of its residual."""
    if target == "in place":
        in_place(call, tensors)
    elif target == "norm alone":
        parameters = {name: tensors.get(name) for name in ("weight", "bias")}
        function = addnorm.layer_norm if call.norm == "layer" else addnorm.rms_norm
        function(tensors["residual"], **parameters, eps=call.eps, out=outs[0])
    else:
        into(Call(call.norm, call.eps, tensors, call.options), outs if target == "y and z" else outs[0])


@pytest.mark.parametrize(("variant", "target"), WRITERS)
def test_each_input_that_requires_a_gradient_is_refused(variant, target):
    call, alone = make(variant, "float32", (4, 8)), target == "norm alone"
    inputs = [name for name in call.tensors if not alone or name in ("residual", "weight", "bias")]
    outs = {"in place": (), "y and z": ("out[0]", "out[1]")}.get(target, ("out",))
    remedy = "leave out out=" if outs else "use the function without the underscore"
    for name in [*inputs, *outs]:
        tensors = {key: t.clone().requires_grad_(key == name) for key, t in call.tensors.items()}
        targets = tuple(x.clone().requires_grad_(key == name) for key in outs)
        sentence = (
            f"{'x' if alone and name == 'residual' else name} requires a gradient, expected none: out= and in-place calls "
            f"save nothing for the backward. Call it under torch.no_grad(), or {remedy}."
        )
        with pytest.raises(RuntimeError, match=f"^{re.escape(sentence)}$"):
            write(call, target, tensors, targets)
        assert_same(tensors, call.tensors)
        assert all(t.equal(x) for t in targets)
        with torch.no_grad():
            write(call, target, tensors, targets)
        assert all(not t.equal(x) for t in targets or (tensors["residual"],))


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
def test_overwriting_a_saved_tensor_fails_its_backward(name):
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


def test_read_tensors_keep_their_version():
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
        assert_same((s, t), (y, z))
        assert y.is_inference()
        outside = torch.randn(4, 8).clone()
    with torch.no_grad():
        expected = addnorm.layer_norm(outside)
        assert addnorm.layer_norm(outside, out=outside).equal(expected)
