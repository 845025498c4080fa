"""Calls of the operators: conversion of options to schema arguments, gradients, function transforms.

There are three ways to compute, with the same result: the operator alone (no input requires a gradient), the operator inside
its autograd node, and the formula of `reference.py`, which torch differentiates, batches and linearizes itself (`torch.func`,
forward-mode derivatives).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from addnorm import reference
from addnorm._util.arguments import FLOAT_DTYPES, check_choice, is_number
from addnorm.ops import autograd, capture, dtensor, validation
from addnorm.ops.options import ADD_OPTIONS, CASTINGS, NORMS, SCALES
from addnorm.ops.schema import ForwardArguments

_ops = torch.ops.addnorm
# The function that OpOverload.__call__ calls. Without that Python frame, a call on one row is a tenth faster. Dynamo traces only
# the overload itself.
_add_norm_eager, _add_norm_stream_eager = _ops.add_norm.kernel._op, _ops.add_norm_stream.kernel._op
_forward_eager = _ops.add_norm_forward.kernel._op
_compiling = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled
_transforms_active = torch._C._are_functorch_transforms_active
_dispatch_modes, _jit_trace = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
# The level of forward-mode derivatives is a module attribute: the public API is slower.
_forward_ad: Any = forward_ad
# Errors of calls with invalid arguments; torch asserts that FakeTensors meet no others.
ERRORS = (RuntimeError, AttributeError, TypeError, OverflowError, AssertionError)
_SCALES = tuple((option.name, option.factor) for option in SCALES)
# Options that may have one element per feature.
_FEATURE_OPTIONS = tuple((option.name, option.kind) for option in ADD_OPTIONS if option.kind in ("scale", "features"))


def fast_path(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    return_residual: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return y, or `(y, z)`, of a call without options. Each tenth of a microsecond counts here."""
    try:
        if eps.__class__ is not float and not is_number(eps):
            raise TypeError  # a bool, or a tensor whose gradient would be lost
        if _forward_ad._current_level >= 0 or _transforms_active():
            y, z = run(residual, branch, weight, bias, eps, "rms" if rms else "layer")
            return (y, z) if return_residual else y
        requires_grad = _grad_enabled() and (
            residual.requires_grad
            or (branch is not None and branch.requires_grad)
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        )
        # Without gradients a plain tensor needs no question: in a trace of `torch.jit` the kernel calls the default overload.
        if _compiling() or (
            (requires_grad or residual.__class__ is not Tensor) and (_dispatch_modes() or _jit_trace() is not None)
        ):
            arguments = residual, branch, weight, bias, eps, rms
            return capture.fast_path(arguments, requires_grad, return_residual)  # type: ignore[no-any-return]  # as above
        if requires_grad:
            outputs = autograd.fast_apply(residual, branch, weight, bias, eps, rms)
            return outputs if return_residual else outputs[0]  # type: ignore[no-any-return]  # torch does not type apply
        if return_residual:
            return _add_norm_stream_eager(residual, branch, weight, bias, eps, rms)  # type: ignore[no-any-return]
        return _add_norm_eager(residual, branch, weight, bias, eps, rms)  # type: ignore[no-any-return]
    except ERRORS:
        validation.check(residual, branch, weight, bias, eps)  # raises if the arguments are invalid
        if dtensor.register_rules():  # the first call with DTensors
            return fast_path(residual, branch, weight, bias, eps, rms, return_residual)
        raise


