"""Accuracy checks of results and gradients against float64, relative to the errors of plain PyTorch.

Plain PyTorch computes in the same dtypes on the same inputs:

- the RMS error must be at most 1.02 times PyTorch's, or that of the correctly rounded exact result where PyTorch's is smaller;
- the largest error must be at most twice that;
- a floor is added to each bound: one rounding of float32 (two for the largest error), relative to the sum of the absolute values
  of the terms. It is the round-off of the order of summation.

z is the exact sum but for four roundings of the arithmetic, and one to its dtype.
"""

import torch
from torch.utils._pytree import tree_map

from support.cases import f32, f64, leaves
from support.oracle import UNIT, added, arithmetic, magnitudes, plain, rms, truth, worst
from support.stream_calls import run


def forward_and_backward(function, call, grad_outputs):
    """Return outputs and gradients by name."""
    return {name.removeprefix("d"): t for name, t in run(function, leaves(call), grad_outputs).items()}


def assert_accurate(call, ours, grad_outputs):
    """Check that outputs and gradients keep the bounds above, relative to the z in `ours`."""
    theirs = forward_and_backward(lambda tensors: plain(call, tensors), call, grad_outputs)
    # Compare each result with the exact result at its own z, which is the z that it normalized.
    expected, expected_theirs = truth(call, ours["z"], grad_outputs), truth(call, theirs["z"], grad_outputs)
    terms, unit = magnitudes(call, ours["z"], grad_outputs), arithmetic(call)
    assert ours["z"].dtype == call.residual_dtype
    exact = added(call, tree_map(torch.Tensor.double, call.tensors))
    rounded = exact.abs().clamp(
        min=torch.finfo(call.residual_dtype).tiny
    )  # a subnormal number is rounded like the smallest normal
    bound = 4 * unit * terms["z"] + UNIT[call.residual_dtype] * rounded * 1.001
    assert ((ours["z"].to(f64) - exact).abs() <= bound).all()
    for name in ours.keys() - {"z"}:
        error, error_theirs = ours[name].to(f64) - expected[name], theirs[name].to(f64) - expected_theirs[name]
        best = expected[name].to(ours[name].dtype).to(f64) - expected[name]
        assert ours[name].shape == expected[name].shape, name
        assert ours[name].dtype == (call.out_dtype if name == "y" else call.tensors[name].dtype), name
        assert rms(error) <= 1.02 * max(rms(error_theirs), rms(best)) + unit * rms(terms[name]), name
        assert worst(error) <= 2 * max(worst(error_theirs), worst(best)) + 2 * unit * worst(terms[name]), name


def agree(actual, expected, unit, terms):
    """Return whether two results agree within a few roundings of the arithmetic and one rounding of the dtype on either side."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    bound = 8 * unit * terms + 2.01 * UNIT[actual.dtype] * expected.to(f64).abs() * (actual.dtype not in (f32, f64))
    return bool(((actual.to(f64) - expected.to(f64)).abs() <= bound).all())
