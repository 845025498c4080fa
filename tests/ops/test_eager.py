"""Tests of the eager reference behind the dispatcher: operators agree with their `_reference`, and with explicit derivatives."""

import pytest
import torch

from addnorm.ops.options import NORMS
from support.accuracy import agree
from support.cases import BASIC, DTYPES, SHAPES, bf16, cotangents, f32, f64, make
from support.oracle import UNIT, arithmetic, magnitudes
from support.pairwise import product

ops = torch.ops.addnorm


@pytest.mark.parametrize(
    ("variant", "dtypes", "shape"), product(list(BASIC), list(DTYPES), [s for s in SHAPES if len(s) > 1]), ids=str
)
def test_kernel_and_reference_agree_within_rounding(variant, dtypes, shape):
    call = make(variant, dtypes, shape)
    norm, unit = NORMS[call.norm], arithmetic(call)
    inputs = (*(call.tensors.get(name) for name in ("residual", "branch", "weight", "bias")), call.eps, norm)
    y, z, stats = ops.add_norm_forward(*inputs)
    expected_y, expected_z, expected_stats = ops.add_norm_forward_reference(*inputs)
    assert z.equal(expected_z)
    terms = magnitudes(call, z, grad_outputs := cotangents({"y": y, "z": z}))
    assert agree(y, expected_y, unit, terms["y"])
    # The mean's error is relative to the averaged values, that of rstd to rstd.
    assert agree(stats[..., 0], expected_stats[..., 0], unit, z.to(f64).abs().mean(-1))
    spread = 1 + (z.to(f64).abs().mean(-1) * expected_stats[..., 1]) ** 2  # a rounded mean's effect on a small variance
    assert agree(stats[..., 1], expected_stats[..., 1], unit, expected_stats[..., 1] * spread)
    for op, expected in [(ops.add_norm, (expected_y,)), (ops.add_norm_stream, (expected_y, z))]:
        actual = op(*inputs[:-1], call.norm == "rms")
        actual = (actual,) if isinstance(actual, torch.Tensor) else actual
        assert actual[0].equal(y)
        assert len(actual) == len(expected)

    absent = 4 * (call.tensors.get("weight") is None) | 8 * (call.tensors.get("bias") is None)
    for grad_mask in range(1, 16):
        if grad_mask & absent:  # an absent tensor has no gradient
            continue
        arguments = (
            grad_outputs["y"], grad_outputs["z"] if grad_mask % 2 else None, z, stats, call.tensors.get("weight"), norm,
            *DTYPES[dtypes], grad_mask,
        )  # fmt: skip
        grads = ops.add_norm_backward(*arguments)
        expected = ops.add_norm_backward_reference(*arguments)
        for bit, name in enumerate(("residual", "branch", "weight", "bias")):
            if grad_mask >> bit & 1:
                assert agree(grads[bit], expected[bit], unit, terms[name]), (name, grad_mask)
            else:
                assert grads[bit].numel() == expected[bit].numel() == 0


@pytest.mark.parametrize(
    ("stream", "out", "dresidual_dtype", "branch_dtype", "bias_dtype"), product(*[[f32, bf16]] * 5), ids=str
)
def test_backward_supports_every_combination_of_dtypes(stream, out, dresidual_dtype, branch_dtype, bias_dtype):
    call = make("LayerNorm", "float32", (70, 33))
    z, dz = (call.tensors[name].to(stream) for name in ("residual", "branch"))
    dy = cotangents({"y": z})["y"].to(out)
    _, _, stats = ops.add_norm_forward_reference(z, torch.zeros_like(z), None, None, 1e-5, 0)
    terms = magnitudes(call, z, {"y": dy, "z": dz})
    for grad_mask in range(1, 16):
        arguments = (
            dy,
            dz,
            z,
            stats,
            call.tensors["weight"],
            0,
            dresidual_dtype,
            branch_dtype,
            bias_dtype,
            grad_mask,
        )
        actual = ops.add_norm_backward(*arguments)
        expected = ops.add_norm_backward_reference(*arguments)
        for bit, name in enumerate(("residual", "branch", "weight", "bias")):
            if grad_mask >> bit & 1:
                assert agree(actual[bit], expected[bit], UNIT[f32], terms[name]), (name, grad_mask)


@pytest.mark.parametrize("variant", [*BASIC, "everything, LayerNorm", "everything, RMSNorm", "the add alone"])
def test_operators_return_no_alias_of_an_input(variant):
    """With one-dimensional inputs the sum over rows is a no-op, as is a cast to an equal dtype."""
    for shape in [(8,), (1, 8), (3, 8)]:
        for dtypes in ("float32", "float64"):
            call = make(variant, dtypes, shape)
            tensors = {name: t.clone().requires_grad_() for name, t in call.tensors.items()}
            outputs = call(tensors)
            grad_outputs = cotangents(outputs)
            grads = torch.autograd.grad(list(outputs.values()), list(tensors.values()), list(grad_outputs.values()))
            theirs = {
                t.untyped_storage().data_ptr() for t in (*tensors.values(), *outputs.values(), *grad_outputs.values())
            }
            for name, grad in zip(tensors, grads, strict=True):
                # The add passes its output's gradient through if only the stream is used.
                if not (call.norm == "none" and name in ("residual", "branch")):
                    assert grad.untyped_storage().data_ptr() not in theirs, (name, shape)
