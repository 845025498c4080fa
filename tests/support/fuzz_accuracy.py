"""Checks of a random call's results, against a float64 oracle for finite numbers and against stated results for the others.

Rows that float32 cannot determine are not checked: a variance that is all cancellation, squares near overflow, or a vanishing
variance with eps = 0. Everything else of such a call is checked.
"""

import torch

from support.cases import f32, f64
from support.oracle import UNIT, added, arithmetic, keep_mask, magnitudes, mean, sum_rows, wide_leaves

PER_ROW = ("y", "z", "residual", "branch")


def normalize(call, z, tensors):
    """Return y of z in float64, with the results that numerics.md states where float32 overflows.

    Return also the normalized value, and the rows that can be checked.
    """
    centred = z - mean(z) if call.norm == "layer" else z
    squares = centred.square().sum(-1, keepdim=True)
    scale = squares / call.d + call.eps
    # The sum of squares certainly overflows in the arithmetic, or certainly does not.
    wide = call.residual_dtype == f64
    low, high = (1e305, float("inf")) if wide else (1e37, 4e38 * call.d)
    over = (squares > high) & squares.isfinite()
    x_hat = torch.where(over, torch.zeros_like(centred), centred / torch.sqrt(scale))
    judged = (squares < low) | over | ~squares.isfinite()
    # Exclude rows whose mean rounds by a large part of a deviation, whose mean overflows, or whose scale vanishes.
    largest = z.abs().amax(-1, keepdim=True)
    if call.norm == "layer":
        judged &= ~((arithmetic(call) * largest / torch.sqrt(scale) > 1e-3) & ~over)
        judged &= ~(largest.isfinite() & (largest * call.d > (1e305 if wide else 1e38)))
    judged &= ~(scale < (1e-280 if wide else 1e-30))
    weight = tensors.get("weight")
    y = x_hat if weight is None else x_hat * (weight + call.options.get("weight_offset", 0.0))
    return y + tensors["bias"] if "bias" in tensors else y, x_hat, judged


def truth(call, z, grad_outputs):
    """Return outputs and gradients by name, all at the returned z; the rows that are checked; the normalized value."""
    tensors = wide_leaves(call)
    exact = added(call, tensors)
    stream = z.detach().to(f64).requires_grad_()
    expected = {"z": exact.detach()}
    judged, x_hat = torch.ones((*z.shape[:-1], 1), dtype=torch.bool), None
    total = grad_outputs["z"].to(f64) if "z" in grad_outputs else torch.zeros_like(stream)
    if call.norm != "none":
        y, x_hat, judged = normalize(call, stream, tensors)
        expected["y"] = y.detach()
        if "y" in grad_outputs:
            # Where a row's squares overflow, the norm passes no gradient: x_hat is constant there.
            y.backward(grad_outputs["y"].to(f64))
            total = total + stream.grad
    exact.backward(total)
    return expected | {name: t.grad for name, t in tensors.items()}, judged, x_hat


def find_errors(call, outputs, grads, grad_outputs):
    """Return one line for each error in the outputs and in `grads`, the requested gradients."""
    lines = _outward(call, outputs, grads)
    z = outputs["z"]
    if z.numel() == 0:
        lines += [f"{name} is not zero" for name, t in grads.items() if t is not None and t.any()]
        return lines
    with torch.no_grad():
        terms = magnitudes(call, z, grad_outputs)
        # A NaN that dropout dropped is no term of the sum over rows.
        terms["branch_bias"] = sum_rows(terms["branch"].nan_to_num(nan=0.0, posinf=0.0))
    expected, judged, x_hat = truth(call, z, grad_outputs)
    unit = arithmetic(call)
    for name, value in (outputs | grads).items():
        here, exact, near = terms.get(name), expected[name], 16 * unit
        if exact is None or value is None:
            if any(t is not None and t.any() for t in (exact, value)):
                lines.append(f"{name} is {value}, expected {exact}")
            continue
        near = (near * here).nan_to_num(nan=0.0, posinf=0.0)  # in a row with a NaN, every other element must be exact
        if name == "z":  # the sum does not depend on the norm: check every row, and each element with its own tolerance
            wide = f64 in (call.tensors["residual"].dtype, call.tensors["branch"].dtype, call.residual_dtype)
            lines += _compare(name, value, exact, near * (4 * UNIT[f64] if wide else UNIT[f32]) / (2 * unit))
        elif name in PER_ROW:
            near = near.amax(-1, keepdim=True).expand(exact.shape)
            near = near + _casting(call, x_hat) if name == "y" else near
            rows = judged.expand(exact.shape)
            lines += _compare(name, value[rows], exact[rows], near[rows])
        elif judged.all():
            lines += _compare(name, value, exact, near.max().expand(exact.shape))
    keep_mask.cache_clear()
    return lines


def _outward(call, outputs, grads):
    """Return the errors in shapes, dtypes and contiguity."""
    shape = call.tensors["residual"].shape
    stated = {"z": (shape, call.residual_dtype), "y": (shape, call.out_dtype)}
    stated |= {name: (t.shape, t.dtype) for name, t in call.tensors.items()}
    lines = [
        f"{name} is {t.dtype} {tuple(t.shape)}, expected {stated[name]}"
        for name, t in (outputs | grads).items()
        if t is not None and (t.shape, t.dtype) != stated[name]
    ]
    return lines + [f"{name} is not contiguous" for name, t in outputs.items() if not t.is_contiguous()]


def _casting(call, x_hat):
    """Return how much y may change when the normalized value is rounded before the weight."""
    casting, weight = call.options.get("casting"), call.tensors.get("weight")
    if casting is None or (casting == "t5" and weight is None):
        return 0.0
    dtype = call.residual_dtype if casting == "llama" else weight.dtype
    gain = 1.0 if weight is None else (weight.to(f64) + call.options.get("weight_offset", 0.0)).abs()
    return 1.01 * UNIT[dtype] * (x_hat.detach().abs() + torch.finfo(dtype).smallest_normal) * gain


def _compare(name, actual, expected, near):
    """Compare NaN and infinities exactly, and other elements within a rounding to their dtype plus `near`."""
    unit, info = UNIT[actual.dtype], torch.finfo(actual.dtype)
    actual = actual.detach().to(f64)
    # Subnormal numbers have an absolute rounding error: in their own dtype, and in float32 on the way there.
    bound = 1.01 * unit * expected.abs() + near + info.smallest_normal * unit + 8 * 2.0**-149
    # A broadcast row_scale and a summed gradient are rounded twice.
    bound = bound + 1.01 * unit * expected.abs() if name not in ("y", "z") else bound
    fits = expected.abs() + bound < info.max
    ends = expected.isinf() | (expected.abs() - bound > info.max * (1 + 2 * unit))
    good = torch.where(fits, (actual - expected).abs() <= bound, ~ends | (actual == expected.sign() * torch.inf))
    good = torch.where(expected.isnan(), actual.isnan(), good)
    if bool(good.all()):
        return []
    at = int((~good).flatten().nonzero()[0])
    actual, expected, bound = (t.expand(good.shape).flatten()[at].item() for t in (actual, expected, bound))
    return [
        f"{name}: {int((~good).sum())} of {good.numel()} wrong; element {at} is {actual}, expected {expected} +- {bound:.3g}"
    ]
