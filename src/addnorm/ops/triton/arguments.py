"""Arguments of the kernels: checks of the tensors, rows and their strides, the options of the add."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from addnorm._util.arguments import FLOAT_DTYPES
from addnorm.ops.triton.launch import ALIGNED, aligned
from addnorm.ops.triton.norms import COMPUTED

DTYPES = {dtype: getattr(tl, str(dtype).removeprefix("torch.")) for dtype in FLOAT_DTYPES}


def matches_rows(t: Tensor | None, residual: Tensor) -> bool:
    """Return whether `t` is None or has residual's shape and device and a supported dtype."""
    return t is None or (t.shape == residual.shape and t.device == residual.device and t.dtype in DTYPES)


def is_parameter(t: Tensor | None, residual: Tensor, scalar: bool = False) -> bool:
    """Return whether `t` is None or has one element per feature, or with `scalar` is a 0-d tensor."""
    if t is None:
        return True
    fits = (t.dim() == 1 and t.shape[0] == residual.shape[-1]) or (scalar and t.dim() == 0)
    return fits and t.device == residual.device and t.dtype in DTYPES


def to_contiguous(t: Tensor | None) -> Tensor | None:
    """Return a parameter if it is contiguous and aligned to 16 bytes, else such a copy.

    None and 0-d tensors are returned unchanged.
    """
    if t is None or t.dim() == 0 or (t.is_contiguous() and aligned(t)):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def to_rows(t: Tensor | None, d: int) -> tuple[Tensor | None, int | None]:
    """Return a tensor as rows of d elements, and the stride of the rows, which is None if it equals d.

    The compiler's assumption about the alignment of the rows decides how many elements a thread takes at once, and so the order
    of the sums. Rows are read in place if this assumption is the same as for contiguous rows, else copied.
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


class KernelOptions(NamedTuple):
    """The options of the add as the kernels take them; an option with its default is None."""

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
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The options that are tensors."""
        return self[:5]

    @property
    def numbers(self) -> tuple[float | None, ...]:
        """The options that are floats."""
        return self[5:8]

    @property
    def steps(self) -> tuple[int, int]:
        """For residual_scale and layer_scale: 0 for a scale with one element, 1 for one element per feature."""
        scales = self.residual_scale, self.layer_scale
        return tuple(0 if t is not None and t.dim() == 0 else 1 for t in scales)  # type: ignore[return-value]  # two


NO_OPTIONS = KernelOptions()


def kernel_options(rows: Tensor, a: Any) -> KernelOptions | None:
    """Return the options among the arguments of an operator as the kernels take them; None if they do not fit `rows`."""
    fits = (
        a.norm in COMPUTED
        and is_parameter(a.residual_scale, rows, scalar=True)
        and is_parameter(a.layer_scale, rows, scalar=True)
        and is_parameter(a.branch_bias, rows)
        and (
            a.row_scale is None
            or (a.row_scale.shape == rows.shape[:-1] and a.row_scale.device == rows.device and a.row_scale.dtype in DTYPES)
        )
        and 0.0 <= a.dropout_p <= 1.0
        and 0 <= a.offset < 2**62
    )  # fmt: skip
    if not fits:
        return None
    keep_scale = None
    if a.dropout_p > 0.0:
        if a.seed is None or a.seed.dim() != 0 or a.seed.dtype != torch.int64 or a.seed.device != rows.device:
            return None
        keep_scale = 1.0 / (1.0 - a.dropout_p) if a.dropout_p < 1.0 else 0.0
    return KernelOptions(
        to_contiguous(a.residual_scale),
        to_contiguous(a.row_scale),
        to_contiguous(a.layer_scale),
        to_contiguous(a.branch_bias),
        None if keep_scale is None else a.seed,
        None if a.residual_scale is not None or a.residual_factor == 1.0 else a.residual_factor,
        None if a.layer_scale is not None or a.branch_factor == 1.0 else a.branch_factor,
        keep_scale,
        int(a.dropout_p * 2**32),
        a.offset,
    )


def kernel_numbers(use_float64: bool, *numbers: float | None) -> tuple[Any, ...]:
    """Return floats as a kernel takes them: constants for float64, since a kernel's float arguments are float32."""
    return tuple(None if n is None else tl.constexpr(n) for n in numbers) if use_float64 else numbers
