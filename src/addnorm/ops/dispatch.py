"""Calls of the operators: conversion of options to schema arguments, gradients, function transforms, graphs.

There are three ways to compute, with the same result: the operator alone (no input requires a gradient), the operator inside
its autograd node, and the formula of `reference.py`, which torch differentiates, batches and linearizes itself (`torch.func`,
forward-mode derivatives). In a graph that is recorded a call is one operator (`autograd.py`). `run` has many parameters: those of
the public functions.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from addnorm import reference
from addnorm._util.arguments import FLOAT_DTYPES, check_choice, is_number
from addnorm._util.norms import BY_CODE
from addnorm._util.torch_internals import any_requires_grad, direct_call, in_transform, is_recording
from addnorm.ops import autograd, dtensor, formulas, validation
from addnorm.ops.compile_mode import OVERLOAD, form
from addnorm.ops.dtensor import register_rules
from addnorm.ops.options import ADD_OPTIONS, CASTINGS, NORMS, SCALES
from addnorm.ops.schema import ForwardArguments

_ops = torch.ops.addnorm
_add_norm, _add_norm_stream = direct_call(_ops.add_norm.kernel), direct_call(_ops.add_norm_stream.kernel)
_forward = direct_call(_ops.add_norm_forward.kernel)
_OVERLOADS = {
    name: tuple(getattr(getattr(_ops, name), overload) for overload in ("default", "kernel", OVERLOAD))
    for name in ("add_norm", "add_norm_stream", "add_norm_forward")
}
direct = autograd.direct
_compiling, _grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_differentiable_of = operator.itemgetter(*autograd.PLACES)
# Errors of calls with invalid arguments; AssertionError: torch asserts that FakeTensors are not mixed with other tensors.
ERRORS = (RuntimeError, AttributeError, TypeError, OverflowError, AssertionError)
# Arguments that may have one element per feature.
_FEATURES = ("weight", "bias", *(option.name for option in ADD_OPTIONS if option.kind in ("scale", "features")))


def fast_path(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: int,
    return_residual: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return y, or `(y, z)`, of a call without options. Each tenth of a microsecond counts here."""
    try:
        if not _compiling() and direct is not None:
            results = direct(residual, branch, weight, bias, eps, norm, return_residual)
            if results is not None:
                return results  # type: ignore[no-any-return]
        if eps.__class__ is not float and not is_number(eps):
            raise TypeError  # a bool, or a tensor whose gradient would be lost
        if in_transform():
            y, z = run(residual, branch, weight, bias, eps, BY_CODE[norm])
            return (y, z) if return_residual else y
        if _compiling():
            arguments = residual, branch, weight, bias, eps, norm
            return _record_compiled("add_norm_stream" if return_residual else "add_norm", arguments)  # type: ignore[no-any-return]
        # Attributes of four tensors are faster than any_requires_grad.
        differentiable = _grad_enabled() and (
            residual.requires_grad
            or (branch is not None and branch.requires_grad)
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        )
        # Without gradients a plain tensor needs no check: in a trace of `torch.jit` the kernel calls the default overload.
        if (differentiable or residual.__class__ is not Tensor) and is_recording():
            arguments = residual, branch, weight, bias, eps, norm
            return _record("add_norm_stream" if return_residual else "add_norm", arguments)  # type: ignore[no-any-return]
        if differentiable:
            outputs = autograd.apply(residual, branch, weight, bias, eps, norm)
            return outputs if return_residual else outputs[0]
        return (_add_norm_stream if return_residual else _add_norm)(residual, branch, weight, bias, eps, norm)  # type: ignore[no-any-return]
    except ERRORS:
        if is_jagged(residual):
            return _run_on_values(fast_path, residual, branch, weight, bias, eps, norm, return_residual)  # type: ignore[no-any-return]
        validation.check(residual, branch, weight, bias, eps)  # raises if the arguments are invalid
        if register_rules():  # the first call with DTensors
            return fast_path(residual, branch, weight, bias, eps, norm, return_residual)
        raise


