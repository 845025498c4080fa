"""Tests of gradients: correct to second order and beyond, for any subset of the inputs, without saved memory for the others."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import addnorm
from support.cases import BASIC, VARIANTS, cotangents, f64, gradients, leaves, make
from support.equality import assert_same
from support.memory import record_saved
from support.operator_calls import Recorder
from support.oracle import exact, relative
from support.pairwise import rotate

# Options that round to a lower dtype cannot be compared with finite differences.
SMOOTH = {name: v for name, v in VARIANTS.items() if not v.options.keys() & {"residual_dtype", "out_dtype"}}
USED = {"both outputs": ("y", "z"), "y alone": ("y",), "the stream alone": ("z",)}


NORMED = [name for name in SMOOTH if VARIANTS[name].norm != "none"]
ADD_ONLY = [(name, "the stream alone") for name in SMOOTH if VARIANTS[name].norm == "none"]


@pytest.mark.parametrize(
    ("variant", "used"),
    [*rotate(NORMED, [*USED], 1), *ADD_ONLY],
)
def test_derivatives_pass_gradcheck_and_gradgradcheck(variant, used):
    call = make(variant, "float64", (2, 2, 3) if "sample" in variant else (2, 3))
    tensors = leaves(call)
    names = list(tensors)
    if used == "the stream alone":  # the norm's own parameters are not involved
        names = [name for name in names if name not in ("weight", "bias")]

    def function(*values):
        outputs = call(tensors | dict(zip(names, values, strict=True)))
        return tuple(outputs[name] for name in USED[used])

    inputs = tuple(tensors[name] for name in names)
    assert gradcheck(function, inputs, check_forward_ad=True)
    assert gradgradcheck(function, inputs)


@pytest.mark.parametrize("dtypes", ["float32", "float32 stream, bfloat16 branch"])
@pytest.mark.parametrize("variant", [*BASIC, "everything, LayerNorm", "everything, RMSNorm"])
def test_double_backward_in_float32_agrees_with_float64(variant, dtypes):
    call = make(variant, dtypes, (9, 33), eps=0.1)
    outputs = call()
    grad_outputs = cotangents(outputs)

    def penalty(outputs, tensors, dtype):
        """Return a gradient penalty: the squares of the first gradients, to be differentiated again."""
        first = torch.autograd.grad(
            [outputs[name] for name in grad_outputs],
            list(tensors.values()),
            [g.to(dtype or g.dtype) for g in grad_outputs.values()],
            create_graph=True,
        )
        loss = sum((g.to(f64) ** 2).sum() for g in first)
        return dict(zip(tensors, torch.autograd.grad(loss, list(tensors.values()), allow_unused=True), strict=True))

    tensors = leaves(call)
    actual = penalty(call(tensors), tensors, None)
    tensors = {name: t.to(f64).requires_grad_() for name, t in call.tensors.items()}
    expected = penalty(exact(call, tensors, outputs["z"]), tensors, f64)
    # The first gradients are rounded to their dtypes, bfloat16 in the worst case, and are used twice.
    bound = 2e-5 if dtypes == "float32" else 3e-2
    for name, value in expected.items():
        assert (actual[name] is None) == (value is None) or not value.any(), name
        if value is not None and value.any():
            assert relative(actual[name], value) < bound, name


@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("variant", ["LayerNorm", "everything, LayerNorm"])
def test_frozen_inputs_change_no_other_gradient(variant, used):
    call = make(variant, "float32", (66, 35))
    grad_outputs = {name: g for name, g in cotangents(call()).items() if name in USED[used]}
    everything = gradients(call, grad_outputs)
    for name in call.tensors:
        for frozen in ({name}, call.tensors.keys() - {name}):
            expected = {key: None if key in frozen else grad for key, grad in everything.items()}
            assert_same(gradients(call, grad_outputs, *frozen), expected)


def test_without_grad_one_operator_runs():
    call = make("LayerNorm", "float32", (9, 33))
    for operator, run in (("add_norm", call.y_alone), ("add_norm_stream", call)):
        with Recorder() as recorder:
            run()
        assert [name for name, _ in recorder.calls] == [operator]


SAVED = {
    # The saved tensors besides z and the statistics, by name.
    "LayerNorm": ["weight"],
    "LayerNorm without bias": ["weight"],
    "LayerNorm without weight": [],
    "RMSNorm": ["weight"],
    "RMSNorm without weight": [],
    "residual_scale a number": ["weight"],
    "residual_scale (d,)": ["weight", "residual", "residual_scale"],
    "row_scale a token": ["weight", "branch", "row_scale"],
    "layer_scale (d,)": ["weight", "branch", "layer_scale"],
    "layer_scale a number": ["weight"],
    "branch_bias": ["weight", "branch_bias"],
    "dropout": ["weight", "seed"],
    "weight_offset, RMSNorm": ["weight"],
    "residual_dtype float32": ["weight"],
}


@pytest.mark.parametrize("return_residual", [False, True])
@pytest.mark.parametrize("dtypes", ["float32", "bfloat16", "float32 stream, bfloat16 branch"])
@pytest.mark.parametrize("variant", SAVED)
def test_saved_tensors_are_z_statistics_and_needed_options(variant, dtypes, return_residual):
    call = make(variant, dtypes, (66, 35))
    tensors = leaves(call)
    output, saved = record_saved(lambda: call(tensors)["y"] if return_residual else call.y_alone(tensors))
    assert output.grad_fn is not None
    named = tensors | call.options
    extra = sum(named[name].numel() * named[name].element_size() for name in SAVED[variant])
    z = 66 * 35 * call.residual_dtype.itemsize
    assert sum(t.numel() * t.element_size() for t in saved) == z + 66 * 8 + extra


@pytest.mark.parametrize("frozen", ["layer_scale", "row_scale", "residual_scale"])
def test_branch_is_not_saved_for_a_frozen_scale(frozen):
    call = make("everything, LayerNorm", "float32", (66, 35))
    tensors = leaves(call, "layer_scale", "row_scale", "residual_scale")
    for count in (1, 2):  # the stream; the branch (or the residual) too
        _, saved = record_saved(lambda: call(tensors))
        assert sum(t.numel() == 66 * 35 for t in saved) == count
        tensors[frozen].requires_grad_()


def test_gradients_that_accumulate_do_not_share_memory():
    """The add has one gradient for both inputs; accumulating into one in place must not change the other."""
    call = make("LayerNorm", "float32", (9, 33))
    once = gradients(call)
    tensors = leaves(call)
    for _ in range(2):
        outputs = call(tensors)
        torch.autograd.backward(list(outputs.values()), list(cotangents(outputs).values()))
    for name, t in tensors.items():
        assert t.grad.equal(2 * once[name]), name
    tensors["residual"].grad.zero_()
    assert tensors["branch"].grad.equal(2 * once["branch"])


@pytest.mark.parametrize("options", [{}, {"weight_offset": 1.0}, {"dropout_p": 0.5}])
@pytest.mark.parametrize("add_norm", [addnorm.add_layer_norm, addnorm.add_rms_norm])
def test_z_requires_grad_only_if_a_summand_does(add_norm, options):
    x, b = torch.randn(3, 4), torch.randn(3, 4)
    weight = torch.ones(4, requires_grad=True)
    y, z = add_norm(x, b, weight, return_residual=True, **options)
    assert (y.requires_grad, z.requires_grad) == (True, False)
    scale = torch.ones((), requires_grad=True)
    for summands in (
        {"residual": x.clone().requires_grad_(), "branch": b},
        {"residual": x, "branch": b, "layer_scale": scale},
    ):
        assert add_norm(**summands, weight=weight, return_residual=True, **options)[1].requires_grad
