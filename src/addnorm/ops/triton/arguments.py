"""What the kernels of both directions take: which tensors fit, rows and their strides, the options of the add."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from addnorm.ops.triton.launch import ALIGNED, aligned

DTYPES = {
    torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64,
}  # fmt: skip


def like(t: Tensor | None, residual: Tensor) -> bool:
    """Whether it may be the rows of a call."""
    return t is None or (t.shape == residual.shape and t.device == residual.device and t.dtype in DTYPES)


def parameter(t: Tensor | None, residual: Tensor, scalar: bool = False) -> bool:
    """Whether it may be a parameter: one element for each feature, or where it may be one also a single one."""
    if t is None:
        return True
    fits = (t.dim() == 1 and t.shape[0] == residual.shape[-1]) or (scalar and t.dim() == 0)
    return fits and t.device == residual.device and t.dtype in DTYPES


def whole(t: Tensor | None) -> Tensor | None:
    """A parameter as it would be in memory of its own: a copy where it is not contiguous, or begins between 16 bytes."""
    if t is None or t.dim() == 0 or (t.is_contiguous() and aligned(t)):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def rows_of(t: Tensor | None, d: int) -> tuple[Tensor | None, int | None]:
    """A tensor as rows of d, and their stride, None where it is d.

    What the compiler knows of where rows begin decides how many elements a thread takes at once, and with it the order of the
    sums. Rows are read where they are if it knows the same of them as of rows in memory of their own; others are copied.
    """
    if t is None:
        return None, None
    rows = t if t.is_contiguous() else t.reshape(-1, d)
    if rows.is_contiguous():
        return (rows if aligned(rows) else rows.clone()), None
    stride, between = rows.stride()
    if between == 1 and stride % ALIGNED == 0 and d * t.itemsize % ALIGNED == 0 and aligned(rows):
        return rows, stride
    return rows.clone(memory_format=torch.contiguous_format), None


class Add(NamedTuple):
    """The options of the add, as the kernels take them; what is at rest is None."""

    residual_scale: Tensor | None = None
    row_scale: Tensor | None = None
    layer_scale: Tensor | None = None
    branch_bias: Tensor | None = None
    seed: Tensor | None = None
    residual_factor: float | None = None
    branch_factor: float | None = None
    keep_scale: float | None = None
    threshold: int = 0
    offset: int = 0

    @property
    def steps(self) -> tuple[int, int]:
        """0 where a scale has one element, 1 where it has one for each feature."""
        scales = self.residual_scale, self.layer_scale
        return tuple(0 if t is not None and t.dim() == 0 else 1 for t in scales)  # type: ignore[return-value]  # of two


PLAIN = Add()


def add_of(
    rows: Tensor,
    residual_factor: float,
    residual_scale: Tensor | None,
    branch_factor: float,
    row_scale: Tensor | None,
    layer_scale: Tensor | None,
    branch_bias: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    offset: int,
) -> Add | None:
    """The schema's options for the kernels; None if they do not fit `rows`."""
    fits = (
        parameter(residual_scale, rows, scalar=True)
        and parameter(layer_scale, rows, scalar=True)
        and parameter(branch_bias, rows)
        and (
            row_scale is None
            or (row_scale.shape == rows.shape[:-1] and row_scale.device == rows.device and row_scale.dtype in DTYPES)
        )
        and 0.0 <= dropout_p <= 1.0
        and 0 <= offset < 2**62
    )
    if not fits:
        return None
    keep_scale = None
    if dropout_p > 0.0:
        if seed is None or seed.dim() != 0 or seed.dtype != torch.int64 or seed.device != rows.device:
            return None
        keep_scale = 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0
    return Add(
        whole(residual_scale),
        whole(row_scale),
        whole(layer_scale),
        whole(branch_bias),
        None if keep_scale is None else seed,
        None if residual_scale is not None or residual_factor == 1.0 else residual_factor,
        None if layer_scale is not None or branch_factor == 1.0 else branch_factor,
        keep_scale,
        int(dropout_p * 2**32),
        offset,
    )


def numbers_of(wide: bool, *numbers: float | None) -> tuple[Any, ...]:
    """Floats as a kernel takes them: its arguments are float32, so that float64 has them as constants."""
    return tuple(None if n is None else tl.constexpr(n) for n in numbers) if wide else numbers
