"""Autocast: y has the dtype that `F.layer_norm` and `F.rms_norm` of z would have on that device.

CPU autocast does not change these functions, so y has z's dtype. CUDA autocast runs them in float32. The kernels are registered
at the dispatcher's autocast keys, so they cost nothing outside autocast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from addnorm.ops.options import norm_number
from addnorm.ops.schema import by_name, library


def y_dtype(device_type: str, z_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of y under autocast on a device."""
    if device_type == "cuda" and z_dtype != torch.float64:
        return torch.float32
    return z_dtype


def _register(device_type: str, key: str, overload: str) -> None:
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    op = getattr(torch.ops.addnorm.add_norm_forward, overload)

    @by_name("add_norm_forward")
    def forward(residual: Tensor, **arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        if arguments.get("out_dtype") is None:
            z_dtype = arguments.get("residual_dtype") or residual.dtype
            arguments["out_dtype"] = y_dtype(device_type, z_dtype)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return op(residual, **arguments)  # type: ignore[no-any-return]  # torch.ops is not typed

    def train(residual: Tensor, branch: Tensor | None, *args: Any, outputs: int = 3) -> tuple[Tensor, Tensor, Tensor]:
        *inputs, rms = args
        return forward(residual, branch, *inputs, norm_number(rms), outputs=outputs)

    def stream(residual: Tensor, branch: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        return train(residual, branch, *args, outputs=2)[:2]

    def y_only(residual: Tensor, branch: Tensor | None, *args: Any) -> Tensor:
        return train(residual, branch, *args, outputs=1)[0]

    kernels = {"add_norm_forward": forward, "add_norm_train": train, "add_norm_stream": stream, "add_norm": y_only}
    for name, kernel in kernels.items():
        library.impl(name if overload == "default" else f"{name}.{overload}", kernel, key)


for _overload in ("default", "kernel"):
    _register("cpu", "AutocastCPU", _overload)
    _register("cuda", "AutocastCUDA", _overload)
