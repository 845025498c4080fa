"""The backward operators by the Triton kernels: checks, allocation, launch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from addnorm.ops import eager
from addnorm.ops.options import ADD_OPTIONS, GRADIENTS, NORMS
from addnorm.ops.schema import BackwardArguments, empty_placeholder, stats_dtype
from addnorm.ops.triton import plan
from addnorm.ops.triton.arguments import (
    DTYPES,
    NO_OPTIONS,
    KernelOptions,
    is_parameter,
    kernel_numbers,
    kernel_options,
    matches_rows,
    to_contiguous,
    to_rows,
)
from addnorm.ops.triton.backward import backward_kernel, finalize_kernel, means_kernel
from addnorm.ops.triton.launch import launch

f32, f64 = torch.float32, torch.float64
_LAYER, _RMS, _NONE = NORMS["layer"], NORMS["rms"], NORMS["none"]
_BITS = {name: 1 << bit for bit, name in enumerate(GRADIENTS)}
_RESIDUAL, _BRANCH, _WEIGHT, _BIAS, _RESIDUAL_SCALE, _ROW_SCALE, _LAYER_SCALE, _BRANCH_BIAS = _BITS.values()
_SUMS = (_WEIGHT, _BIAS, _RESIDUAL_SCALE, _LAYER_SCALE, _BRANCH_BIAS)  # gradients that are sums over the rows
# For the kernel that adds the programs' sums: programs and columns at a time, warps.
_PROGRAMS, _COLUMNS, _WARPS = 128, 16, 4


@functools.cache
def _places(grad_mask: int) -> tuple[int | None, ...]:
    """Return for each of _SUMS its index among the requested ones, None if it is not requested."""
    requested = [bit for bit in _SUMS if grad_mask & bit]
    return tuple(requested.index(bit) if grad_mask & bit else None for bit in _SUMS)


def _is_supported(
    dy: Tensor | None, dz: Tensor | None, z: Tensor, stats: Tensor, weight: Tensor | None, grad_mask: int
) -> bool:
    """Return whether the kernels support these arguments of the norm."""
    if z.dtype not in DTYPES or z.numel() == 0 or z.shape[-1] > plan.MAX_ROW or not matches_rows(dz, z):
        return False
    if dy is None:  # the gradient of z is passed on unchanged
        return dz is not None and not grad_mask & (_WEIGHT | _BIAS)
    return (
        matches_rows(dy, z)
        and is_parameter(weight, z)
        and not (weight is None and grad_mask & _WEIGHT)
        and stats.shape == (*z.shape[:-1], 2)
        and stats.dtype is stats_dtype(z.dtype)
    )


def add_norm_train_backward(
    dy: Tensor,
    dz: Tensor | None,
    z: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    rms: bool,
    dresidual_dtype: torch.dtype,
    branch_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    grad_mask: int,
) -> tuple[Tensor, ...]:
    """Return the gradients of residual, branch, weight and bias that `grad_mask` requests."""
    if not _is_supported(dy, dz, z, stats, weight, grad_mask):
        return eager.add_norm_train_backward(
            dy, dz, z, stats, weight, rms, dresidual_dtype, branch_dtype, bias_dtype, grad_mask
        )
    results = (
        _empty_gradient(z, dresidual_dtype) if grad_mask & _RESIDUAL else None,
        _empty_gradient(z, branch_dtype) if grad_mask & _BRANCH else None,
        torch.empty_like(weight) if weight is not None and grad_mask & _WEIGHT else None,
        z.new_empty(z.shape[-1], dtype=bias_dtype) if grad_mask & _BIAS else None,
    )
    outs = (*results[2:], None, None, None)
    _compute(
        dy, dz, z, stats, weight, _RMS if rms else _LAYER, 0.0, None, None, NO_OPTIONS, *results[:2], None, outs, grad_mask,
    )  # fmt: skip
    return tuple([empty_placeholder(z) if t is None else t for t in results])


def add_norm_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return, for any options, the gradients that `grad_mask` requests, in the order of GRADIENTS."""
    a = BackwardArguments(*arguments)
    dy, dz, z, weight, grad_mask = a.dy, a.dz, a.z, a.weight, a.grad_mask
    # A scale's gradient is computed from the tensor that it multiplies.
    complete = all(
        getattr(a, option.name) is not None and getattr(a, option.gradient) is not None
        for option in ADD_OPTIONS
        if option.gradient and grad_mask & _BITS[option.name]
    )
    add = kernel_options(z, a) if complete and _is_supported(dy, dz, z, a.stats, weight, grad_mask) else None
    if add is None or not (matches_rows(a.residual, z) and matches_rows(a.branch, z)):
        return eager.add_norm_backward(*a)
    rows = z.shape[:-1]
    parts = _cut(dy, dz, z, grad_mask).parts  # each part of a long row leaves its own sum
    row_scale, drow_scale = a.row_scale, None
    if grad_mask & _ROW_SCALE and row_scale is not None:
        drow_scale = (
            row_scale.new_empty(rows) if parts == 1 else z.new_empty((parts, *rows), dtype=stats_dtype(z.dtype))
        )
    dresidual = _empty_gradient(z, a.dresidual_dtype) if grad_mask & _RESIDUAL else None
    dbranch = _empty_gradient(z, a.branch_dtype) if grad_mask & _BRANCH else None
    dbias = z.new_empty(z.shape[-1], dtype=a.bias_dtype) if grad_mask & _BIAS else None
    dweight, dresidual_scale, dlayer_scale, dbranch_bias = (
        t.new_empty(t.shape) if t is not None and grad_mask & bit else None
        for t, bit in (
            (weight, _WEIGHT), (a.residual_scale, _RESIDUAL_SCALE), (a.layer_scale, _LAYER_SCALE), (a.branch_bias, _BRANCH_BIAS),
        )
    )  # fmt: skip
    _compute(
        dy, dz, z, a.stats, weight, _NONE if dy is None else a.norm, a.weight_offset,
        a.residual if grad_mask & _RESIDUAL_SCALE else None, a.branch if grad_mask & (_ROW_SCALE | _LAYER_SCALE) else None, add,
        dresidual, dbranch, drow_scale, (dweight, dbias, dresidual_scale, dlayer_scale, dbranch_bias), grad_mask,
    )  # fmt: skip
    if drow_scale is not None and row_scale is not None and parts > 1:
        drow_scale = drow_scale.sum(0).to(row_scale.dtype)
    results = (dresidual, dbranch, dweight, dbias, dresidual_scale, drow_scale, dlayer_scale, dbranch_bias)
    return tuple([empty_placeholder(z) if t is None else t for t in results])