def is_jagged(t: Any, normalized_shape: int | Sequence[int] | None = None) -> bool:
    """Return whether `t` is a jagged nested tensor whose ragged dimension is before the normalized dimensions."""
    if type(t) is Tensor or not (isinstance(t, Tensor) and t.is_nested and t.layout == torch.jagged):
        return False
    count = 1 if normalized_shape is None else len(validation.to_dimensions(normalized_shape))
    return _ragged_dim(t) < t.dim() - count


def _ragged_dim(t: Tensor) -> int:
    """Return the ragged dimension of a jagged nested tensor, the one whose size is a symbol."""
    return next(dim for dim, size in enumerate(t.shape) if not isinstance(size, int))


def _run_on_values(call: Callable[..., Any], residual: Any, branch: Any, *arguments: Any, **options: Any) -> Any:
    """Call `call` with the values of jagged nested tensors, which are ordinary tensors, and return nested tensors."""
    if branch is not None and not (is_jagged(branch) and branch.shape == residual.shape):
        kind = "a nested tensor with other offsets" if is_jagged(branch) else validation.kind_of(branch)
        raise ValueError(
            f"branch is {kind}, expected a nested tensor with the offsets of residual: compute both from one nested tensor, or "
            "make both with torch.nested.nested_tensor_from_jagged(values, offsets)."
        )
    results = call(*(None if t is None else t.values() for t in (residual, branch)), *arguments, **options)

    def wrap(values: Tensor) -> Tensor:
        if values.shape[:1] != residual.values().shape[:1]:  # a placeholder
            return values
        return torch.nested.nested_tensor_from_jagged(
            values, residual.offsets(), residual.lengths(), _ragged_dim(residual)
        )

    return tuple(map(wrap, results)) if isinstance(results, tuple) else wrap(results)


def default_rms_eps(residual: Tensor, branch: Tensor | None, residual_dtype: torch.dtype | None = None) -> float:
    """Return what `eps=None` means, as in `torch.nn.functional.rms_norm`: the machine epsilon of the arithmetic."""
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
    compute: Callable[[Any], tuple[Tensor, Tensor]] | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return `(y, z)` of a call whose options have their public names.

    y is an empty placeholder where `norm` is "none", z where there is no branch or z is not requested.
    `compute`, if it is passed, computes `(y, z)` from the operator's arguments in place of `_compute`.
    """
    if compute is None and is_jagged(residual, normalized_shape):
        options["normalized_shape"] = normalized_shape
        return _run_on_values(run, residual, branch, weight, bias, eps, norm, return_residual, **options)  # type: ignore[no-any-return]
    check_choice("casting", options.get("casting", "float32"), CASTINGS)
    shape = None
    if normalized_shape is not None:
        shape = residual.shape if isinstance(residual, Tensor) else None
        residual, branch, options = _flatten(
            normalized_shape, residual, branch, {"weight": weight, "bias": bias, **options}
        )
        weight, bias = options.pop("weight"), options.pop("bias")
    try:
        outputs = 2 if return_residual else 1
        arguments = _to_schema(residual, branch, weight, bias, eps, norm, {**options, "outputs": outputs})
        try:
            y, z = (compute or _compute)(arguments)
        except NotImplementedError:
            if not register_rules():  # the first call with DTensors
                raise
            y, z = (compute or _compute)(arguments)
    except ERRORS:
        validation.check(residual, branch, weight, bias, eps, **{**options, "casting": 0})  # checked above
        raise
    if shape is not None:
        y, z = (t if t.shape != residual.shape else t.reshape(shape) for t in (y, z))
    return y, z


def _to_schema(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: str,
    options: dict[str, Any],
) -> Any:
    """Return the arguments of `add_norm_forward` for options with their public names.

    An option that needs no conversion has the same name in the operator.
    """
    p = options.get("dropout_p", 0.0)
    if not (is_number(eps) and is_number(options.get("weight_offset", 0.0)) and is_number(p) and 0.0 <= p <= 1.0):
        raise TypeError  # the argument check of the caller names the argument
    if not options.pop("training", True):
        options["dropout_p"] = p = 0.0
    if p == 0.0:
        options["seed"] = None
    elif options.get("seed") is None:
        options["seed"] = dtensor.draw_seed(residual)
    rows = options.get("row_scale")
    if rows is not None:
        rows = dtensor.share(rows, residual)
        if rows.shape != residual.shape[:-1]:
            if rows.dtype not in FLOAT_DTYPES:
                raise TypeError
            # Upcast before the expansion, whose backward then accumulates gradients that are not rounded.
            upcast = reference.compute_dtype(rows, residual, branch, dtype=options.get("residual_dtype"))
            rows = rows.to(upcast).expand(residual.shape[:-1])
        options["row_scale"] = rows
    for option in SCALES:  # the schema has one argument for a number and another for a tensor
        scale = options.get(option.name)
        if scale is not None and not isinstance(scale, Tensor):
            if not is_number(scale):
                raise TypeError
            options[option.name], options[option.factor] = None, scale
    options["casting"] = CASTINGS[options.get("casting", "float32")]
    return ForwardArguments(residual, branch, weight, bias, eps, NORMS[norm], **options)


def _flatten(
    normalized_shape: int | Sequence[int], residual: Tensor, branch: Tensor | None, options: dict[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the tensors and options with the dimensions of `normalized_shape` flattened into one."""
    dims = validation.to_dimensions(normalized_shape)
    validation.check_normalized_shape(dims, residual, "x" if branch is None else "residual")
    parameters = {name: t for name, t in options.items() if name in _FEATURES and isinstance(t, Tensor) and t.dim() > 0}
    validation.check_normalized_arguments(dims, branch=branch, **parameters)
    keep = residual.dim() - len(dims)

    def flatten(t: Tensor | None, first: int = 0) -> Tensor | None:
        t = dtensor.replicate_dimensions(t, first)
        return t if t is None else t.flatten(first)

    flat = {name: flatten(t) for name, t in parameters.items()}
    return flatten(residual, keep), flatten(branch, keep), options | flat


