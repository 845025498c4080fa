"""Autocast: y has the dtype that `F.layer_norm` and `F.rms_norm` of z would have on that device.

CPU autocast does not change these functions, so y has z's dtype. CUDA autocast runs them in float32. The kernels are registered
at the dispatcher's autocast keys, so they cost nothing outside autocast.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from addnorm._util.torch_internals import without_autocast
from addnorm.ops.schema import kernels_of, library, overload_of


def y_dtype(device_type: str, z_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of y under autocast on a device."""
    if device_type == "cuda" and z_dtype != torch.float64:
        return torch.float32
    return z_dtype


def _register(device_type: str, key: str, overload: str) -> None:
    op = overload_of(f"add_norm_forward{overload}")

    def forward(a: Any) -> tuple[Tensor, Tensor, Tensor]:
        if a.out_dtype is None:
            a = a._replace(out_dtype=y_dtype(device_type, a.residual_dtype or a.residual.dtype))
        with without_autocast(key):
            return op(*a)  # type: ignore[no-any-return]  # torch.ops is not typed

    for name, kernel in kernels_of("add_norm_forward", forward, (overload,)):
        library.impl(name, kernel, key)


for _overload in ("", ".kernel"):
    _register("cpu", "AutocastCPU", _overload)
    _register("cuda", "AutocastCUDA", _overload)


def disable_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context without autocast, in which operators compute in the dtypes of their operands."""
    device = x.device.type
    is_off = device == "meta" or not torch.is_autocast_enabled(device)  # torch has no autocast on meta
    return nullcontext() if is_off else torch.autocast(device, enabled=False)
