"""Results in existing tensors: `out=` and the in-place functions.

The operator `add_norm_out` checks shapes and memory; as in `dispatch.py` the message is made after the error. This module adds
two things that an operator cannot do: it raises where a gradient is required, and it increments the version counters of the
overwritten tensors, so that autograd detects the change.

Calls that the operator does not support (function transforms, forward-mode derivatives, strided tensors with a
`normalized_shape`) are computed out of place and copied; torch transforms the copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from addnorm._util.arguments import is_number
from addnorm.ops import dispatch, dtensor, validation
from addnorm.ops.options import NORMS
from addnorm.ops.schema import OutArguments

_add_norm_out = torch.ops.addnorm.add_norm_out.default
_add_norm_out_eager = _add_norm_out._op  # without OpOverload.__call__'s Python frame, as in dispatch.py
_compiling = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled
_transforms_active = torch._C._are_functorch_transforms_active
_increment_version = torch._C._increment_version
_forward_ad: Any = forward_ad
_ERRORS = (*dispatch.ERRORS, ValueError)


class Names(NamedTuple):
    """The caller's names of the tensors for y and z, and the remedy where a gradient is required."""

    y: str
    z: str
    remedy: str


IN_PLACE = Names("branch", "residual", "use the function without the underscore")
OUT_Y = Names("out", "z", "leave out out=")
OUT_Z = Names("y", "out", "leave out out=")
OUT_BOTH = Names("out[0]", "out[1]", "leave out out=")

Targets = tuple[Tensor | None, Tensor | None, Names]


def split_out(out: Any, return_residual: bool) -> Targets:
    """Split `out` into the tensors for y and z, and their names."""
    validation.check_out(out, return_residual)
    return (out[0], out[1], OUT_BOTH) if return_residual else (out, None, OUT_Y)


def select_run(out: Any, return_residual: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `dispatch.run`, or if `out` is not None the function that writes the results into it."""
    return dispatch.run if out is None else functools.partial(run, targets=split_out(out, return_residual))


def residual_dtype(out: Any) -> torch.dtype | None:
    """Return the dtype of z that `out` implies, if it has a tensor for z."""
    return out[1].dtype if isinstance(out, tuple | list) and isinstance(out[-1], Tensor) else None


def fast_path(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: str,
    y: Tensor | None,
    z: Tensor | None,
    names: Names,
) -> None:
    """Write y and z of a call without options. Each tenth of a microsecond counts here."""
    try:
        if eps.__class__ is not float and not is_number(eps):
            raise TypeError  # the argument check below names the argument
        if _grad_enabled() and (
            residual.requires_grad
            or (branch is not None and branch.requires_grad)
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
            or (y is not None and y.requires_grad)
            or (z is not None and z.requires_grad)
        ):
            inputs = _by_name(residual, branch, weight=weight, bias=bias)
            validation.refuse_gradients(inputs | _by_target((y, z, names)), names.remedy)
        if _compiling():
            _add_norm_out(residual, branch, weight, bias, eps, NORMS[norm], y, z)
        elif _forward_ad._current_level >= 0 or _transforms_active():
            run(residual, branch, weight, bias, eps, norm, targets=(y, z, names))
        else:
            _add_norm_out_eager(residual, branch, weight, bias, eps, NORMS[norm], y, z)
            _increment_version([y] if z is None else [z] if y is None else [y, z])  # type: ignore[list-item]  # not both are None
    except _ERRORS:
        validation.check(residual, branch, weight, bias, eps)
        _check(residual, (y, z, names), _by_name(residual, branch, weight=weight, bias=bias))
        if dtensor.register_rules():  # the first call with DTensors
            return fast_path(residual, branch, weight, bias, eps, norm, y, z, names)
        raise


def run(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: str,
    return_residual: bool = True,
    *,
    targets: Targets,
    normalized_shape: Any = None,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Write y and z of a call with options, as in `dispatch.run`, and return the tensors that were written."""
    y, z, names = targets
    inputs = _by_name(residual, branch, weight=weight, bias=bias, **options)
    tensors = inputs | _by_target(targets)
    if _grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors.values()):
        validation.refuse_gradients(tensors, names.remedy)
    try:
        transformed = not _compiling() and (_forward_ad._current_level >= 0 or _transforms_active())
        if normalized_shape is not None and not transformed:
            _check(residual, targets, inputs)  # the operator sees other shapes
        for name, target, dtype in ((names.y, y, out_dtype), (names.z, z, residual_dtype)):
            if target is not None and dtype not in (None, target.dtype):
                validation.refuse_dtype(name, target, dtype)
        strided = normalized_shape is not None and not all(t is None or t.is_contiguous() for t in (y, z))
        results = dispatch.run(
            residual, branch, weight, bias, eps, norm, return_residual, normalized_shape=normalized_shape,
            residual_dtype=residual_dtype if z is None else z.dtype, out_dtype=None if y is None else y.dtype,
            compute=None if transformed or strided else functools.partial(_write, y, z), **options,
        )  # fmt: skip
        if transformed or strided:
            for target, result in zip((y, z), results, strict=True):
                if target is not None:
                    target.copy_(result)
    except _ERRORS:
        validation.check(residual, branch)
        _check(residual, targets, inputs)
        raise
    return y, z


def _write(y: Tensor | None, z: Tensor | None, a: Any, return_residual: bool) -> tuple[Tensor, Tensor]:
    """Write y and z for `dispatch.run`, whose `residual` is flattened where the norm is over several dimensions."""
    residual = a.residual
    y, z = (t if t is None or t.dim() == residual.dim() else t.view(residual.shape) for t in (y, z))
    written = [t for t in (y, z) if t is not None]
    if z is None and a.residual_dtype not in (None, residual.dtype):
        z = residual.new_empty(residual.shape, dtype=a.residual_dtype)  # y is computed from a z of this dtype
    (_add_norm_out if _compiling() else _add_norm_out_eager)(*a[:6], y, z, *[getattr(a, name) for name in _OPTIONS])
    if not _compiling():
        _increment_version(written)
    return residual, residual  # unused: y and z are written


_OPTIONS = OutArguments._fields[8:]


def _by_name(residual: Tensor, branch: Tensor | None, **arguments: Any) -> dict[str, Any]:
    """Return the inputs by the caller's names."""
    return {"x": residual, **arguments} if branch is None else {"residual": residual, "branch": branch, **arguments}


def _by_target(targets: Targets) -> dict[str, Tensor]:
    """Return the tensors that are written by the caller's names."""
    y, z, names = targets
    return {name: t for name, t in ((names.z, z), (names.y, y)) if t is not None}


def _check(residual: Tensor, targets: Targets, inputs: dict[str, Any]) -> None:
    tensors = _by_target(targets)
    validation.check_targets(tensors, residual)
    if not _compiling() and not _transforms_active() and not dtensor.is_dtensor(residual):  # these have no addresses
        validation.check_memory(tensors, inputs)
