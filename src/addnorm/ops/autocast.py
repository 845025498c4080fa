"""Under autocast y has the dtype that `F.layer_norm` and `F.rms_norm` of the stream would have on that device.

On CPU they are left alone: y has the stream's dtype. On CUDA they are on the list of what runs in float32. Registered at the
dispatcher's autocast keys, so that a call outside autocast does not even ask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from addnorm.ops.schema import NORMS, by_name, library


def y_dtype(device_type: str, z_dtype: torch.dtype) -> torch.dtype:
    """The dtype of y under autocast on a device."""
    if device_type == "cuda" and z_dtype != torch.float64:
        return torch.float32
    return z_dtype


def _register(device_type: str, key: str) -> None:
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    @by_name("add_norm_forward")
    def forward(residual: Tensor, **arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        if arguments.get("out_dtype") is None:
            z_dtype = arguments.get("residual_dtype") or residual.dtype
            arguments["out_dtype"] = y_dtype(device_type, z_dtype)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return torch.ops.addnorm.add_norm_forward.default(residual, **arguments)  # type: ignore[no-any-return]  # torch.ops is not typed

    def train(residual: Tensor, branch: Tensor | None, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        *inputs, rms = args
        return forward(residual, branch, *inputs, NORMS["rms" if rms else "layer"])

    def y_and_z(residual: Tensor, branch: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        return train(residual, branch, *args)[:2]

    def y_alone(residual: Tensor, branch: Tensor | None, *args: Any) -> Tensor:
        return train(residual, branch, *args)[0]

    library.impl("add_norm_forward", forward, key)
    library.impl("add_norm_train", train, key)
    library.impl("add_norm_stream", y_and_z, key)
    library.impl("add_norm", y_alone, key)


_register("cpu", "AutocastCPU")
_register("cuda", "AutocastCUDA")
