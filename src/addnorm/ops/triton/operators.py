"""The operators of `ops/schema.py` by the Triton kernels: what is judged, allocated, launched. gradients.py has the backward's.

As around the C++ kernels, what fits is computed, and what is strange but perhaps valid (no elements, another dtype) or simply
wrong goes to the reference, which refuses the latter with the sentence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from addnorm.ops import aliasing, eager
from addnorm.ops.schema import CASTINGS, NORMS, nothing, stats_dtype
from addnorm.ops.triton import plan
from addnorm.ops.triton.arguments import DTYPES, PLAIN, Add, add_of, like, numbers_of, parameter, rows_of, whole
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


def _write(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: int,
    add: Add,
    weight_offset: float,
    casting: int,
    y: Tensor | None,
    z: Tensor | None,
    stats: Tensor | None,
    z_dtype: torch.dtype,
) -> None:
    """Writes what there is of y, z and the statistics."""
    d = residual.shape[-1]
    rows = residual.numel() // d
    wide = residual.dtype is f64 or z_dtype is f64 or (branch is not None and branch.dtype is f64)
    acc = f64 if z_dtype is f64 else f32
    x_hat = None
    if (casting != 0 and weight is not None) or casting == _LLAMA:
        x_hat = weight.dtype if casting == _T5 else z_dtype  # type: ignore[union-attr]  # T5's is there
        x_hat = None if x_hat.itemsize >= acc.itemsize else DTYPES[x_hat]
    # The add's options, and a dtype that nothing else has, decide which elements a thread takes, and with them the order of the
    # sums: there y alone is to have the bits that it has beside z and the statistics.
    written = wide or any(t is not None for t in add[:5])
    lone = z_dtype not in (
        residual.dtype,
        residual.dtype if branch is None else branch.dtype,
        None if y is None else y.dtype,
    )
    if y is not None and branch is not None and z is None and (written or lone):
        z = residual.new_empty(residual.shape, dtype=z_dtype)
    if y is not None and stats is None and written:
        stats = residual.new_empty((rows, 2), dtype=stats_dtype(z_dtype))
    residual_rows, residual_stride = rows_of(residual, d)
    branch_rows, branch_stride = rows_of(branch, d)
    tile = plan.forward(d)
    launch(
        forward_kernel,
        (-(-rows // tile.rows), 1, 1),
        (residual_rows, branch_rows, whole(weight), whole(bias), y, z, stats, *add[:5]),
        numbers_of(wide, *add[5:8], eps, None if weight_offset == 0.0 else weight_offset),
        (residual_stride, branch_stride),
        (add.threshold, add.offset, rows),
        (
            d, norm, DTYPES[f64 if wide else f32], DTYPES[acc], DTYPES[z_dtype], x_hat, *add.steps, tile.rows, tile.d,
        ),
        tile.warps,
    )  # fmt: skip


def add_norm_forward(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: int,
    residual_factor: float = 1.0,
    residual_scale: Tensor | None = None,
    branch_factor: float = 1.0,
    row_scale: Tensor | None = None,
    layer_scale: Tensor | None = None,
    branch_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
    weight_offset: float = 0.0,
    casting: int = 0,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    outputs: int = 3,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of y, the stream and the statistics the first `outputs`."""
    options = (
        residual_factor, residual_scale, branch_factor, row_scale, layer_scale, branch_bias, dropout_p, seed, offset,
    )  # fmt: skip
    add = add_of(residual, *options) if _judged(residual, branch, weight, bias, eps, weight_offset) else None
    z_dtype = residual.dtype if branch is None else residual_dtype or residual.dtype
    y_dtype = out_dtype or (residual if branch is None else branch).dtype
    if add is None or z_dtype not in DTYPES or y_dtype not in DTYPES:
        return eager.add_norm_forward(
            residual,
            branch,
            weight,
            bias,
            eps,
            norm,
            *options,
            weight_offset,
            casting,
            residual_dtype,
            out_dtype,
            outputs,
        )
    shape, none = residual.shape, norm == _NONE
    y = None if none else residual.new_empty(shape, dtype=y_dtype)
    z = residual.new_empty(shape, dtype=z_dtype) if branch is not None and (outputs > 1 or none) else None
    stats = None if none or outputs < 3 else residual.new_empty((*shape[:-1], 2), dtype=stats_dtype(z_dtype))
    if y is not None or z is not None:
        _write(residual, branch, weight, bias, eps, norm, add, weight_offset, casting, y, z, stats, z_dtype)
    y, z, stats = (nothing(residual) if t is None else t for t in (y, z, stats))
    return y, z, stats


