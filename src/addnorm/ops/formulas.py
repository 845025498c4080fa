"""The operation in torch's own operators: for function transforms, and for torch.compile.

`formula` is for function transforms and forward-mode derivatives, which differentiate, batch and linearize it. `fusible_formula`
is for torch.compile, which fuses it with the operators around it (`compile_mode.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from addnorm import reference
from addnorm._util.norms import BY_CODE
from addnorm.ops import autocast, eager, validation
from addnorm.ops.options import NORMS
from addnorm.ops.schema import ForwardArguments

_DEFAULTS = ForwardArguments._field_defaults


def formula(a: Any) -> tuple[Tensor, Tensor]:
    """Return `(y, z)`, computed by the functions of `reference.py`."""
    validation.check(**a._asdict())
    z = a.residual
    if a.branch is not None:
        z = reference.add(a.residual, a.branch, dtype=a.residual_dtype, **eager.add_options(a.residual, a))
    if a.norm == NORMS["none"]:
        return z, z
    return reference.normalize(z, a.weight, a.bias, **_norm_options(a, z.dtype)), z


def fusible_formula(a: Any) -> tuple[Tensor, Tensor]:
    """Return `(y, z)` for torch.compile, by torch's operators and torch's norm, which Inductor compiles to one loop.

    Without options these are the operators of the same call in plain PyTorch. With options the norm reads the rounded z, but the
    norm's gradient is added to the gradient of z before either is rounded, as in the operator.
    """
    validation.check(**a._asdict())
    if _is_plain(a):
        z = a.residual if a.branch is None else (a.residual + a.branch).contiguous()  # as the operator's outputs
        return reference.torch_norm(BY_CODE[a.norm], z, a.weight, a.bias, a.eps).contiguous(), z
    exact = z = a.residual
    if a.branch is not None:
        dtype = a.residual_dtype or a.residual.dtype
        acc = reference.compute_dtype(a.residual, a.branch, dtype=dtype)
        exact = reference.add(a.residual, a.branch, dtype=acc, **eager.add_options(a.residual, a))
        z = exact.to(dtype).contiguous()  # as the operator's outputs
    if a.norm == NORMS["none"]:
        return z, z
    rounded = exact
    if z.dtype != exact.dtype:
        wide = z.to(exact.dtype)
        rounded = exact + torch.where(wide == exact, 0.0, wide - exact).detach()  # inf - inf would be NaN
    with reference.sums_in_one_loop():
        y = _normalize(rounded, a.weight, a.bias, **_norm_options(a, z.dtype))
    return y.contiguous(), z


def _is_plain(a: Any) -> bool:
    """Return whether a call has no options and all its tensors have one dtype."""
    if a.norm == NORMS["none"] or a.residual.shape[-1] == 0:
        return False
    if any(t is not None and t.dtype != a.residual.dtype for t in (a.branch, a.weight, a.bias)):
        return False
    options = ((getattr(a, name), default) for name, default in _DEFAULTS.items() if name != "outputs")
    return all(not isinstance(value, Tensor) and value == default for value, default in options)


def _norm_options(a: Any, z_dtype: torch.dtype) -> dict[str, Any]:
    """Return the options of `reference.normalize`; under autocast y has the dtype that the dispatcher would choose."""
    device = a.residual.device.type
    if a.out_dtype is None and torch.is_autocast_enabled(device):
        a = a._replace(out_dtype=autocast.y_dtype(device, z_dtype))
    return eager.norm_options(a)


def _normalize(z: Tensor, weight: Tensor | None, bias: Tensor | None, **options: Any) -> Tensor:
    """Normalize as `reference.normalize` does, by torch's own norm, which Inductor compiles to one loop.

    Upcast first: on CPU torch's LayerNorm keeps the statistics of a low-precision input in low precision.
    """
    if options["casting"] != "float32" or z.shape[-1] == 0:
        return reference.normalize(z, weight, bias, **options)
    acc, offset = reference.compute_dtype(z), options["weight_offset"]
    scale = None if weight is None else weight.to(acc) + offset if offset else weight.to(acc)
    shift = None if bias is None else bias.to(acc)
    return reference.torch_norm(options["norm"], z.to(acc), scale, shift, options["eps"]).to(options["dtype"])
