"""Errors of addnorm and of eager PyTorch with every option on, in each dtype, against float64.

By contract y is the norm of the rounded z, and the gradients are those at it. So the reference of each implementation is computed
in float64 from the z that it returned. Both use the same dropout mask. In float64 the reference's own round-off counts too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from addnorm.bench.cases import DROPOUT, EPS, NORMS, differentiable, inputs
from addnorm.bench.harness import Row
from addnorm.functional import AddOptions, add_layer_norm, add_rms_norm
from addnorm.ops import philox
from addnorm.reference import Norm

SHAPE = (2048, 768)
DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}
PARAMETERS = ("weight", "bias", "layer_scale", "branch_bias")
COLUMNS = ("z", "y", "dresidual", "dbranch", *(f"d{name}" for name in PARAMETERS))
SEED = 2026


def table(norms: Sequence[Norm] = tuple(NORMS), dtypes: Sequence[str] = tuple(DTYPES)) -> list[Row]:
    """Return relative RMS errors: a row for each norm, dtype and variant, with a key for each of `COLUMNS` that applies."""
    return [
        {"norm": norm, "dtype": dtype, "variant": variant, **results}
        for norm in norms
        for dtype in dtypes
        for variant, results in errors(norm, DTYPES[dtype], *SHAPE).items()
    ]


def errors(norm: Norm, dtype: torch.dtype, rows: int, d: int) -> dict[str, dict[str, float]]:
    """Return the errors of `addnorm` and `eager` on random tensors, with random gradients of y and z."""
    args, cotangents = inputs("everything", rows, d, dtype, grad=True)
    seed = torch.tensor(SEED)
    keep = philox.keep_mask((rows, d), DROPOUT, seed)
    names = [name for name in COLUMNS if name != "dbias" or norm == "layer"]
    errors_by_variant = {}
    for variant, (y, z) in {"addnorm": _ours(norm, args, seed), "eager": _eager(norm, args, keep)}.items():
        gradients = torch.autograd.grad((y, z), differentiable(norm, args), cotangents)
        truth = _truth(norm, args, keep, z.detach(), cotangents)
        pairs = zip((z, y, *gradients), truth, strict=True)
        errors_by_variant[variant] = dict(zip(names, (distance(*pair) for pair in pairs), strict=True))
    return errors_by_variant


def distance(value: Tensor, truth: Tensor) -> float:
    """Return the relative error in the L2 norm."""
    return float((value.detach().double() - truth).norm() / truth.norm())


def _ours(norm: Norm, args: list[Tensor], seed: Tensor) -> tuple[Tensor, Tensor]:
    x, s, w, b, g, c = args
    options: AddOptions = {"layer_scale": g, "branch_bias": c, "dropout_p": DROPOUT, "seed": seed}
    if norm == "layer":
        return add_layer_norm(x, s, w, b, EPS[norm], return_residual=True, **options)
    return add_rms_norm(x, s, w, None, EPS[norm], return_residual=True, **options)


def _eager(norm: Norm, args: list[Tensor], keep: Tensor) -> tuple[Tensor, Tensor]:
    x, s, w, b, g, c = args
    z = x + g * ((s + c) * keep.to(x.dtype).div_(1 - DROPOUT))  # the arithmetic of F.dropout on CPU, with a known mask
    shape = z.shape[-1:]
    return F.layer_norm(z, shape, w, b, EPS[norm]) if norm == "layer" else F.rms_norm(z, shape, w, EPS[norm]), z


def _truth(
    norm: Norm, args: list[Tensor], keep: Tensor, z_returned: Tensor, cotangents: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """Return z, y and the gradients in float64, from the formula."""
    leaves = [t.detach().double().requires_grad_() for t in args]
    x, s, w, b, g, c = leaves
    exact = x + g * (s + c) * keep.double() / (1 - DROPOUT)
    z = exact + (z_returned.double() - exact).detach()  # the returned z from here on
    centred = z - z.mean(-1, keepdim=True) if norm == "layer" else z
    y = centred / (centred.square().mean(-1, keepdim=True) + EPS[norm]).sqrt() * w
    y = y + b if norm == "layer" else y
    gradients = torch.autograd.grad((y, z), differentiable(norm, leaves), [t.double() for t in cotangents])
    return [exact.detach(), y.detach(), *gradients]
