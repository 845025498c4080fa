"""A call with everything: options put into the schema's form, gradients, function transforms.

Three ways to compute, all with the same result: the operator alone (nothing wants a gradient), the operator inside its
autograd node, and the composite formula of the reference, which torch differentiates, batches and linearizes by itself
(`torch.func`, forward-mode derivatives).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.autograd import forward_ad

from addnorm import reference
from addnorm.ops import autocast, autograd, checks, eager
from addnorm.ops.schema import CASTINGS, NORMS

_ops = torch.ops.addnorm
_add_norm, _add_norm_stream = _ops.add_norm.default, _ops.add_norm_stream.default
# What OpOverload.__call__ calls, without its Python frame: a tenth of what a call on one row costs. Dynamo knows only the
# overload itself.
_add_norm_eager, _add_norm_stream_eager = _add_norm._op, _add_norm_stream._op
_compiling = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled
_transforms_active = torch._C._are_functorch_transforms_active
# Forward-mode levels: a module attribute, since the API has no cheaper question.
_forward_ad: Any = forward_ad


def plain(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    return_residual: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """A call without options: y, or `(y, z)`. This is the path that is counted in tenths of a microsecond."""
    try:
        if _forward_ad._current_level >= 0 or _transforms_active():
            y, z = run(residual, branch, weight, bias, eps, "rms" if rms else "layer")
            return (y, z) if return_residual else y
        if _grad_enabled() and (
            residual.requires_grad
            or (branch is not None and branch.requires_grad)
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        ):
            apply = autograd.PlainFunction.apply if _compiling() else autograd.plain_apply
            both = apply(residual, branch, weight, bias, eps, rms)
            return both if return_residual else both[0]  # type: ignore[no-any-return]  # torch does not type apply
        if _compiling():
            return (_add_norm_stream if return_residual else _add_norm)(residual, branch, weight, bias, eps, rms)  # type: ignore[no-any-return]  # torch.ops is not typed
        if return_residual:
            return _add_norm_stream_eager(residual, branch, weight, bias, eps, rms)  # type: ignore[no-any-return]
        return _add_norm_eager(residual, branch, weight, bias, eps, rms)  # type: ignore[no-any-return]
    except (RuntimeError, AttributeError, TypeError):
        checks.check(residual, branch, weight, bias, eps)  # the sentence, if the arguments are to blame
        raise


def default_rms_eps(residual: Tensor, branch: Tensor | None, stream_dtype: torch.dtype | None = None) -> float:
    """The machine epsilon of the arithmetic: what eps=None means to `torch.nn.functional.rms_norm`."""
    if isinstance(residual, Tensor) and (branch is None or isinstance(branch, Tensor)):
        return torch.finfo(reference.compute_dtype(dtype=stream_dtype or residual.dtype)).eps
    return 0.0  # the call is about to be refused


def run(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: str,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    residual_scale: Tensor | float | None = None,
    row_scale: Tensor | None = None,
    layer_scale: Tensor | float | None = None,
    branch_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
    weight_offset: float = 0.0,
    casting: reference.Casting = "float32",
    stream_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    compute: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """`(y, z)`; y has no elements where `norm` is "none", z none where `branch` is None. `compute` may replace `_compute`."""
    if casting not in CASTINGS:
        raise ValueError(f"casting is {casting!r}, expected one of {', '.join(map(repr, CASTINGS))}.")
    shape = residual.shape if isinstance(residual, Tensor) else None
    if normalized_shape is not None:
        dims = (int(normalized_shape),) if isinstance(normalized_shape, SupportsIndex) else tuple(normalized_shape)
        checks.check_normalized_shape(dims, residual, "x" if branch is None else "residual")
        parameters = {"weight": weight, "bias": bias, "branch_bias": branch_bias}
        scales = {"residual_scale": residual_scale, "layer_scale": layer_scale}
        scales = {name: t for name, t in scales.items() if isinstance(t, Tensor) and t.dim() > 0}
        checks.check_ends_in(dims, branch=branch, **parameters, **scales)
        keep = residual.dim() - len(dims)
        residual = residual.flatten(keep)
        branch = None if branch is None else branch.flatten(keep)
        weight, bias, branch_bias = (t if t is None else t.flatten() for t in (weight, bias, branch_bias))
        residual_scale, layer_scale = (
            t.flatten() if isinstance(t, Tensor) and t.dim() else t for t in (residual_scale, layer_scale)
        )
    options: dict[str, Any] = {}
    for name, scale in (("residual", residual_scale), ("layer", layer_scale)):
        factor = "residual_factor" if name == "residual" else "branch_factor"
        if isinstance(scale, Tensor):
            options[f"{name}_scale"] = scale
        elif scale is not None:
            options[factor] = scale
    options |= {name: t for name, t in (("row_scale", row_scale), ("branch_bias", branch_bias)) if t is not None}
    if dropout_p or options or weight_offset or stream_dtype or out_dtype or _transforms_active():
        # Not left to the kernels to notice: an option's shape is seen only by the formula that uses it.
        checks.check(
            residual, branch, weight, bias, eps, residual_scale=residual_scale, row_scale=row_scale,
            layer_scale=layer_scale, branch_bias=branch_bias, dropout_p=dropout_p, seed=seed, offset=offset,
            weight_offset=weight_offset, stream_dtype=stream_dtype, out_dtype=out_dtype,
        )  # fmt: skip
    if row_scale is not None and row_scale.shape != residual.shape[:-1]:
        # Widened first, so that the gradients that the expansion sums are not rounded before.
        options["row_scale"] = row_scale.to(reference.compute_dtype(row_scale)).expand(residual.shape[:-1])
    if dropout_p:
        if seed is None:
            seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=residual.device)
        options |= {"dropout_p": float(dropout_p), "seed": seed, "offset": offset}
    options |= {"weight_offset": float(weight_offset), "casting": CASTINGS[casting]}
    options |= {"stream_dtype": stream_dtype, "out_dtype": out_dtype}
    try:
        y, z = (compute or _compute)(residual, branch, weight, bias, eps, NORMS[norm], options)
    except (RuntimeError, AttributeError, TypeError):
        checks.check(residual, branch, weight, bias, eps)
        raise
    if normalized_shape is not None and shape is not None:
        y, z = (t if t.shape != residual.shape else t.reshape(shape) for t in (y, z))
    return y, z


def _compute(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: int,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    if _transforms_active() or _forward_ad._current_level >= 0:
        return _composite(residual, branch, weight, bias, eps, norm, options)
    inputs = (residual, branch, weight, bias, *(options.get(name) for name in autograd.INPUTS[4:]))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        return autograd.apply(residual, branch, weight, bias, eps, norm, **options)
    y, z, _ = torch.ops.addnorm.add_norm_forward.default(residual, branch, weight, bias, eps, norm, **options)
    return y, z


def _composite(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: int,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """The formula itself, in operators that torch knows how to transform."""
    z = residual
    if branch is not None:
        z = reference.add(residual, branch, dtype=options["stream_dtype"], **eager.add_options(residual, options))
    if norm == NORMS["none"]:
        return z, z
    out_dtype = options["out_dtype"] or (residual if branch is None else branch).dtype
    if options["out_dtype"] is None and torch.is_autocast_enabled(z.device.type):
        out_dtype = autocast.y_dtype(z.device.type, z.dtype)
    y = reference.normalize(
        z, weight, bias, norm=eager.norm_kind(norm), eps=eps, weight_offset=options["weight_offset"],
        casting=eager.CASTING_NAMES[options["casting"]], dtype=out_dtype,
    )  # fmt: skip
    return y, z
