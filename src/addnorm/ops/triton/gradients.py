"""The backward operator by the Triton kernels: checks, allocation, launch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from addnorm.ops import eager
from addnorm.ops.options import ADD_OPTIONS, GRADIENTS, NORMS
from addnorm.ops.schema import empty_placeholder, gradients_of, make_empty, stats_dtype
from addnorm.ops.triton import plan
from addnorm.ops.triton.arguments import (
    DTYPES,
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
_BITS = {name: 1 << bit for bit, name in enumerate(GRADIENTS)}
_SUMS = ("weight", "bias", "residual_scale", "layer_scale", "branch_bias")  # gradients that are sums over the rows
# For the kernel that adds the programs' sums: programs and columns at a time, warps.
_PROGRAMS, _COLUMNS, _WARPS = 128, 16, 4


@functools.cache
def _places(grad_mask: int) -> tuple[int | None, ...]:
    """Return for each of _SUMS its index among the requested ones, None if it is not requested."""
    requested = [name for name in _SUMS if grad_mask & _BITS[name]]
    return tuple(requested.index(name) if name in requested else None for name in _SUMS)


def _is_supported(a: Any) -> bool:
    """Return whether the kernels support the arguments other than the options, which `kernel_options` checks."""
    z = a.z
    if z.dtype not in DTYPES or z.numel() == 0 or z.shape[-1] > plan.MAX_ROW:
        return False
    if not all(matches_rows(t, z) for t in (a.dy, a.dz, a.residual, a.branch)):
        return False
    for option in ADD_OPTIONS:  # a scale's gradient is computed from the tensor that it multiplies
        needed = (option.name, option.gradient) if option.gradient and a.grad_mask & _BITS[option.name] else ()
        if any(getattr(a, name) is None for name in needed):
            return False
    if a.dy is None:  # the gradient of z is passed on unchanged
        return a.dz is not None and not a.grad_mask & (_BITS["weight"] | _BITS["bias"])
    return (
        is_parameter(a.weight, z)
        and not (a.weight is None and a.grad_mask & _BITS["weight"])
        and a.stats.shape == (*z.shape[:-1], 2)
        and a.stats.dtype is stats_dtype(z.dtype)
    )


def add_norm_backward(a: Any) -> tuple[Tensor, ...]:
    """Return, for any options, the gradients that `grad_mask` requests, in the order of GRADIENTS."""
    add = kernel_options(a.z, a) if _is_supported(a) else None
    if add is None:
        return eager.add_norm_backward(a)
    dy, dz, z, mask = a.dy, a.dz, a.z, a.grad_mask
    d, use_float64, norm = z.shape[-1], z.dtype is f64, NORMS["none"] if dy is None else a.norm
    rows, acc, places = z.numel() // d, f64 if use_float64 else f32, _places(mask)
    sums = len(places) - places.count(None)
    itemsize = max(z.itemsize, (dz if dy is None else dy).itemsize)
    tile, step, chunk, parts, programs = plan.backward(rows, d, sums, itemsize)
    grads = _allocate(a, parts)

    weight, stats = (None, None) if norm == NORMS["none"] else (to_contiguous(a.weight), to_contiguous(a.stats))
    residual = a.residual if mask & _BITS["residual_scale"] else None
    branch = a.branch if mask & (_BITS["row_scale"] | _BITS["layer_scale"]) else None
    streams, strides = zip(
        *(to_rows(t, d) for t in (dy, dz, None if norm == NORMS["none"] else z, residual, branch)), strict=True
    )
    offsets = kernel_numbers(use_float64, None if a.weight_offset == 0.0 or weight is None else a.weight_offset)
    means = None
    if norm != NORMS["none"] and parts > 1:
        means = z.new_empty((rows, 2), dtype=acc)
        launch(
            means_kernel, (rows, 1, 1), (streams[0], streams[2], stats, weight, means), offsets, (strides[0], strides[2]),
            (rows,), (d, norm, DTYPES[acc], plan.FORWARD_TILE), plan.MAX_WARPS,
        )  # fmt: skip
    partials = torch.empty((programs, sums, d), dtype=acc, device=z.device) if sums else None
    written = [grads.get(name) for name in ("residual", "branch", "row_scale")]
    fetched = [t.itemsize for t in streams if t is not None]
    widths = {*fetched, *[t.itemsize for t in written[:2] if t is not None]}
    # Dropout's random words, and rows whose elements belong to other threads than those of a narrower dtype.
    exchanged = (0 if add.seed is None else 4) + (0 if len(widths) == 1 else max(widths))
    launch(
        backward_kernel,
        (programs, parts, 1),
        (*streams[:3], stats, means, weight, *streams[3:], *written, partials, *add.tensors),
        (*kernel_numbers(use_float64, *add.numbers), *offsets),
        strides,
        (add.threshold, add.offset, rows, chunk),
        (
            d, norm, DTYPES[acc], *places, sums, *add.steps, tile.rows, tile.d, step,
            plan.stages(tile, sum(fetched), exchanged) if step == tile.d else 1,
        ),
        tile.warps,
    )  # fmt: skip
    if partials is not None:
        launch(
            finalize_kernel, (-(-d // _COLUMNS), sums, 1), (partials, *(grads.get(name) for name in _SUMS)), (), (), (programs,),
            (d, parts, *places, sums, *add.steps, DTYPES[acc], _PROGRAMS, _COLUMNS), _WARPS,
        )  # fmt: skip
    if parts > 1 and "row_scale" in grads:
        grads["row_scale"] = grads["row_scale"].sum(0).to(a.row_scale.dtype)
    return tuple(grads[name] if name in grads else empty_placeholder(z) for name in GRADIENTS)


def _allocate(a: Any, parts: int) -> dict[str, Tensor]:
    """Allocate a tensor for each requested gradient, by name.

    With `parts` > 1, the gradient of row_scale gets one row of partial sums for each part.
    """
    z = a.z
    shapes = gradients_of(a)
    if parts > 1 and "row_scale" in shapes:
        shapes["row_scale"] = (parts, *z.shape[:-1]), stats_dtype(z.dtype)
    return {name: make_empty(z, shape) for name, shape in shapes.items()}
