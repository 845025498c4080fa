r"""The operation in eager PyTorch: the specification, the fallback of every kernel and the oracle of the tests.

    z = residual_scale * residual + row_scale * layer_scale * dropout(branch + branch_bias)
    y = norm(z) * (weight + weight_offset) + bias

Every implementation guarantees:

- Arithmetic and statistics are in float32 (`float64` if residual, branch or z is float64); the variance is centred.
- z is rounded once, to its dtype, and y is the norm of the rounded z.
- y is rounded once, to its dtype (except for the two values of `casting` that round earlier, as some models do).

The functions are differentiable to every order. The two that end in `_backward` are the written-out derivatives, which the
kernels compute. Arguments are not checked here; `addnorm.functional` checks them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from addnorm._util.norms import KINDS
from addnorm._util.norms import Norm as Norm

_one_loop: ContextVar[bool] = ContextVar("one_loop", default=False)

Casting = Literal["float32", "llama", "t5"]


def compute_dtype(*tensors: Tensor | None, dtype: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype of the arithmetic: `float64` if a tensor has it or `dtype` is it, else `float32`."""
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
    """Return the sum z in `dtype`; None means the dtype of residual.

    `keep` is the dropout mask divided by 1 - p; `row_scale` has one factor for each row, `(*)`.
    """
    acc = compute_dtype(residual, branch, dtype=dtype)
    write = drop_branch(branch.to(acc), branch_bias, keep) * _gain(row_scale, layer_scale, acc)
    return (_cast(residual_scale, acc) * residual.to(acc) + write).to(dtype or residual.dtype)


def drop_branch(branch: Tensor, branch_bias: Tensor | None, keep: Tensor | None) -> Tensor:
    """Return dropout(branch + branch_bias)."""
    u = branch if branch_bias is None else branch + branch_bias.to(branch.dtype)
    return u if keep is None else _apply_mask(u, keep)


class Statistics(NamedTuple):
    """`mean` (0 unless the norm is centred) and `rstd` of every row, `(*, 1)`, in the dtype of the arithmetic."""

    mean: Tensor | float
    rstd: Tensor


def statistics(z: Tensor, norm: Norm, eps: float) -> Statistics:
    """Return mean and rstd of each row, in two passes: for a root of a mean square, 1 / sqrt(mean((z - mean)^2) + eps)."""
    kind = KINDS[norm]
    mean: Tensor | float = 0.0
    if kind.is_centred:
        mean = mean_features(z)
        mean = mean + mean_features(z - mean)  # the mean of a constant row is then exact
    return Statistics(mean, kind.rstd(mean_features(kind.term(z - mean)), eps))


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
    """Return y = norm(z) * (weight + weight_offset) + bias in `dtype`; None means the dtype of z."""
    acc = compute_dtype(z)
    mean, rstd = statistics(z.to(acc), norm, eps)
    x_hat = (z.to(acc) - mean) * rstd
    if casting == "llama":  # rounded to z's dtype before the weight
        x_hat = x_hat.to(z.dtype).to(acc)
    elif casting == "t5" and weight is not None:  # rounded to the weight's dtype before the weight
        x_hat = x_hat.to(weight.dtype).to(acc)
    if weight is not None:
        x_hat = x_hat * (weight.to(acc) + weight_offset)
    if bias is not None:
        x_hat = x_hat + bias.to(acc)
    return x_hat.to(dtype or z.dtype)