def _cut(dy: Tensor | None, dz: Tensor | None, z: Tensor, grad_mask: int) -> plan.Cut:
    d, places = z.shape[-1], _places(grad_mask)
    read = dz if dy is None else dy
    itemsize = max(z.itemsize, 0 if read is None else read.itemsize)
    return plan.backward(z.numel() // d, d, len(places) - places.count(None), itemsize)


def _empty_gradient(z: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty contiguous tensor for the gradient of rows."""
    if z.dtype is dtype and z.is_contiguous():
        return torch.empty_like(z)
    return z.new_empty(z.shape, dtype=dtype)


def _compute(
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    norm: int,
    weight_offset: float,
    residual: Tensor | None,
    branch: Tensor | None,
    add: KernelOptions,
    dresidual: Tensor | None,
    dbranch: Tensor | None,
    drow_scale: Tensor | None,
    outs: tuple[Tensor | None, ...],
    grad_mask: int,
) -> None:
    """Launch the kernels that write the gradients that are not None; `outs` are the sums over the rows, in the order of _SUMS."""
    d = z.shape[-1]
    rows, use_float64 = z.numel() // d, z.dtype is f64
    acc, places = f64 if use_float64 else f32, _places(grad_mask)
    sums = len(places) - places.count(None)
    tile, step, chunk, parts, programs = _cut(dy, dz, z, grad_mask)
    partials = torch.empty((programs, sums, d), dtype=acc, device=z.device) if sums else None

    dy_rows, dy_stride = to_rows(dy, d)
    dz_rows, dz_stride = to_rows(dz, d)
    z_rows, z_stride = (None, None) if norm == _NONE else to_rows(z, d)
    residual_rows, residual_stride = to_rows(residual, d)
    branch_rows, branch_stride = to_rows(branch, d)
    weight, stats_rows = (None, None) if norm == _NONE else (to_contiguous(weight), to_contiguous(stats))
    offsets = kernel_numbers(use_float64, None if weight_offset == 0.0 or weight is None else weight_offset)
    means = None
    if norm != _NONE and parts > 1:
        means = z.new_empty((rows, 2), dtype=acc)
        launch(
            means_kernel, (rows, 1, 1), (dy_rows, z_rows, stats_rows, weight, means), offsets, (dy_stride, z_stride), (rows,),
            (d, norm, DTYPES[acc], plan.FORWARD_TILE), plan.MAX_WARPS,
        )  # fmt: skip
    fetched = [t.itemsize for t in (dy_rows, dz_rows, z_rows, residual_rows, branch_rows) if t is not None]
    widths = {*fetched, *[t.itemsize for t in (dresidual, dbranch) if t is not None]}
    # Dropout's random words, and rows whose elements belong to other threads than those of a narrower dtype.
    exchanged = (0 if add.seed is None else 4) + (0 if len(widths) == 1 else max(widths))
    launch(
        backward_kernel,
        (programs, parts, 1),
        (
            dy_rows, dz_rows, z_rows, stats_rows, means, weight, residual_rows, branch_rows, dresidual, dbranch, drow_scale,
            partials, *add.tensors,
        ),
        (*kernel_numbers(use_float64, *add.numbers), *offsets),
        (dy_stride, dz_stride, z_stride, residual_stride, branch_stride),
        (add.threshold, add.offset, rows, chunk),
        (
            d, norm, DTYPES[acc], *places, sums, *add.steps, tile.rows, tile.d, step,
            plan.stages(tile, sum(fetched), exchanged) if step == tile.d else 1,
        ),
        tile.warps,
    )  # fmt: skip
    if partials is not None:
        launch(
            finalize_kernel, (-(-d // _COLUMNS), sums, 1), (partials, *outs), (), (), (programs,),
            (d, parts, *places, sums, *add.steps, DTYPES[acc], _PROGRAMS, _COLUMNS), _WARPS,
        )  # fmt: skip