def _judged(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
) -> bool:
    """Whether the kernels compute it."""
    return (
        residual.numel() > 0
        and residual.dim() > 0
        and residual.shape[-1] <= plan.LONGEST_ROW
        and residual.dtype in DTYPES
        and like(branch, residual)
        and parameter(weight, residual)
        and parameter(bias, residual)
        and eps >= 0.0
        and (weight is not None or weight_offset == 0.0)
    )


def _fresh(residual: Tensor, like: Tensor) -> Tensor:
    """Memory for rows: of the shape of `residual` and the dtype of `like`, contiguous."""
    if like.is_contiguous():
        return torch.empty_like(like)
    return like.new_empty(residual.shape)


def add_norm(
    residual: Tensor, branch: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> Tensor:
    """y alone."""
    if not _judged(residual, branch, weight, bias, eps):
        return eager.add_norm(residual, branch, weight, bias, eps, rms)
    y = _fresh(residual, residual if branch is None else branch)
    _write(residual, branch, weight, bias, eps, _RMS if rms else _LAYER, PLAIN, 0.0, 0, y, None, None, residual.dtype)
    return y


def add_norm_stream(
    residual: Tensor, branch: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> tuple[Tensor, Tensor]:
    """y and the stream."""
    if not _judged(residual, branch, weight, bias, eps):
        return eager.add_norm_stream(residual, branch, weight, bias, eps, rms)
    y, z = _fresh(residual, branch), _fresh(residual, residual)
    _write(residual, branch, weight, bias, eps, _RMS if rms else _LAYER, PLAIN, 0.0, 0, y, z, None, residual.dtype)
    return y, z


def add_norm_train(
    residual: Tensor, branch: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the stream and the statistics that the backward wants."""
    if not _judged(residual, branch, weight, bias, eps):
        return eager.add_norm_train(residual, branch, weight, bias, eps, rms)
    y = _fresh(residual, residual if branch is None else branch)
    z = None if branch is None else _fresh(residual, residual)
    stats = residual.new_empty((*residual.shape[:-1], 2), dtype=stats_dtype(residual.dtype))
    _write(residual, branch, weight, bias, eps, _RMS if rms else _LAYER, PLAIN, 0.0, 0, y, z, stats, residual.dtype)
    return y, nothing(residual) if z is None else z, stats


def add_norm_out(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: int,
    y: Tensor | None,
    z: Tensor | None,
    residual_factor: float = 1.0,
    residual_scale: Tensor | None = None,
    branch_factor: float = 1.0,
    row_scale: Tensor | None = None,
    layer_scale: Tensor | None = None,
    branch_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
    weight_offset: float = 0.0,
    casting: int = 0,
) -> None:
    """y and z into memory that is given. What is not simply writable goes to the reference, to be copied or refused."""
    options = (
        residual_factor, residual_scale, branch_factor, row_scale, layer_scale, branch_bias, dropout_p, seed, offset,
    )  # fmt: skip
    add = add_of(residual, *options) if _judged(residual, branch, weight, bias, eps, weight_offset) else None
    others = (weight, bias, residual_scale, row_scale, layer_scale, branch_bias, seed)
    simple = (
        add is not None
        and (y is not None) == (norm != _NONE)
        and not (z is not None and branch is None)
        and (y is not None or z is not None)
        and not (y is not None and z is not None and aliasing.shared(y, z))
        and _writable(y, residual, branch, others)
        and _writable(z, residual, branch, others)
    )
    if add is None or not simple:
        eager.add_norm_out(residual, branch, weight, bias, eps, norm, y, z, *options, weight_offset, casting)
        return
    z_dtype = residual.dtype if z is None else z.dtype
    _write(residual, branch, weight, bias, eps, norm, add, weight_offset, casting, y, z, None, z_dtype)


def _writable(
    target: Tensor | None, residual: Tensor, branch: Tensor | None, others: tuple[Tensor | None, ...]
) -> bool:
    """Whether nothing is overwritten before it is read: every program reads its rows before it writes them.

    Where a target begins decides which elements a thread takes, and with them the order of the sums: the bits are those of fresh
    memory only where that would begin too.
    """
    if target is None:
        return True
    return (
        like(target, residual)
        and target.is_contiguous()
        and aligned(target)
        and all(t is None or not aliasing.shared(target, t) or aliasing.same(target, t) for t in (residual, branch))
        and not any(t is not None and aliasing.shared(target, t) for t in others)
    )