def torch_norm(norm: Norm, z: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return torch's own norm of z over the last dimension; for a norm that torch does not have, `normalize`."""
    kind = KINDS[norm]
    if kind.function is None:
        with sums_in_one_loop():
            return normalize(z, weight, bias, norm=norm, eps=eps)
    if kind.has_bias:
        return kind.function(z, z.shape[-1:], weight, bias, eps)  # type: ignore[no-any-return]
    y: Tensor = kind.function(z, z.shape[-1:], weight, eps)
    return y if bias is None else y + bias


class NormGrads(NamedTuple):
    """Gradients of `normalize` in the dtype of the arithmetic; those of the parameters are summed over the rows."""

    z: Tensor
    weight: Tensor
    bias: Tensor


def normalize_backward(
    dy: Tensor, z: Tensor, weight: Tensor | None, stats: Statistics, *, norm: Norm, weight_offset: float = 0.0
) -> NormGrads:
    """Return dz = rstd * (g - mean(g) - slope * mean(g * x_hat)) with g = dy * weight, and the parameters' gradients.

    The term mean(g) is left out unless the norm is centred. The slope of a root of a mean square is x_hat.
    """
    kind, acc = KINDS[norm], stats.rstd.dtype
    dy, z = dy.to(acc), z.to(acc)
    x_hat = (z - stats.mean) * stats.rstd
    g = dy if weight is None else dy * (weight.to(acc) + weight_offset)
    c1 = mean_features(g * x_hat)
    c2 = mean_features(g) if kind.is_centred else 0.0
    return NormGrads(stats.rstd * (g - c2 - kind.slope(x_hat) * c1), sum_rows(dy * x_hat), sum_rows(dy))


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
) -> dict[str, Tensor | None]:
    """Return the gradients of the arguments of `add` by name, in the dtype of the arithmetic.

    `residual` and `branch` are needed only for the gradients of the scales. The gradient of a scale is None if the scale is no
    tensor, or if the tensor that it multiplies is not passed.
    """
    acc = dz.dtype
    dresidual_scale = drow_scale = dlayer_scale = None
    if residual is not None and isinstance(residual_scale, Tensor):
        dresidual_scale = sum_to(dz * residual.to(acc), residual_scale)
    if branch is not None:
        du = dz * drop_branch(branch.to(acc), branch_bias, keep)
        if row_scale is not None:
            drow_scale = sum_features(du * _cast(layer_scale, acc)).squeeze(-1)
        if isinstance(layer_scale, Tensor):
            rows = 1.0 if row_scale is None else row_scale.to(acc).unsqueeze(-1)
            dlayer_scale = sum_to(du * rows, layer_scale)
    dbranch = dz * _gain(row_scale, layer_scale, acc)
    if keep is not None:
        dbranch = _apply_mask(dbranch, keep)
    return {
        "residual": _cast(residual_scale, acc) * dz, "branch": dbranch, "residual_scale": dresidual_scale,
        "row_scale": drow_scale, "layer_scale": dlayer_scale, "branch_bias": sum_rows(dbranch),
    }  # fmt: skip


def sum_to(t: Tensor, scale: Tensor) -> Tensor:
    """Return `t` summed to the shape of `scale`: over the rows, and over the features too if `scale` is 0-d."""
    rows = sum_rows(t)
    return rows if scale.dim() else sum_features(rows).squeeze(-1)


@contextmanager
def sums_in_one_loop() -> Iterator[None]:
    """Make `sum_features` call `torch.sum`, one operator, for a graph whose compiler or runtime orders additions."""
    token = _one_loop.set(True)
    try:
        yield
    finally:
        _one_loop.reset(token)


def sum_features(t: Tensor) -> Tensor:
    """Return the sum over the last dimension, `(*, 1)`, by adding one half to the other until one element is left.

    This order of additions depends on the number of features alone. That of `torch.sum` also depends on the other rows and on
    the number of threads.
    """
    if torch.compiler.is_dynamo_compiling() or _one_loop.get():
        return t.sum(-1, keepdim=True)  # one operator; the compiler orders the additions
    while (n := t.shape[-1]) > 1:
        half = (n + 1) // 2
        t = t[..., :half] + torch.nn.functional.pad(t[..., half:], (0, 2 * half - n))
    return t if t.shape[-1] else t.sum(-1, keepdim=True)


def mean_features(t: Tensor) -> Tensor:
    """Return the mean over the last dimension, `(*, 1)`."""
    return sum_features(t) / t.shape[-1] if t.shape[-1] else t.mean(-1, keepdim=True)


def sum_rows(t: Tensor) -> Tensor:
    """Return the sum over every dimension but the last."""
    return t.sum(tuple(range(t.dim() - 1))) if t.dim() > 1 else t


def _apply_mask(t: Tensor, keep: Tensor) -> Tensor:
    # torch.where instead of a product: a dropped element is 0 even if it was infinite.
    return torch.where(keep != 0, t * keep.to(t.dtype), 0.0)


def _cast(scale: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    return scale.to(dtype) if isinstance(scale, Tensor) else scale


def _gain(row_scale: Tensor | None, layer_scale: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    gain = _cast(layer_scale, dtype)
    return gain if row_scale is None else row_scale.to(dtype).unsqueeze(-1) * gain
