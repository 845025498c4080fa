"""The backward operators: what is judged, allocated, launched."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from addnorm.ops import eager
from addnorm.ops.schema import NORMS, WANTS, nothing, stats_dtype
from addnorm.ops.triton import plan
from addnorm.ops.triton.arguments import DTYPES, PLAIN, Add, add_of, like, numbers_of, parameter, rows_of, whole
from addnorm.ops.triton.backward import backward_kernel, finalise_kernel, means_kernel
from addnorm.ops.triton.launch import launch

f32, f64 = torch.float32, torch.float64
_LAYER, _RMS, _NONE = NORMS["layer"], NORMS["rms"], NORMS["none"]
_RESIDUAL, _BRANCH, _WEIGHT, _BIAS, _RESIDUAL_SCALE, _ROW_SCALE, _LAYER_SCALE, _BRANCH_BIAS = (
    1 << bit for bit in range(len(WANTS))
)
_SUMS = (_WEIGHT, _BIAS, _RESIDUAL_SCALE, _LAYER_SCALE, _BRANCH_BIAS)  # over the rows
# Of the kernel that adds up the programs' sums: programs and columns at a time, warps.
_PROGRAMS, _COLUMNS, _WARPS = 128, 16, 4


@functools.cache
def _places(wants: int) -> tuple[int | None, ...]:
    """Where each of the sums is among those that are wanted."""
    wanted = [want for want in _SUMS if wants & want]
    return tuple(wanted.index(want) if wants & want else None for want in _SUMS)


def _fits(dy: Tensor | None, dz: Tensor | None, z: Tensor, stats: Tensor, weight: Tensor | None, wants: int) -> bool:
    """Whether the kernels compute it, as far as the norm goes."""
    if z.dtype not in DTYPES or z.numel() == 0 or z.shape[-1] > plan.LONGEST_ROW or not like(dz, z):
        return False
    if dy is None:  # the stream's gradient goes through as it is
        return dz is not None and not wants & (_WEIGHT | _BIAS)
    return (
        like(dy, z)
        and parameter(weight, z)
        and not (weight is None and wants & _WEIGHT)
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
    wants: int,
) -> tuple[Tensor, ...]:
    """The gradients of residual, branch, weight and bias that `wants` asks for."""
    if not _fits(dy, dz, z, stats, weight, wants):
        return eager.add_norm_train_backward(
            dy, dz, z, stats, weight, rms, dresidual_dtype, branch_dtype, bias_dtype, wants
        )
    found = (
        _like(z, dresidual_dtype) if wants & _RESIDUAL else None,
        _like(z, branch_dtype) if wants & _BRANCH else None,
        torch.empty_like(weight) if weight is not None and wants & _WEIGHT else None,
        z.new_empty(z.shape[-1], dtype=bias_dtype) if wants & _BIAS else None,
    )
    outs = (*found[2:], None, None, None)
    _compute(dy, dz, z, stats, weight, _RMS if rms else _LAYER, 0.0, None, None, PLAIN, *found[:2], None, outs, wants)
    return tuple([nothing(z) if t is None else t for t in found])


def add_norm_backward(
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    norm: int,
    dresidual_dtype: torch.dtype,
    branch_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    wants: int,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    branch: Tensor | None = None,
    residual_factor: float = 1.0,
    residual_scale: Tensor | None = None,
    branch_factor: float = 1.0,
    row_scale: Tensor | None = None,
    layer_scale: Tensor | None = None,
    branch_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
) -> tuple[Tensor, ...]:
    """Every gradient that `wants` asks for, in the order of WANTS."""
    options = (
        residual_factor, residual_scale, branch_factor, row_scale, layer_scale, branch_bias, dropout_p, seed, offset,
    )  # fmt: skip
    scales = (residual_scale, row_scale, layer_scale, branch_bias)
    # A scale's gradient is like the scale, and is made of what the scale multiplies.
    there = all(
        scale is not None and of is not None
        for want, scale, of in zip(WANTS[4:], scales, (residual, branch, branch, z), strict=True)
        if wants >> WANTS.index(want) & 1
    )
    add = add_of(z, *options) if there and _fits(dy, dz, z, stats, weight, wants) else None
    if add is None or not (like(residual, z) and like(branch, z)):
        return eager.add_norm_backward(
            dy, dz, z, stats, weight, norm, dresidual_dtype, branch_dtype, bias_dtype, wants, weight_offset, residual, branch,
            *options,
        )  # fmt: skip
    rows = z.shape[:-1]
    parts = _cut(dy, dz, z, wants).parts  # of a row in several parts each leaves its own sum
    drow_scale = None
    if wants & _ROW_SCALE and row_scale is not None:
        drow_scale = (
            row_scale.new_empty(rows) if parts == 1 else z.new_empty((parts, *rows), dtype=stats_dtype(z.dtype))
        )
    dresidual = _like(z, dresidual_dtype) if wants & _RESIDUAL else None
    dbranch = _like(z, branch_dtype) if wants & _BRANCH else None
    dbias = z.new_empty(z.shape[-1], dtype=bias_dtype) if wants & _BIAS else None
    dweight, dresidual_scale, dlayer_scale, dbranch_bias = (
        t.new_empty(t.shape) if t is not None and wants & want else None
        for t, want in (
            (weight, _WEIGHT), (residual_scale, _RESIDUAL_SCALE), (layer_scale, _LAYER_SCALE), (branch_bias, _BRANCH_BIAS),
        )
    )  # fmt: skip
    _compute(
        dy, dz, z, stats, weight, _NONE if dy is None else norm, weight_offset,
        residual if wants & _RESIDUAL_SCALE else None, branch if wants & (_ROW_SCALE | _LAYER_SCALE) else None, add, dresidual,
        dbranch, drow_scale, (dweight, dbias, dresidual_scale, dlayer_scale, dbranch_bias), wants,
    )  # fmt: skip
    if drow_scale is not None and row_scale is not None and parts > 1:
        drow_scale = drow_scale.sum(0).to(row_scale.dtype)
    found = (dresidual, dbranch, dweight, dbias, dresidual_scale, drow_scale, dlayer_scale, dbranch_bias)
    return tuple([nothing(z) if t is None else t for t in found])


def _cut(dy: Tensor | None, dz: Tensor | None, z: Tensor, wants: int) -> plan.Cut:
    d, places = z.shape[-1], _places(wants)
    read = dz if dy is None else dy
    itemsize = max(z.itemsize, 0 if read is None else read.itemsize)
    return plan.backward(z.numel() // d, d, len(places) - places.count(None), itemsize)


def _like(z: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for a gradient of rows, contiguous."""
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
    add: Add,
    dresidual: Tensor | None,
    dbranch: Tensor | None,
    drow_scale: Tensor | None,
    outs: tuple[Tensor | None, ...],
    wants: int,
) -> None:
    """Writes the gradients that there are; `outs` are those that are summed over the rows, in the order of _SUMS."""
    d = z.shape[-1]
    rows, wide = z.numel() // d, z.dtype is f64
    acc, places = f64 if wide else f32, _places(wants)
    sums = len(places) - places.count(None)
    tile, step, chunk, parts, programs = _cut(dy, dz, z, wants)
    partials = torch.empty((programs, sums, d), dtype=acc, device=z.device) if sums else None

    dy_rows, dy_stride = rows_of(dy, d)
    dz_rows, dz_stride = rows_of(dz, d)
    z_rows, z_stride = (None, None) if norm == _NONE else rows_of(z, d)
    residual_rows, residual_stride = rows_of(residual, d)
    branch_rows, branch_stride = rows_of(branch, d)
    weight, stats_rows = (None, None) if norm == _NONE else (whole(weight), whole(stats))
    more = numbers_of(wide, None if weight_offset == 0.0 or weight is None else weight_offset)
    means = None
    if norm != _NONE and parts > 1:
        means = z.new_empty((rows, 2), dtype=acc)
        launch(
            means_kernel, (rows, 1, 1), (dy_rows, z_rows, stats_rows, weight, means), more, (dy_stride, z_stride), (rows,),
            (d, norm, DTYPES[acc], plan.FORWARD_TILE), plan.MOST_WARPS,
        )  # fmt: skip
    fetched = [t.itemsize for t in (dy_rows, dz_rows, z_rows, residual_rows, branch_rows) if t is not None]
    widths = {*fetched, *[t.itemsize for t in (dresidual, dbranch) if t is not None]}
    # Dropout's words, and rows whose elements other threads have than those of narrower ones.
    exchanged = (0 if add.seed is None else 4) + (0 if len(widths) == 1 else max(widths))
    launch(
        backward_kernel,
        (programs, parts, 1),
        (
            dy_rows, dz_rows, z_rows, stats_rows, means, weight, residual_rows, branch_rows, dresidual, dbranch, drow_scale,
            partials, *add[:5],
        ),
        (*numbers_of(wide, *add[5:8]), *more),
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
            finalise_kernel, (-(-d // _COLUMNS), sums, 1), (partials, *outs), (), (), (programs,),
            (d, parts, *places, sums, *add.steps, DTYPES[acc], _PROGRAMS, _COLUMNS), _WARPS,
        )  # fmt: skip
