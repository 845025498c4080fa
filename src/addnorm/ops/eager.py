"""The reference, registered for every device: it computes where no kernel exists or supports the arguments."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from addnorm import reference
from addnorm.ops import dtensor, validation
from addnorm.ops.options import ADD_OPTIONS, CASTINGS, GRADIENTS, NORMS, SCALES, norm_number
from addnorm.ops.philox import keep_scale
from addnorm.ops.schema import ARGUMENTS, OVERLOADS, SCHEMAS, by_name, empty_placeholder, library

_DROPOUT = ("probability", "seed", "offset")  # the kinds of its options
_OUT_NAMES = tuple(argument.name for argument in ARGUMENTS["add_norm_out"])
CASTING_NAMES: dict[int, reference.Casting] = {CASTINGS[name]: name for name in get_args(reference.Casting)}


def norm_kind(norm: int) -> reference.Norm:
    """Return the reference's name for a norm number of the schema."""
    return "layer" if norm == NORMS["layer"] else "rms"


def add_norm(
    residual: Tensor, branch: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> Tensor:
    """Return y = norm(residual + branch)."""
    return add_norm_forward(residual, branch, weight, bias, eps, norm_number(rms), outputs=1)[0]


def add_norm_stream(
    residual: Tensor, branch: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> tuple[Tensor, Tensor]:
    """Return y and z."""
    return add_norm_forward(residual, branch, weight, bias, eps, norm_number(rms), outputs=2)[:2]


def add_norm_train(
    residual: Tensor, branch: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, z and the statistics for the backward."""
    return add_norm_forward(residual, branch, weight, bias, eps, norm_number(rms))


def add_norm_train_backward(
    dy: Tensor,
    dz: Tensor | None,
    z: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    rms: bool,
    dresidual_dtype: torch.dtype,
    branch_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    grad_mask: int,
) -> tuple[Tensor, ...]:
    """Return the gradients of residual, branch, weight and bias that `grad_mask` requests."""
    return add_norm_backward(
        dy, dz, z, stats, weight, norm_number(rms),
        dresidual_dtype=dresidual_dtype, branch_dtype=branch_dtype, bias_dtype=bias_dtype, grad_mask=grad_mask,
    )[:4]  # fmt: skip


@by_name("add_norm_forward")
def add_norm_forward(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: int,
    *,
    weight_offset: float = 0.0,
    casting: int = 0,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    outputs: int = 3,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for any options, the first `outputs` of y, z and the statistics, and placeholders for the others."""
    validation.check(
        residual, branch, weight, bias, eps, norm=norm, weight_offset=weight_offset, casting=casting,
        residual_dtype=residual_dtype, out_dtype=out_dtype, outputs=outputs, **options,
    )  # fmt: skip
    validation.check_operator(options.get("row_scale"), options.get("seed"), options.get("dropout_p", 0.0), residual)
    z = (
        residual
        if branch is None
        else reference.add(residual, branch, dtype=residual_dtype, **add_options(residual, options))
    )
    z = z.contiguous()  # torch's order of accumulation depends on strides
    add_only = norm == NORMS["none"]
    z_out = z if branch is not None and (outputs > 1 or add_only) else empty_placeholder(residual)
    if add_only:
        return empty_placeholder(residual), z_out, empty_placeholder(residual)
    dtype = out_dtype or (residual if branch is None else branch).dtype
    y = reference.normalize(
        z, weight, bias, norm=norm_kind(norm), eps=eps, weight_offset=weight_offset, casting=CASTING_NAMES[casting],
        dtype=dtype,
    ).contiguous()  # fmt: skip
    if outputs < 3:
        return y, z_out, empty_placeholder(residual)
    mean, rstd = reference.statistics(z.to(reference.compute_dtype(z)), norm_kind(norm), eps)
    stats = torch.cat([mean if isinstance(mean, Tensor) else torch.zeros_like(rstd), rstd], dim=-1)
    return y, z_out, stats.contiguous()


@by_name("add_norm_backward")
def add_norm_backward(
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    norm: int,
    *,
    dresidual_dtype: torch.dtype,
    branch_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    grad_mask: int,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Return, for any options, the gradients that `grad_mask` requests, in the order of `GRADIENTS`."""
    validation.check_backward(
        dy, dz, z, stats, weight, norm, grad_mask=grad_mask, dresidual_dtype=dresidual_dtype, branch_dtype=branch_dtype,
        bias_dtype=bias_dtype, **options,
    )  # fmt: skip
    dy = None if dy is None else dy.contiguous()
    split = reference.Statistics(stats[..., :1], stats[..., 1:]) if dy is not None else None
    grads = gradients(dy, dz, z, split, weight, norm, **options)
    scales = {name: options[name].dtype for name in GRADIENTS[4:] if options.get(name) is not None}
    dtypes = {"residual": dresidual_dtype, "branch": branch_dtype, "bias": bias_dtype, **scales}
    dtypes["weight"] = z.dtype if weight is None else weight.dtype
    results: list[Tensor] = []
    for bit, name in enumerate(GRADIENTS):
        grad = grads[name].to(dtypes[name]).contiguous() if grad_mask >> bit & 1 else empty_placeholder(z)  # type: ignore[union-attr]  # not None: it is requested
        results.append(_copy_alias(grad, *results, dy, dz))
    return tuple(results)


@by_name("add_norm_out")
def add_norm_out(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: int,
    y: Tensor | None,
    z: Tensor | None,
    **options: Any,
) -> None:
    """Call the functional operator, on any backend, and copy its results: the same bits, whatever y and z alias."""
    validation.check(residual, branch, weight, bias, eps, norm=norm)
    validation.check_outputs(y, z, with_y=norm != NORMS["none"], with_z=branch is not None)
    targets = {name: t for name, t in (("y", y), ("z", z)) if t is not None}
    validation.check_targets(targets, residual)
    inputs = {"residual": residual, "branch": branch, "weight": weight, "bias": bias, **options}
    validation.check_memory(targets, inputs)
    results = torch.ops.addnorm.add_norm_forward.kernel(
        residual, branch, weight, bias, eps, norm, **options,
        residual_dtype=None if z is None else z.dtype, out_dtype=None if y is None else y.dtype,
    )  # fmt: skip
    with torch._C._AutoDispatchBelowADInplaceOrView():  # the caller increments the version counters
        for target, result in zip((y, z), results, strict=False):
            if target is not None:
                target.copy_(result)


def _add_norm_out_negative(*args: Any, **options: Any) -> None:
    """Call the operator without lazily negated inputs; torch's own kernel for them fails after it has written a target."""
    a = dict(zip(_OUT_NAMES, args, strict=False)) | options
    validation.check_targets({name: a[name] for name in ("y", "z") if a[name] is not None}, a["residual"])
    resolved = {name: t.resolve_neg() if isinstance(t, Tensor) else t for name, t in a.items()}
    torch.ops.addnorm.add_norm_out(**resolved)


def gradients(
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor,
    stats: reference.Statistics | None,
    weight: Tensor | None,
    norm: int,
    *,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    branch: Tensor | None = None,
    **options: Any,
) -> dict[str, Tensor | None]:
    """Return every gradient of `add_norm_forward` by name, in the dtype of the arithmetic; differentiable itself."""
    acc = reference.compute_dtype(z)
    total = None if dz is None else dz.to(acc)
    dweight = dbias = None
    if dy is not None and stats is not None:
        from_y = reference.normalize_backward(dy, z, weight, stats, norm=norm_kind(norm), weight_offset=weight_offset)
        total = from_y.z if total is None else total + from_y.z
        dweight, dbias = from_y.weight, from_y.bias
    if total is None:
        total = torch.zeros_like(z, dtype=acc)
    from_z = reference.add_backward(total, residual=residual, branch=branch, **add_options(z, options))
    return {**from_z._asdict(), "weight": dweight, "bias": dbias}


def add_options(like: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `reference.add` for options of the schema: scales, and dropout as a mask."""
    p = options.get("dropout_p", 0.0)
    keep = None
    if p > 0.0:
        # In float64, since branch or z may be; `reference.add` rounds it to the dtype of the arithmetic.
        keep = keep_scale(tuple(like.shape), p, options["seed"], options.get("offset", 0), torch.float64)
        keep = dtensor.spread(keep, like)  # in second derivatives; the kernels have ordinary tensors
    arguments = {option.name: options.get(option.name) for option in ADD_OPTIONS if option.kind not in _DROPOUT}
    for scale in SCALES:
        if arguments[scale.name] is None:
            arguments[scale.name] = options.get(scale.factor, 1.0)
    return {**arguments, "keep": keep}


def _copy_alias(out: Tensor, *inputs: Tensor | None) -> Tensor:
    """Return a copy of `out` if it is one of the inputs, which an operator must not return, else `out`."""
    return out.clone() if any(out is t for t in inputs) else out


for _name in SCHEMAS:
    for _op in (*OVERLOADS[_name], f"{_name}_reference"):
        library.impl(_op, globals()[_name], "CompositeExplicitAutograd")
library.impl("add_norm_out", _add_norm_out_negative, "Negative")
