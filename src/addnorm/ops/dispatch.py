"""A call with everything: options put into the schema's form, gradients, function transforms.

Three ways to compute, all with the same result: the operator alone (nothing wants a gradient), the operator inside its
autograd node, and the composite formula of the reference, which torch differentiates, batches and linearizes by itself
(`torch.func`, forward-mode derivatives).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from addnorm import reference
from addnorm.ops import autocast, autograd, compile_mode, eager, validation
from addnorm.ops.schema import ADD_NAMES, CASTINGS, CHECKED, NORMS

_ops = torch.ops.addnorm
# What OpOverload.__call__ calls, without its Python frame: a tenth of what a call on one row costs. Dynamo knows only the
# overload itself; what it traces is chosen in compiled.py.
_add_norm_eager, _add_norm_stream_eager = _ops.add_norm.default._op, _ops.add_norm_stream.default._op
_forward_eager = _ops.add_norm_forward.default._op
_randint = torch.randint
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
        if eps.__class__ is not float and not validation.is_number(eps):
            raise TypeError  # True, or a tensor whose gradient would be lost
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
            kernel = compile_mode.kernel("add_norm_stream" if return_residual else "add_norm", residual)
            return kernel(residual, branch, weight, bias, eps, rms)  # type: ignore[no-any-return]  # torch.ops is not typed
        if return_residual:
            return _add_norm_stream_eager(residual, branch, weight, bias, eps, rms)  # type: ignore[no-any-return]
        return _add_norm_eager(residual, branch, weight, bias, eps, rms)  # type: ignore[no-any-return]
    except (RuntimeError, AttributeError, TypeError):
        validation.check(residual, branch, weight, bias, eps)  # the sentence, if the arguments are to blame
        raise


def default_rms_eps(residual: Tensor, branch: Tensor | None, residual_dtype: torch.dtype | None = None) -> float:
    """The machine epsilon of the arithmetic: what eps=None means to `torch.nn.functional.rms_norm`."""
    if isinstance(residual, Tensor) and (branch is None or isinstance(branch, Tensor)):
        return torch.finfo(reference.compute_dtype(dtype=residual_dtype or residual.dtype)).eps
    return 0.0  # the call is about to be refused


class Arguments(NamedTuple):
    """Everything that `add_norm_forward` takes, in its order."""

    residual: Tensor
    branch: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    norm: int
    residual_factor: float
    residual_scale: Tensor | None
    branch_factor: float
    row_scale: Tensor | None
    layer_scale: Tensor | None
    branch_bias: Tensor | None
    dropout_p: float
    seed: Tensor | None
    offset: int
    weight_offset: float
    casting: int
    residual_dtype: torch.dtype | None
    out_dtype: torch.dtype | None


def run(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: str,
    return_residual: bool = True,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    residual_scale: Tensor | float | None = None,
    row_scale: Tensor | None = None,
    layer_scale: Tensor | float | None = None,
    branch_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: Tensor | None = None,
    offset: int = 0,
    weight_offset: float = 0.0,
    casting: reference.Casting = "float32",
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    compute: Callable[[Arguments, bool], tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """`(y, z)`; y has no elements where `norm` is "none", z none where there is no branch or it is not asked for.

    `compute` may stand in for `_compute`.
    """
    if casting not in tuple(CASTINGS):  # a tuple asks no hash of what may be anything
        raise ValueError(f"casting is {casting!r}, expected one of {', '.join(map(repr, CASTINGS))}.")
    shape = None
    if normalized_shape is not None:
        shape = residual.shape if isinstance(residual, Tensor) else None
        residual, branch, weight, bias, branch_bias, residual_scale, layer_scale = _flattened(
            normalized_shape, residual, branch, weight, bias, branch_bias, residual_scale, layer_scale
        )
    try:
        if not (validation.is_number(eps) and validation.is_number(weight_offset) and validation.is_number(dropout_p)):
            raise TypeError  # the sentence is on its way
        if not 0.0 <= dropout_p <= 1.0:
            raise TypeError
        p = dropout_p if training else 0.0
        mask_seed = seed if p != 0.0 else None
        if p != 0.0 and seed is None:
            mask_seed = _randint(-(2**63), 2**63 - 1, (), device=residual.device)
        rows = row_scale
        if rows is not None and rows.shape != residual.shape[:-1]:
            if rows.dtype not in validation.FLOATS:
                raise TypeError
            # Widened first, so that the gradients that the expansion sums are not rounded before.
            wide = reference.compute_dtype(rows, residual, branch, dtype=residual_dtype)
            rows = rows.to(wide).expand(residual.shape[:-1])
        residual_factor, residual_tensor = (1.0, None) if residual_scale is None else _split(residual_scale)
        branch_factor, layer_tensor = (1.0, None) if layer_scale is None else _split(layer_scale)
        arguments = Arguments(
            residual, branch, weight, bias, eps, NORMS[norm], residual_factor, residual_tensor, branch_factor, rows,
            layer_tensor, branch_bias, p, mask_seed, offset, weight_offset, CASTINGS[casting], residual_dtype, out_dtype,
        )  # fmt: skip
        y, z = (compute or _compute)(arguments, return_residual)
    except (RuntimeError, AttributeError, TypeError, OverflowError):
        validation.check(
            residual, branch, weight, bias, eps, residual_scale=residual_scale, row_scale=row_scale,
            layer_scale=layer_scale, branch_bias=branch_bias, dropout_p=dropout_p, seed=seed, offset=offset,
            weight_offset=weight_offset, residual_dtype=residual_dtype, out_dtype=out_dtype,
        )  # fmt: skip
        raise
    if shape is not None:
        y, z = (t if t.shape != residual.shape else t.reshape(shape) for t in (y, z))
    return y, z


def _split(scale: Tensor | float) -> tuple[float, Tensor | None]:
    """A factor and a tensor, one of them at rest: what the schema has for a scale."""
    if isinstance(scale, Tensor):
        return 1.0, scale
    if not validation.is_number(scale):
        raise TypeError
    return scale, None


def _flattened(
    normalized_shape: int | Sequence[int],
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    branch_bias: Tensor | None,
    residual_scale: Tensor | float | None,
    layer_scale: Tensor | float | None,
) -> tuple[Any, ...]:
    """The same tensors with the dimensions of `normalized_shape` made one."""
    dims = validation.dimensions(normalized_shape)
    validation.check_normalized_shape(dims, residual, "x" if branch is None else "residual")
    parameters = {"weight": weight, "bias": bias, "branch_bias": branch_bias}
    scales = {"residual_scale": residual_scale, "layer_scale": layer_scale}
    shaped = {name: t for name, t in scales.items() if isinstance(t, Tensor) and t.dim() > 0}
    validation.check_ends_in(dims, branch=branch, **parameters, **shaped)
    keep = residual.dim() - len(dims)
    scales |= {name: t.flatten() for name, t in shaped.items()}
    return (
        residual.flatten(keep),
        None if branch is None else branch.flatten(keep),
        *(t if t is None else t.flatten() for t in parameters.values()),
        *scales.values(),
    )


def _compute(arguments: Arguments, return_residual: bool) -> tuple[Tensor, Tensor]:
    if _transforms_active() or _forward_ad._current_level >= 0:
        return _composite(arguments)
    if _grad_enabled():
        for place in autograd.PLACES:
            t: Any = arguments[place]
            if t is not None and t.requires_grad:
                apply = autograd.AddNormFunction.apply if _compiling() else autograd.full_apply
                return apply(*arguments)  # type: ignore[no-any-return]  # torch does not type apply
    forward = compile_mode.kernel("add_norm_forward", arguments.residual) if _compiling() else _forward_eager
    y, z, _ = forward(*arguments, 2 if return_residual else 1)
    return y, z


def _composite(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """The formula itself, in operators that torch knows how to transform."""
    a = arguments
    validation.check(a.residual, a.branch, a.weight, a.bias, a.eps, **{name: getattr(a, name) for name in CHECKED})
    z = a.residual
    if a.branch is not None:
        options = {name: getattr(a, name) for name in ADD_NAMES}
        z = reference.add(a.residual, a.branch, dtype=a.residual_dtype, **eager.add_options(a.residual, options))
    if a.norm == NORMS["none"]:
        return z, z
    out_dtype = a.out_dtype or (a.residual if a.branch is None else a.branch).dtype
    if a.out_dtype is None and torch.is_autocast_enabled(z.device.type):
        out_dtype = autocast.y_dtype(z.device.type, z.dtype)
    y = reference.normalize(
        z, a.weight, a.bias, norm=eager.norm_kind(a.norm), eps=a.eps, weight_offset=a.weight_offset,
        casting=eager.CASTING_NAMES[a.casting], dtype=out_dtype,
    )  # fmt: skip
    return y, z
