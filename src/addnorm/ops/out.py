"""Results written into memory that is given: what `out=` and the in-place forms do.

The operator `add_norm_out` judges what it may write (which memory is shared, what fits); the sentence about it is made after the
fact, as in `call.py`. What is left to do here is what an operator cannot: refuse gradients, and count the versions of the tensors
that are overwritten, so that autograd notices.

What the operator cannot compute (function transforms, forward-mode derivatives, strided memory under a `normalized_shape`) is
computed aside and copied, and torch transforms the copy.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from addnorm.ops import dispatch, validation
from addnorm.ops.schema import NORMS

_add_norm_out = torch.ops.addnorm.add_norm_out.default
_add_norm_out_eager = _add_norm_out._op  # without OpOverload.__call__'s Python frame, as in call.py
_compiling = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled
_transforms_active = torch._C._are_functorch_transforms_active
_increment_version = torch._C._increment_version
_forward_ad: Any = forward_ad
_REFUSALS = (RuntimeError, AttributeError, TypeError, ValueError)


class Form(NamedTuple):
    """What the caller calls the memory of y and that of z, and what to call where a gradient is wanted."""

    y: str
    z: str
    instead: str


IN_PLACE = Form("branch", "residual", "use the function without the underscore")
OUT_Y = Form("out", "z", "leave out out=")
OUT_Z = Form("y", "out", "leave out out=")
OUT_BOTH = Form("out[0]", "out[1]", "leave out out=")

Into = tuple[Tensor | None, Tensor | None, Form]


def into(out: Any, return_residual: bool) -> Into:
    """The memory of y and that of z that an `out=` is, and their names."""
    validation.check_out(out, return_residual)
    return (out[0], out[1], OUT_BOTH) if return_residual else (out, None, OUT_Y)


def residual_dtype(out: Any) -> torch.dtype | None:
    """The dtype that the stream has because its memory has it."""
    return out[1].dtype if isinstance(out, tuple | list) and isinstance(out[-1], Tensor) else None


def may_overwrite(x: Tensor) -> bool:
    """Whether results may go into given memory now without changing what is computed: eagerly on CPU, and nothing is recorded.

    Under autocast they may not: y's dtype would be that of its memory.
    """
    return (
        not _grad_enabled()
        and not _compiling()
        and x.is_cpu
        and not torch.is_autocast_enabled("cpu")
        and not _transforms_active()
        and _forward_ad._current_level < 0
    )


def own(
    residual: Tensor,
    branch: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: str,
    y: Tensor | None,
    z: Tensor | None,
) -> None:
    """`plain` where `may_overwrite`, into memory that is the caller's alone: no version is counted that nobody else looks at."""
    _add_norm_out_eager(residual, branch, weight, bias, eps, NORMS[norm], y, z)


def plain(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: str,
    y: Tensor | None,
    z: Tensor | None,
    form: Form,
) -> None:
    """A call without options. This path is counted in tenths of a microsecond."""
    try:
        if eps.__class__ is not float and not validation.is_number(eps):
            raise TypeError  # the sentence is on its way
        if _grad_enabled() and (
            residual.requires_grad
            or (branch is not None and branch.requires_grad)
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
            or (y is not None and y.requires_grad)
            or (z is not None and z.requires_grad)
        ):
            named = _named(residual, branch, weight=weight, bias=bias)
            validation.refuse_gradients({**named, form.y: y, form.z: z}, form.instead)
        if _compiling():
            _add_norm_out(residual, branch, weight, bias, eps, NORMS[norm], y, z)
        elif _forward_ad._current_level >= 0 or _transforms_active():
            run(residual, branch, weight, bias, eps, norm, into=(y, z, form))
        else:
            _add_norm_out_eager(residual, branch, weight, bias, eps, NORMS[norm], y, z)
            _increment_version([y] if z is None else [z] if y is None else [y, z])  # type: ignore[list-item]  # not both are None
    except _REFUSALS:
        validation.check(residual, branch, weight, bias, eps)
        _check(residual, (y, z, form), _named(residual, branch, weight=weight, bias=bias))
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
    into: Into,
    normalized_shape: Any = None,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """The same with every option, as `call.run` takes them: y and z, the tensors that were given."""
    y, z, form = into
    inputs = _named(residual, branch, weight=weight, bias=bias, **options)
    named = {**inputs, form.y: y, form.z: z}
    if _grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in named.values()):
        validation.refuse_gradients(named, form.instead)
    try:
        transformed = not _compiling() and (_forward_ad._current_level >= 0 or _transforms_active())
        if normalized_shape is not None and not transformed:
            _check(residual, into, inputs)  # the operator sees other shapes
        for name, target, dtype in ((form.y, y, out_dtype), (form.z, z, residual_dtype)):
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
    except _REFUSALS:
        validation.check(residual, branch)
        _check(residual, into, inputs)
        raise
    return y, z


def _write(y: Tensor | None, z: Tensor | None, a: dispatch.Arguments, return_residual: bool) -> tuple[Tensor, Tensor]:
    """What `call.run` computes with: `residual` is flattened where the norm is over several dimensions."""
    residual = a.residual
    y, z = (t if t is None or t.dim() == residual.dim() else t.view(residual.shape) for t in (y, z))
    given = [t for t in (y, z) if t is not None]
    if z is None and a.residual_dtype not in (None, residual.dtype):
        z = residual.new_empty(residual.shape, dtype=a.residual_dtype)  # a stream of another dtype has to be somewhere
    (_add_norm_out if _compiling() else _add_norm_out_eager)(*a[:6], y, z, *a[6:-2])
    if not _compiling():
        _increment_version(given)
    return residual, residual  # nothing: y and z are where they were wanted


def _named(residual: Tensor, branch: Tensor | None, **others: Any) -> dict[str, Any]:
    """The inputs by the names that the caller knows."""
    return {"x": residual, **others} if branch is None else {"residual": residual, "branch": branch, **others}


def _check(residual: Tensor, into: Into, inputs: dict[str, Any]) -> None:
    y, z, form = into
    targets = {name: t for name, t in ((form.z, z), (form.y, y)) if t is not None}
    validation.check_targets(targets, residual)
    if not _compiling() and not _transforms_active():  # where tensors have no addresses
        validation.check_memory(targets, inputs)