def _compute(a: Any) -> tuple[Tensor, Tensor]:
    if in_transform():
        return formulas.formula(a)
    if _compiling() or is_recording():
        y, z, _ = _record("add_norm_forward", a)
        return y, z
    if _grad_enabled() and any_requires_grad(*_differentiable_of(a)):
        return autograd.apply(*a[:-1])
    y, z, _ = _forward(*a)
    return y, z


def _record(name: str, arguments: Any) -> Any:
    """Call operator `name` while a graph is traced; in an ONNX export compute the formula in torch's operators."""
    if _compiling():
        return _record_compiled(name, arguments)
    if exports_onnx():
        y, z = formulas.fusible_formula(arguments if name == "add_norm_forward" else ForwardArguments(*arguments))
        return {"add_norm": y, "add_norm_stream": (y, z), "add_norm_forward": (y, z, None)}[name]
    register_rules()  # a traced call cannot be repeated
    return getattr(_ops, name).default(*arguments)


def _record_compiled(name: str, arguments: Any) -> Any:
    """Call the overload of operator `name` for a graph of Dynamo: the formula, the kernel or the default.

    The kernel is for calls without gradients. The default overload is for calls with gradients, and for exports. Each global that
    is read here becomes a guard, which takes time in every call of the compiled graph.
    """
    op, kernel, formula = _OVERLOADS[name]
    residual, branch, weight, bias = arguments[:4]
    dtype, plain = residual.dtype, name != "add_norm_forward"
    for t in (branch, weight, bias):
        plain = plain and (t is None or t.dtype == dtype)
    chosen = form(residual, plain)
    if chosen == "formula":
        op = formula
    elif chosen and not requires_grad(*arguments):
        op = kernel  # no graph of torch.compile becomes differentiable later
    return op(*arguments)


def exports_onnx() -> bool:
    """Return whether `torch.onnx.export`, which knows only torch's operators, traces the call."""
    onnx = sys.modules.get("torch.onnx")  # slow to import
    return onnx is not None and bool(onnx.is_in_onnx_export())


def requires_grad(*arguments: Any) -> bool:
    """Return whether the grad mode is on and any of the arguments is a tensor that requires a gradient."""
    if _compiling():  # Dynamo cannot trace `any_requires_grad`
        return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in arguments)
    return torch.is_grad_enabled() and any_requires_grad(*arguments)
