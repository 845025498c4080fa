"""What a random call must have returned: the float64 oracle where numbers are finite, stated results where they are not.

Rows on which float32 cannot say anything (a variance that is all cancellation, squares on the edge of overflow, eps = 0 and
nothing else) are left out; everything else of such a call is judged.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from support.cases import Call, f32, f64
from support.oracle import UNIT, added, arithmetic, keep_mask, magnitudes, sum_rows

PER_ROW = ("y", "z", "residual", "branch")


class Normalized(NamedTuple):
    """A norm in float64, and the rows of it that can be judged."""

    y: Tensor
    x_hat: Tensor
    judged: Tensor


def normalized(call: Call, z: Tensor, tensors: dict[str, Tensor]) -> Normalized:
    """y of z in float64, with the results that numerics.md states where float32 overflows."""
    mean = z.mean(-1, keepdim=True) if call.norm == "layer" else 0.0
    centred = z - mean
    squares = centred.square().sum(-1, keepdim=True)
    scale = squares / call.d + call.eps
    # The sum of squares is known to be infinite in the arithmetic, or known not to be.
    wide = call.residual_dtype == f64
    low, high = (1e305, float("inf")) if wide else (1e37, 4e38 * call.d)
    over = (squares > high) & squares.isfinite()
    x_hat = torch.where(over, torch.zeros_like(centred), centred / torch.sqrt(scale))
    judged = (squares < low) | over | ~squares.isfinite()
    # Not where the rounding of the mean is a good part of a standard deviation, where the mean overflows, or over nothing.
    largest = z.abs().amax(-1, keepdim=True)
    if call.norm == "layer":
        judged &= ~((arithmetic(call) * largest / torch.sqrt(scale) > 1e-3) & ~over)
        judged &= ~(largest.isfinite() & (largest * call.d > (1e305 if wide else 1e38)))
    judged &= ~(scale < (1e-280 if wide else 1e-30))
    weight = tensors.get("weight")
    y = x_hat if weight is None else x_hat * (weight + call.options.get("weight_offset", 0.0))
    return Normalized(y + tensors["bias"] if "bias" in tensors else y, x_hat, judged)


def truth(call: Call, z: Tensor, given: dict[str, Tensor]) -> tuple[dict[str, Tensor | None], Tensor, Tensor | None]:
    """Outputs and gradients by name, all at the z that was returned; the rows that are judged; the normalized value."""
    tensors = {name: t.detach().to(f64).requires_grad_() for name, t in call.tensors.items()}
    exact = added(call, tensors)
    stream = z.detach().to(f64).requires_grad_()
    want: dict[str, Tensor | None] = {"z": exact.detach()}
    judged, x_hat = torch.ones((*z.shape[:-1], 1), dtype=torch.bool), None
    total = given["z"].to(f64) if "z" in given else torch.zeros_like(stream)
    if call.norm != "none":
        y, x_hat, judged = normalized(call, stream, tensors)
        want["y"] = y.detach()
        if "y" in given:
            # Where a row's squares overflow nothing comes back through its norm: x_hat is a constant there.
            y.backward(given["y"].to(f64))
            total = total + stream.grad
    exact.backward(total)
    return want | {name: t.grad for name, t in tensors.items()}, judged, x_hat


def wrong(
    call: Call, outputs: dict[str, Tensor], grads: dict[str, Tensor | None], given: dict[str, Tensor]
) -> list[str]:
    """A line for everything that is not as it must be; `grads` are those that were asked for."""
    lines = _outward(call, outputs, grads)
    z = outputs["z"]
    if z.numel() == 0:
        lines += [f"{name} is not zero" for name, t in grads.items() if t is not None and t.any()]
        return lines
    with torch.no_grad():
        terms = magnitudes(call, z, given)
        # A NaN that was dropped is no term of the sum over rows.
        terms["branch_bias"] = sum_rows(terms["branch"].nan_to_num(nan=0.0, posinf=0.0))
    want, judged, x_hat = truth(call, z, given)
    unit = arithmetic(call)
    for name, value in (outputs | grads).items():
        here, exact, near = terms.get(name), want[name], 16 * unit
        if exact is None or value is None:
            if any(t is not None and t.any() for t in (exact, value)):
                lines.append(f"{name} is {value}, expected {exact}")
            continue
        near = (near * here).nan_to_num(nan=0.0, posinf=0.0)  # beside a NaN, what is no NaN is exact
        if name == "z":  # the sum does not depend on the norm: no row is left out, no element excuses another
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


def _outward(call: Call, outputs: dict[str, Tensor], grads: dict[str, Tensor | None]) -> list[str]:
    """Shapes, dtypes, contiguity."""
    shape = call.tensors["residual"].shape
    stated = {"z": (shape, call.residual_dtype), "y": (shape, call.out_dtype)}
    stated |= {name: (t.shape, t.dtype) for name, t in call.tensors.items()}
    lines = [
        f"{name} is {t.dtype} {tuple(t.shape)}, expected {stated[name]}"
        for name, t in (outputs | grads).items()
        if t is not None and (t.shape, t.dtype) != stated[name]
    ]
    return lines + [f"{name} is not contiguous" for name, t in outputs.items() if not t.is_contiguous()]


def _casting(call: Call, x_hat: Tensor) -> Tensor | float:
    """What rounding the normalized value before the weight may change in y."""
    casting, weight = call.options.get("casting"), call.tensors.get("weight")
    if casting is None or (casting == "t5" and weight is None):
        return 0.0
    dtype = call.residual_dtype if casting == "llama" else weight.dtype
    gain = 1.0 if weight is None else (weight.to(f64) + call.options.get("weight_offset", 0.0)).abs()
    return 1.01 * UNIT[dtype] * (x_hat.detach().abs() + torch.finfo(dtype).smallest_normal) * gain


def _compare(name: str, got: Tensor, want: Tensor, near: Tensor) -> list[str]:
    """NaN where it must be, infinite where its dtype ends, else within a rounding to its dtype and `near`."""
    unit, info = UNIT[got.dtype], torch.finfo(got.dtype)
    got = got.detach().to(f64)
    # Where numbers are subnormal they are rounded absolutely: in their own dtype, and in float32 on the way there.
    bound = 1.01 * unit * want.abs() + near + info.smallest_normal * unit + 8 * 2.0**-149
    # A row_scale that was broadcast, a gradient that was summed, are rounded twice.
    bound = bound + 1.01 * unit * want.abs() if name not in ("y", "z") else bound
    fits = want.abs() + bound < info.max
    ends = want.isinf() | (want.abs() - bound > info.max * (1 + 2 * unit))
    good = torch.where(fits, (got - want).abs() <= bound, ~ends | (got == want.sign() * torch.inf))
    good = torch.where(want.isnan(), got.isnan(), good)
    if bool(good.all()):
        return []
    at = int((~good).flatten().nonzero()[0])
    got, want, bound = (t.expand(good.shape).flatten()[at].item() for t in (got, want, bound))
    return [
        f"{name}: {int((~good).sum())} of {good.numel()} wrong; element {at} is {got}, expected {want} +- {bound:.3g}"
    ]
