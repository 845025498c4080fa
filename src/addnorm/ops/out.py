"""Results in existing tensors: `out=` and the in-place functions.

The operator `add_norm_out` checks shapes and memory; as in `dispatch.py`, the error's message is composed only after the operator
has failed. This module adds two things that an operator cannot do: it raises where a gradient is required, and it increments the
version counters of the overwritten tensors, so that autograd detects the change.

Calls that the operator does not support (function transforms, forward-mode derivatives, strided tensors with a
`normalized_shape`) are computed out of place and copied; torch transforms the copy. `run` has many parameters: those of the
public functions.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from addnorm._util.arguments import is_number
from addnorm._util.torch_internals import direct_call, in_transform, increment_version
from addnorm.ops import autograd, dispatch, dtensor, validation
from addnorm.ops.options import NORMS
from addnorm.ops.schema import ADD_NAMES

_add_norm_out = torch.ops.addnorm.add_norm_out.default
_call = direct_call(_add_norm_out)
direct_out = autograd.direct_out
_compiling, _grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_ERRORS = (*dispatch.ERRORS, ValueError)
_OPTIONS = (*ADD_NAMES, "weight_offset", "casting")


class Names(NamedTuple):
    """Names of the tensors for y and z in error messages, and the remedy that is named if a gradient is required."""

    y: str
    z: str
    remedy: str = "leave out out="


# The tensors for y and z (None: not written) and their names. A plain tuple takes less time than a named one, which counts in a
# call on one row.
Targets = tuple[Tensor | None, Tensor | None, Names]
_IN_PLACE = Names("branch", "residual", "use the function without the underscore")


def in_place(y: Tensor | None, z: Tensor) -> Targets:
    """Return the targets of an in-place function: y in branch, z in residual."""
    return y, z, _IN_PLACE


def split_out(out: Any, return_residual: bool, *, add_only: bool = False) -> Targets:
    """Split `out` into the tensors for y and z."""
    validation.check_out(out, return_residual)
    if add_only:
        return None, out, Names("y", "out")
    return (out[0], out[1], Names("out[0]", "out[1]")) if return_residual else (out, None, Names("out", "z"))


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
    targets: Targets,
) -> None:
    """Write y and z of a call without options. Each tenth of a microsecond counts here."""
    y, z, _ = targets
    try:
        if direct_out is not None and not _compiling():  # noqa: SIM102  # Dynamo must not see the call
            if direct_out(residual, branch, weight, bias, y, z, eps, NORMS[norm]):
                return None
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
            _refuse_gradients(targets, _by_name(residual, branch, weight, bias))
        if _compiling():
            _add_norm_out(residual, branch, weight, bias, eps, NORMS[norm], y, z)
        elif in_transform():
            run(residual, branch, weight, bias, eps, norm, targets=targets)
        else:
            _call(residual, branch, weight, bias, eps, NORMS[norm], y, z)
            increment_version([y] if z is None else [z] if y is None else [y, z])
    except _ERRORS:
        validation.check(residual, branch, weight, bias, eps)
        _check(residual, targets, _by_name(residual, branch, weight, bias))
        if dtensor.register_rules():  # the first call with DTensors
            return fast_path(residual, branch, weight, bias, eps, norm, targets)
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
    inputs = _by_name(residual, branch, weight, bias, **options)
    if dispatch.requires_grad(*inputs.values(), y, z):
        _refuse_gradients(targets, inputs)

    def write(a: Any) -> tuple[Tensor, Tensor]:
        """Write y and z in the shape of `a.residual`, which is flat if the norm is over several dimensions."""
        flat_y, flat_z = (t if t is None or t.dim() == a.residual.dim() else t.view(a.residual.shape) for t in (y, z))
        written = flat_y, flat_z
        if z is None and a.residual_dtype not in (None, a.residual.dtype):
            # y is computed from a z of this dtype.
            flat_z = a.residual.new_empty(a.residual.shape, dtype=a.residual_dtype)
        _add_norm_out(*a[:6], flat_y, flat_z, *[getattr(a, name) for name in _OPTIONS])
        if not _compiling():
            increment_version([t for t in written if t is not None])
        return a.residual, a.residual  # unused: y and z are written

    try:
        transformed = not _compiling() and in_transform()
        if normalized_shape is not None and not transformed:
            _check(residual, targets, inputs)  # before flattening: the operator's errors would name flattened shapes
        for name, target, dtype in ((names.y, y, out_dtype), (names.z, z, residual_dtype)):
            if target is not None and dtype not in (None, target.dtype):
                validation.refuse_dtype(name, target, dtype)
        strided = normalized_shape is not None and not all(t is None or t.is_contiguous() for t in (y, z))
        results = dispatch.run(
            residual, branch, weight, bias, eps, norm, return_residual or z is not None, normalized_shape=normalized_shape,
            residual_dtype=residual_dtype if z is None else z.dtype, out_dtype=None if y is None else y.dtype,
            compute=None if transformed or strided else write, **options,
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


def _by_name(
    residual: Tensor, branch: Tensor | None, weight: Tensor | None, bias: Tensor | None, **options: Any
) -> dict[str, Any]:
    """Return the inputs by the caller's names."""
    first = {"x": residual} if branch is None else {"residual": residual, "branch": branch}
    return {**first, "weight": weight, "bias": bias, **options}


def _by_target(targets: Targets) -> dict[str, Tensor]:
    """Return the tensors for y and z by the caller's names."""
    y, z, names = targets
    return {name: t for name, t in ((names.z, z), (names.y, y)) if t is not None}


def _refuse_gradients(targets: Targets, inputs: dict[str, Any]) -> NoReturn:
    validation.refuse_gradients(inputs | _by_target(targets), targets[2].remedy)


def _check(residual: Tensor, targets: Targets, inputs: dict[str, Any]) -> None:
    tensors = _by_target(targets)
    validation.check_targets(tensors, residual)
    if not _compiling() and not in_transform() and not dtensor.is_dtensor(residual):  # these have no addresses
        validation.check_memory(tensors, inputs)
