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
from addnorm.ops.schema import ADD_ARGUMENTS, ForwardArguments, OutArguments, empty_placeholder, stats_dtype
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
from addnorm.ops.triton.forward import forward_kernel
from addnorm.ops.triton.gradients import add_norm_backward, add_norm_train_backward
from addnorm.ops.triton.launch import aligned, launch

__all__ = [
    "add_norm", "add_norm_backward", "add_norm_forward", "add_norm_out", "add_norm_stream", "add_norm_train",
    "add_norm_train_backward",
]  # fmt: skip

f32, f64 = torch.float32, torch.float64
_LAYER, _RMS, _NONE = NORMS["layer"], NORMS["rms"], NORMS["none"]
_LLAMA, _T5 = CASTINGS["llama"], CASTINGS["t5"]
_TENSOR_OPTIONS = tuple(argument.name for argument in ADD_ARGUMENTS if argument.type == "Tensor?")


def _write(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: int,
    add: KernelOptions,
    weight_offset: float,
    casting: int,
    y: Tensor | None,
    z: Tensor | None,
    stats: Tensor | None,
    z_dtype: torch.dtype,
) -> None:
    """Launch the kernel that writes y, z and the statistics, as far as they are not None."""
    d = residual.shape[-1]
    rows = residual.numel() // d
    use_float64 = residual.dtype is f64 or z_dtype is f64 or (branch is not None and branch.dtype is f64)
    acc = f64 if z_dtype is f64 else f32
    x_hat = None
    if (casting != 0 and weight is not None) or casting == _LLAMA:
        x_hat = weight.dtype if casting == _T5 else z_dtype  # type: ignore[union-attr]  # T5's is not None
        x_hat = None if x_hat.itemsize >= acc.itemsize else DTYPES[x_hat]
    # The options of the add, and a dtype that no other tensor has, decide which elements a thread takes, and with them the order
    # of the sums. z and the statistics are then always written, so that y has the same bits whichever outputs are requested.
    write_all = use_float64 or any(t is not None for t in add.tensors)
    own_dtype = z_dtype not in (
        residual.dtype,
        residual.dtype if branch is None else branch.dtype,
        None if y is None else y.dtype,
    )
    if y is not None and branch is not None and z is None and (write_all or own_dtype):
        z = residual.new_empty(residual.shape, dtype=z_dtype)
    if y is not None and stats is None and write_all:
        stats = residual.new_empty((rows, 2), dtype=stats_dtype(z_dtype))
    residual_rows, residual_stride = to_rows(residual, d)
    branch_rows, branch_stride = to_rows(branch, d)
    tile = plan.forward(d)
    launch(
        forward_kernel,
        (-(-rows // tile.rows), 1, 1),
        (residual_rows, branch_rows, to_contiguous(weight), to_contiguous(bias), y, z, stats, *add.tensors),
        kernel_numbers(use_float64, *add.numbers, eps, None if weight_offset == 0.0 else weight_offset),
        (residual_stride, branch_stride),
        (add.threshold, add.offset, rows),
        (
            d, norm, DTYPES[f64 if use_float64 else f32], DTYPES[acc], DTYPES[z_dtype], x_hat, *add.steps, tile.rows, tile.d,
        ),
        tile.warps,
    )  # fmt: skip


def add_norm_forward(*arguments: Any, outputs: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for any options, the first `outputs` of y, z and the statistics, and placeholders for the others."""
    if len(arguments) > len(ForwardArguments._fields):
        outputs = arguments[-1]
    a = ForwardArguments(*arguments[: len(ForwardArguments._fields)])
    residual, branch = a.residual, a.branch
    add = None
    if _is_supported(residual, branch, a.weight, a.bias, a.eps, a.weight_offset):
        add = kernel_options(residual, a)
    z_dtype = residual.dtype if branch is None else a.residual_dtype or residual.dtype
    y_dtype = a.out_dtype or (residual if branch is None else branch).dtype
    if add is None or z_dtype not in DTYPES or y_dtype not in DTYPES:
        return eager.add_norm_forward(*a, outputs)
    shape, none = residual.shape, a.norm == _NONE
    y = None if none else residual.new_empty(shape, dtype=y_dtype)
    z = residual.new_empty(shape, dtype=z_dtype) if branch is not None and (outputs > 1 or none) else None
    stats = None if none or outputs < 3 else residual.new_empty((*shape[:-1], 2), dtype=stats_dtype(z_dtype))
    if y is not None or z is not None:
        _write(
            residual, branch, a.weight, a.bias, a.eps, a.norm, add, a.weight_offset, a.casting, y, z, stats, z_dtype,
        )  # fmt: skip
    y, z, stats = (empty_placeholder(residual) if t is None else t for t in (y, z, stats))
    return y, z, stats


def _is_supported(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
) -> bool:
    """Return whether the kernels support these arguments."""
    return (
        residual.numel() > 0
        and residual.dim() > 0
        and residual.shape[-1] <= plan.MAX_ROW
        and residual.dtype in DTYPES
        and matches_rows(branch, residual)
        and is_parameter(weight, residual)
        and is_parameter(bias, residual)
        and eps >= 0.0
        and (weight is not None or weight_offset == 0.0)
    )


def _empty_rows(residual: Tensor, like: Tensor) -> Tensor:
    """Return an empty contiguous tensor with the shape of `residual` and the dtype of `like`."""
    if like.is_contiguous():
        return torch.empty_like(like)
    return like.new_empty(residual.shape)


def add_norm(
    residual: Tensor, branch: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> Tensor:
    """Return y = norm(residual + branch)."""
    if not _is_supported(residual, branch, weight, bias, eps):
        return eager.add_norm(residual, branch, weight, bias, eps, rms)
    y = _empty_rows(residual, residual if branch is None else branch)
    _write(
        residual, branch, weight, bias, eps, _RMS if rms else _LAYER, NO_OPTIONS, 0.0, 0, y, None, None, residual.dtype
    )
    return y


def add_norm_stream(
    residual: Tensor, branch: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> tuple[Tensor, Tensor]:
    """Return y and z."""
    if not _is_supported(residual, branch, weight, bias, eps):
        return eager.add_norm_stream(residual, branch, weight, bias, eps, rms)
    y, z = _empty_rows(residual, branch), _empty_rows(residual, residual)
    _write(residual, branch, weight, bias, eps, _RMS if rms else _LAYER, NO_OPTIONS, 0.0, 0, y, z, None, residual.dtype)
    return y, z


def add_norm_train(
    residual: Tensor, branch: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, z and the statistics for the backward."""
    if not _is_supported(residual, branch, weight, bias, eps):
        return eager.add_norm_train(residual, branch, weight, bias, eps, rms)
    y = _empty_rows(residual, residual if branch is None else branch)
    z = None if branch is None else _empty_rows(residual, residual)
    stats = residual.new_empty((*residual.shape[:-1], 2), dtype=stats_dtype(residual.dtype))
    _write(
        residual, branch, weight, bias, eps, _RMS if rms else _LAYER, NO_OPTIONS, 0.0, 0, y, z, stats, residual.dtype
    )
    return y, empty_placeholder(residual) if z is None else z, stats


def add_norm_out(*arguments: Any) -> None:
    """Write y and z into existing tensors; the reference handles tensors that the kernels may not write."""
    a = OutArguments(*arguments)
    residual, branch, y, z = a.residual, a.branch, a.y, a.z
    add = None
    if _is_supported(residual, branch, a.weight, a.bias, a.eps, a.weight_offset):
        add = kernel_options(residual, a)
    parameters = (a.weight, a.bias, *(getattr(a, name) for name in _TENSOR_OPTIONS))
    direct = (
        add is not None
        and (y is not None) == (a.norm != _NONE)
        and not (z is not None and branch is None)
        and (y is not None or z is not None)
        and not (y is not None and z is not None and aliasing.shares_memory(y, z))
        and _is_writable(y, residual, branch, parameters)
        and _is_writable(z, residual, branch, parameters)
    )
    if add is None or not direct:
        eager.add_norm_out(*a)
        return
    z_dtype = residual.dtype if z is None else z.dtype
    _write(residual, branch, a.weight, a.bias, a.eps, a.norm, add, a.weight_offset, a.casting, y, z, None, z_dtype)


def _is_writable(
    target: Tensor | None, residual: Tensor, branch: Tensor | None, parameters: tuple[Tensor | None, ...]
) -> bool:
    """Return whether the kernel may write `target`: no input is overwritten before every program has read its rows.

    The alignment of a target decides which elements a thread takes, and with them the order of the sums. So the bits equal those
    of a new tensor only if the target is aligned like one.
    """
    if target is None:
        return True
    return (
        matches_rows(target, residual)
        and target.is_contiguous()
        and aligned(target)
        and all(
            t is None or not aliasing.shares_memory(target, t) or aliasing.is_same_memory(target, t)
            for t in (residual, branch)
        )
        and not any(t is not None and aliasing.shares_memory(target, t) for t in parameters)
    )
