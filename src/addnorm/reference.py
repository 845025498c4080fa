r"""The operation in eager torch: the specification, the fallback of every kernel, the oracle of the tests.

    z = residual_scale * residual + row_scale * layer_scale * dropout(branch + branch_bias)
    y = norm(z) * (weight + weight_offset) + bias

What every implementation of it guarantees:

- Arithmetic and statistics in float32 (`float64` if residual, branch or the stream is float64), the variance centred.
- z is rounded once, to the stream's dtype, and y is the norm of that rounded z.
- y is rounded once, to its own dtype (but for the two `casting` orders that round earlier, as some models do).

The functions here are differentiable to every order; the two that end in `_backward` are the same derivatives written
out, which is what the kernels compute. Nothing here validates: `addnorm.functional` does.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Norm = Literal["layer", "rms"]
Casting = Literal["float32", "llama", "t5"]


def compute_dtype(*tensors: Tensor | None, dtype: torch.dtype | None = None) -> torch.dtype:
    """`float64` if anything given is, else `float32`: the dtype of the arithmetic."""
    dtypes = [dtype, *(t.dtype for t in tensors if t is not None)]
    return torch.float64 if torch.float64 in dtypes else torch.float32


def add(
    residual: Tensor,
    branch: Tensor,
    *,
    residual_scale: Tensor | float = 1.0,
    row_scale: Tensor | None = None,
    layer_scale: Tensor | float = 1.0,
    keep: Tensor | None = None,
    branch_bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """z, in `dtype` (the residual's own if None). `keep` is the dropout mask divided by 1 - p; `row_scale` is `(*)`."""
    acc = compute_dtype(residual, branch, dtype=dtype)
    u = branched(branch.to(acc), branch_bias, keep)
    u = u * _gain(row_scale, layer_scale, acc)
    return (_cast(residual_scale, acc) * residual.to(acc) + u).to(dtype or residual.dtype)


def branched(branch: Tensor, branch_bias: Tensor | None, keep: Tensor | None) -> Tensor:
    """dropout(branch + branch_bias)."""
    u = branch if branch_bias is None else branch + branch_bias.to(branch.dtype)
    return u if keep is None else _dropped(u, keep)


class Statistics(NamedTuple):
    """`mean` (0 for RMSNorm) and `rstd` of every row, `(*, 1)`, in the dtype of the arithmetic."""

    mean: Tensor | float
    rstd: Tensor


def statistics(z: Tensor, norm: Norm, eps: float) -> Statistics:
    """Two passes: rstd = 1 / sqrt(mean((z - mean(z))^2) + eps); RMSNorm leaves the mean out."""
    mean: Tensor | float = 0.0
    if norm == "layer":
        mean = mean_features(z)
        mean = mean + mean_features(z - mean)  # so that a constant row's mean is exactly its constant
    centred = z - mean
    return Statistics(mean, torch.rsqrt(mean_features(centred * centred) + eps))


def normalize(
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    norm: Norm,
    eps: float,
    weight_offset: float = 0.0,
    casting: Casting = "float32",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """y, in `dtype` (z's own if None)."""
    acc = compute_dtype(z)
    mean, rstd = statistics(z.to(acc), norm, eps)
    x_hat = (z.to(acc) - mean) * rstd
    if casting == "llama":  # rounded to the stream's dtype before the weight
        x_hat = x_hat.to(z.dtype).to(acc)
    elif casting == "t5" and weight is not None:  # rounded to the weight's dtype before the weight
        x_hat = x_hat.to(weight.dtype).to(acc)
    if weight is not None:
        x_hat = x_hat * (weight.to(acc) + weight_offset)
    if bias is not None:
        x_hat = x_hat + bias.to(acc)
    return x_hat.to(dtype or z.dtype)


class NormGrads(NamedTuple):
    """Gradients in the dtype of the arithmetic; those of the parameters are summed over the rows."""

    z: Tensor
    weight: Tensor
    bias: Tensor


def normalize_backward(
    dy: Tensor, z: Tensor, weight: Tensor | None, stats: Statistics, *, norm: Norm, weight_offset: float = 0.0
) -> NormGrads:
    """dz = rstd * (g - mean(g) - x_hat * mean(g * x_hat)) with g = dy * weight; RMSNorm leaves mean(g) out."""
    acc = stats.rstd.dtype
    dy, z = dy.to(acc), z.to(acc)
    x_hat = (z - stats.mean) * stats.rstd
    g = dy if weight is None else dy * (weight.to(acc) + weight_offset)
    c1 = mean_features(g * x_hat)
    c2 = mean_features(g) if norm == "layer" else 0.0
    return NormGrads(stats.rstd * (g - c2 - x_hat * c1), sum_rows(dy * x_hat), sum_rows(dy))


class AddGrads(NamedTuple):
    """Gradients in the dtype of the arithmetic; None where it was not asked for."""

    residual: Tensor
    branch: Tensor
    residual_scale: Tensor | None
    row_scale: Tensor | None
    layer_scale: Tensor | None
    branch_bias: Tensor


def add_backward(
    dz: Tensor,
    *,
    residual: Tensor | None = None,
    branch: Tensor | None = None,
    residual_scale: Tensor | float = 1.0,
    row_scale: Tensor | None = None,
    layer_scale: Tensor | float = 1.0,
    keep: Tensor | None = None,
    branch_bias: Tensor | None = None,
) -> AddGrads:
    """Gradients of `add`. `residual` and `branch` are needed only for the gradients of the scales."""
    acc = dz.dtype
    dresidual_scale = drow_scale = dlayer_scale = None
    if residual is not None and isinstance(residual_scale, Tensor):
        dresidual_scale = sum_to(dz * residual.to(acc), residual_scale)
    if branch is not None:
        du = dz * branched(branch.to(acc), branch_bias, keep)
        if row_scale is not None:
            drow_scale = sum_features(du * _cast(layer_scale, acc)).squeeze(-1)
        if isinstance(layer_scale, Tensor):
            rows = 1.0 if row_scale is None else row_scale.to(acc).unsqueeze(-1)
            dlayer_scale = sum_to(du * rows, layer_scale)
    dbranch = dz * _gain(row_scale, layer_scale, acc)
    if keep is not None:
        dbranch = _dropped(dbranch, keep)
    return AddGrads(
        _cast(residual_scale, acc) * dz, dbranch, dresidual_scale, drow_scale, dlayer_scale, sum_rows(dbranch)
    )


def sum_to(t: Tensor, scale: Tensor) -> Tensor:
    """The sum over every dimension that `scale` has not: a feature's over the rows, and for a 0-d scale over the features."""
    rows = sum_rows(t)
    return rows if scale.dim() else sum_features(rows).squeeze(-1)


def sum_features(t: Tensor) -> Tensor:
    """The sum over the last dimension, `(*, 1)`, by halves: torch's own order depends on the other rows and on the threads."""
    if torch.compiler.is_dynamo_compiling():
        return t.sum(-1, keepdim=True)  # one loop, in the compiler's order: the halves would be ten
    while (n := t.shape[-1]) > 1:
        half = (n + 1) // 2
        t = t[..., :half] + torch.nn.functional.pad(t[..., half:], (0, 2 * half - n))
    return t if t.shape[-1] else t.sum(-1, keepdim=True)


def mean_features(t: Tensor) -> Tensor:
    """The mean over the last dimension, `(*, 1)`."""
    return sum_features(t) / t.shape[-1] if t.shape[-1] else t.mean(-1, keepdim=True)


def sum_rows(t: Tensor) -> Tensor:
    """The sum over every dimension but the last."""
    return t.flatten(0, -2).sum(0) if t.dim() > 1 else t


def _dropped(t: Tensor, keep: Tensor) -> Tensor:
    # where, not a product: what is dropped is 0 even if it was infinite.
    return torch.where(keep != 0, t * keep.to(t.dtype), 0.0)


def _cast(scale: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    return scale.to(dtype) if isinstance(scale, Tensor) else scale


def _gain(row_scale: Tensor | None, layer_scale: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    gain = _cast(layer_scale, dtype)
    return gain if row_scale is None else row_scale.to(dtype).unsqueeze(-1) * gain