def default_rms_eps(residual: Tensor, branch: Tensor | None, residual_dtype: torch.dtype | None = None) -> float:
    """Return the machine epsilon of the arithmetic, which eps=None means to `torch.nn.functional.rms_norm`."""
    if isinstance(residual, Tensor) and (branch is None or isinstance(branch, Tensor)):
        return torch.finfo(reference.compute_dtype(dtype=residual_dtype or residual.dtype)).eps
    return 0.0  # the argument check that follows raises


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
    row_scale: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: Tensor | None = None,
    weight_offset: float = 0.0,
    casting: reference.Casting = "float32",
    compute: Callable[[Any, bool], tuple[Tensor, Tensor]] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return `(y, z)` of a call with options.

    The options with arguments of their own need a conversion; all others, `**options`, are passed to the operator by name.

    y is an empty placeholder where `norm` is "none", z where there is no branch or z is not requested.
    `compute` replaces `_compute`.
    """
    check_choice("casting", casting, CASTINGS)
    shape = None
    if normalized_shape is not None:
        shape = residual.shape if isinstance(residual, Tensor) else None
        residual, branch, weight, bias, options = _flatten(normalized_shape, residual, branch, weight, bias, options)
    try:
        if not (is_number(eps) and is_number(weight_offset) and is_number(dropout_p)):
            raise TypeError  # the argument check below names the argument
        if not 0.0 <= dropout_p <= 1.0:
            raise TypeError
        p = dropout_p if training else 0.0
        mask_seed = seed if p != 0.0 else None
        if p != 0.0 and seed is None:
            mask_seed = dtensor.draw_seed(residual)
        rows = row_scale if row_scale is None else dtensor.share(row_scale, residual)
        if rows is not None and rows.shape != residual.shape[:-1]:
            if rows.dtype not in FLOAT_DTYPES:
                raise TypeError
            # Upcast first, so that the gradients that the expansion accumulates are not rounded before.
            upcast = reference.compute_dtype(rows, residual, branch, dtype=options.get("residual_dtype"))
            rows = rows.to(upcast).expand(residual.shape[:-1])
        for name, factor in _SCALES:  # a number is another argument of the schema than a tensor
            scale = options.get(name)
            if scale is not None and not isinstance(scale, Tensor):
                if not is_number(scale):
                    raise TypeError
                options[name], options[factor] = None, scale
        arguments = ForwardArguments(
            residual, branch, weight, bias, eps, NORMS[norm], row_scale=rows, dropout_p=p, seed=mask_seed,
            weight_offset=weight_offset, casting=CASTINGS[casting], **options,
        )  # fmt: skip
        try:
            y, z = (compute or _compute)(arguments, return_residual)
        except NotImplementedError:
            if not dtensor.register_rules():  # the first call with DTensors
                raise
            y, z = (compute or _compute)(arguments, return_residual)
    except ERRORS:
        validation.check(
            residual, branch, weight, bias, eps, row_scale=row_scale, dropout_p=dropout_p, seed=seed,
            weight_offset=weight_offset, **options,
        )  # fmt: skip
        raise
    if shape is not None:
        y, z = (t if t.shape != residual.shape else t.reshape(shape) for t in (y, z))
    return y, z


def _flatten(
    normalized_shape: int | Sequence[int],
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    options: dict[str, Any],
) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """Return the tensors and options with the dimensions of `normalized_shape` flattened into one."""
    dims = validation.to_dimensions(normalized_shape)
    validation.check_normalized_shape(dims, residual, "x" if branch is None else "residual")
    parameters: dict[str, Any] = {"weight": weight, "bias": bias}
    for name, kind in _FEATURE_OPTIONS:
        value = options.get(name)
        if kind == "features" or (isinstance(value, Tensor) and value.dim() > 0):  # other scales are numbers
            parameters[name] = value
    validation.check_normalized_arguments(dims, branch=branch, **parameters)
    keep = residual.dim() - len(dims)
    residual, branch = (dtensor.replicate_dimensions(t, keep) for t in (residual, branch))
    parameters = {name: dtensor.replicate_dimensions(t, 0) for name, t in parameters.items()}
    parameters = {name: t if t is None else t.flatten() for name, t in parameters.items()}
    weight, bias = parameters.pop("weight"), parameters.pop("bias")
    return (
        residual.flatten(keep),
        branch if branch is None else branch.flatten(keep),
        weight,
        bias,
        options | parameters,
    )


def _compute(arguments: Any, return_residual: bool) -> tuple[Tensor, Tensor]:
    if capture.transforms_active():
        return capture.formula(arguments)
    requires_grad = False
    if _grad_enabled():
        for place in autograd.PLACES:
            t: Any = arguments[place]
            if t is not None and t.requires_grad:
                requires_grad = True
                break
    if _compiling() or _dispatch_modes() or _jit_trace() is not None:
        return capture.run(arguments, requires_grad, return_residual)
    if requires_grad:
        return autograd.full_apply(*arguments)  # type: ignore[no-any-return]  # torch does not type apply
    y, z, _ = _forward_eager(*arguments, 2 if return_residual else 1)
    return y, z
