"""The forward operators of `ops/schema.py` by the Triton kernels: checks, allocation, launch. The backward is in `gradients.py`.

As with the C++ kernels, unsupported arguments go to the reference: it computes the valid ones (no elements, other dtypes) and
raises the error for the invalid ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from addnorm.ops import aliasing, eager
from addnorm.ops.options import CASTINGS, NORMS
from addnorm.ops.schema import ADD_TENSORS, Kernel, empty_placeholder, outputs_of, stats_dtype
from addnorm.ops.triton import plan
from addnorm.ops.triton.arguments import (
    DTYPES,
    KernelOptions,
    is_parameter,
    kernel_numbers,
    kernel_options,
    matches_rows,
    to_contiguous,
    to_rows,
)
from addnorm.ops.triton.forward import forward_kernel
from addnorm.ops.triton.gradients import add_norm_backward
from addnorm.ops.triton.launch import aligned, launch
from addnorm.ops.triton.streams import operators as streams

f32, f64 = torch.float32, torch.float64


def _write(
    a: Any, add: KernelOptions, y: Tensor | None, z: Tensor | None, stats: Tensor | None, z_dtype: torch.dtype
) -> None:
    """Launch the kernel that writes y, z and the statistics, as far as they are not None."""
    residual, branch, weight = a.residual, a.branch, a.weight
    d = residual.shape[-1]
    rows = residual.numel() // d
    use_float64 = f64 in (residual.dtype, z_dtype, None if branch is None else branch.dtype)
    acc = f64 if z_dtype is f64 else f32
    x_hat = {CASTINGS["llama"]: z_dtype, CASTINGS["t5"]: None if weight is None else weight.dtype}.get(a.casting)
    if x_hat is not None:
        x_hat = None if x_hat.itemsize >= acc.itemsize else DTYPES[x_hat]
    # The options of the add, and dtypes that differ, decide which elements a thread takes, and with them the order of the sums.
    # How depends on Triton's version. z and the statistics are then always written, so that y has the same bits whichever
    # outputs are requested.
    dtypes = {z_dtype, *(t.dtype for t in (residual, branch, y) if t is not None)}
    write_all = use_float64 or len(dtypes) > 1 or any(t is not None for t in add.tensors)
    if y is not None and branch is not None and z is None and write_all:
        z = residual.new_empty(residual.shape, dtype=z_dtype)
    if y is not None and stats is None and write_all:
        stats = residual.new_empty((rows, 2), dtype=stats_dtype(z_dtype))
    residual_rows, residual_stride = to_rows(residual, d)
    branch_rows, branch_stride = to_rows(branch, d)
    tile = plan.forward(d)
    launch(
        forward_kernel,
        (-(-rows // tile.rows), 1, 1),
        (residual_rows, branch_rows, to_contiguous(weight), to_contiguous(a.bias), y, z, stats, *add.tensors),
        kernel_numbers(use_float64, *add.numbers, a.eps, None if a.weight_offset == 0.0 else a.weight_offset),
        (residual_stride, branch_stride),
        (add.threshold, add.offset, rows),
        (
            d, a.norm, DTYPES[f64 if use_float64 else f32], DTYPES[acc], DTYPES[z_dtype], x_hat, *add.steps, tile.rows, tile.d,
        ),
        tile.warps,
    )  # fmt: skip


def add_norm_forward(a: Any) -> tuple[Tensor, ...]:
    """Return y, z and the statistics for any options; those after the first `outputs` are empty placeholders."""
    add, outputs = _options(a), outputs_of(a)
    z_dtype = a.residual.dtype if a.branch is None else a.residual_dtype or a.residual.dtype
    if add is None or any(output is not None and output[1] not in DTYPES for output in (*outputs, ((), z_dtype))):
        return eager.add_norm_forward(a)
    y, z, stats = (None if o is None else a.residual.new_empty(o[0], dtype=o[1]) for o in outputs)
    if y is not None or z is not None:
        _write(a, add, y, z, stats, z_dtype)
    return tuple(empty_placeholder(a.residual) if t is None else t for t in (y, z, stats))


def _options(a: Any) -> KernelOptions | None:
    """Return the options of a call as the kernels take them, None if the kernels do not support the arguments."""
    residual = a.residual
    supported = (
        residual.numel() > 0
        and residual.dim() > 0
        and residual.shape[-1] <= plan.MAX_ROW
        and residual.dtype in DTYPES
        and matches_rows(a.branch, residual)
        and is_parameter(a.weight, residual)
        and is_parameter(a.bias, residual)
        and a.eps >= 0.0
        and (a.weight is not None or a.weight_offset == 0.0)
    )
    return kernel_options(residual, a) if supported else None


def add_norm_out(a: Any) -> None:
    """Write y and z into existing tensors; the reference handles tensors that the kernels may not write."""
    add = _options(a)
    y, z = a.y, a.z
    direct = (
        (y is not None) == (a.norm != NORMS["none"])
        and not (z is not None and a.branch is None)
        and (y is not None or z is not None)
        and not (y is not None and z is not None and aliasing.shares_memory(y, z))
        and _is_writable(y, a)
        and _is_writable(z, a)
    )
    if add is None or not direct:
        eager.add_norm_out(a)
    else:
        _write(a, add, y, z, None, a.residual.dtype if z is None else z.dtype)


def _is_writable(target: Tensor | None, a: Any) -> bool:
    """Return whether the kernel may write `target`: no input is overwritten before every program has read its rows.

    The alignment of a target decides which elements a thread takes, and with them the order of the sums. So the bits equal those
    of a new tensor only if the target is aligned like one.
    """
    if target is None:
        return True
    parameters = (a.weight, a.bias, *(getattr(a, name) for name in ADD_TENSORS))
    return (
        matches_rows(target, a.residual)
        and target.is_contiguous()
        and aligned(target)
        and all(
            t is None or not aliasing.shares_memory(target, t) or aliasing.is_same_memory(target, t)
            for t in (a.residual, a.branch)
        )
        and not any(t is not None and aliasing.shares_memory(target, t) for t in parameters)
    )


KERNELS: dict[str, Kernel] = {
    "add_norm_forward": add_norm_forward, "add_norm_backward": add_norm_backward, "add_norm_out": add_norm_out,
    **streams.KERNELS,
}  # fmt: skip
