"""The reference, registered for every device: it computes where no kernel exists or supports the arguments."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from addnorm import reference
from addnorm._util.norms import BY_CODE
from addnorm._util.torch_internals import BelowAutogradInPlace
from addnorm.ops import dtensor, validation
from addnorm.ops.options import ADD_OPTIONS, CASTINGS, GRADIENTS, NORMS, SCALES
from addnorm.ops.philox import keep_scale
from addnorm.ops.schema import (
    ForwardArguments,
    Kernel,
    empty_placeholder,
    gradients_of,
    kernels_of,
    library,
    outputs_of,
    targets_of,
)

_DROPOUT = ("probability", "seed", "offset")  # the kinds of dropout's options
CASTING_NAMES: dict[int, reference.Casting] = {CASTINGS[name]: name for name in get_args(reference.Casting)}


def add_norm_forward(a: Any) -> tuple[Tensor, ...]:
    """Return y, z and the statistics for any options; those after the first `outputs` are empty placeholders."""
    validation.check(**a._asdict())
    validation.check_operator(a.row_scale, a.seed, a.dropout_p, a.residual)
    z = a.residual
    if a.branch is not None:
        z = reference.add(a.residual, a.branch, dtype=a.residual_dtype, **add_options(a.residual, a))
    z = z.contiguous()  # torch's order of accumulation depends on strides
    outputs = outputs_of(a)
    y = stats = None
    if outputs.y is not None:
        y = reference.normalize(z, a.weight, a.bias, **norm_options(a)).contiguous()
    if outputs.stats is not None:
        mean, rstd = reference.statistics(z.to(reference.compute_dtype(z)), BY_CODE[a.norm], a.eps)
        stats = torch.cat([mean if isinstance(mean, Tensor) else torch.zeros_like(rstd), rstd], dim=-1).contiguous()
    results = y, None if outputs.z is None else z, stats
    return tuple(empty_placeholder(a.residual) if t is None else t for t in results)


def norm_options(a: Any) -> dict[str, Any]:
    """Return the arguments of `reference.normalize` for options of the schema."""
    return {
        "norm": BY_CODE[a.norm], "eps": a.eps, "weight_offset": a.weight_offset, "casting": CASTING_NAMES[a.casting],
        "dtype": a.out_dtype or (a.residual if a.branch is None else a.branch).dtype,
    }  # fmt: skip


def add_norm_backward(a: Any) -> tuple[Tensor, ...]:
    """Return, for any options, the gradients that `grad_mask` requests, in the order of `GRADIENTS`."""
    validation.check_backward(**a._asdict())
    split = None if a.dy is None else reference.Statistics(a.stats[..., :1], a.stats[..., 1:])
    results: list[Tensor] = []
    for grad in gradients(a._replace(dy=None if a.dy is None else a.dy.contiguous()), split):
        result = empty_placeholder(a.z) if grad is None else grad.contiguous()
        is_alias = any(result is t for t in (*results, a.dy, a.dz))  # an operator must not return its input
        results.append(result.clone() if is_alias else result)
    return tuple(results)


def add_norm_out(a: Any) -> None:
    """Write y and z: call the functional operator and copy its results, so that the bits do not depend on aliases."""
    validation.check(a.residual, a.branch, a.weight, a.bias, a.eps, norm=a.norm)
    validation.check_outputs(a.y, a.z, with_y=a.norm != NORMS["none"], with_z=a.branch is not None)
    targets = targets_of(a)
    validation.check_targets(targets, a.residual)
    inputs = {name: value for name, value in a._asdict().items() if name not in ("y", "z")}
    validation.check_memory(targets, inputs)
    dtypes = {"residual_dtype": None if a.z is None else a.z.dtype, "out_dtype": None if a.y is None else a.y.dtype}
    results = torch.ops.addnorm.add_norm_forward.kernel(*ForwardArguments(**inputs, **dtypes))
    with BelowAutogradInPlace():  # the caller increments the version counters
        for target, result in zip((a.y, a.z), results, strict=False):
            if target is not None:
                target.copy_(result)


def _add_norm_out_negative(a: Any) -> None:
    """Call the operator after resolving lazily negated inputs; torch's own kernel fails, but after writing a target."""
    validation.check_targets(targets_of(a), a.residual)
    torch.ops.addnorm.add_norm_out(*(t.resolve_neg() if isinstance(t, Tensor) else t for t in a))


def gradients(a: Any, stats: reference.Statistics | None) -> list[Tensor | None]:
    """Return the gradients of a backward call, by differentiable operators; None for those that are not requested."""
    acc = reference.compute_dtype(a.z)
    total = None if a.dz is None else a.dz.to(acc)
    dweight = dbias = None
    if a.dy is not None and stats is not None:
        total_y, dweight, dbias = reference.normalize_backward(
            a.dy, a.z, a.weight, stats, norm=BY_CODE[a.norm], weight_offset=a.weight_offset
        )
        total = total_y if total is None else total + total_y
    if total is None:
        total = torch.zeros_like(a.z, dtype=acc)
    from_z = reference.add_backward(total, residual=a.residual, branch=a.branch, **add_options(a.z, a))
    grads: dict[str, Any] = {**from_z, "weight": dweight, "bias": dbias}
    requested = gradients_of(a)
    return [grads[name].to(requested[name][1]) if name in requested else None for name in GRADIENTS]


def add_options(like: Tensor, a: Any) -> dict[str, Any]:
    """Return the arguments of `reference.add` for options of the schema: scales, and dropout as a mask."""
    keep = None
    if a.dropout_p > 0.0:
        # In float64, since branch or z may be; `reference.add` rounds it to the dtype of the arithmetic.
        keep = keep_scale(tuple(like.shape), a.dropout_p, a.seed, a.offset, torch.float64)
        keep = dtensor.spread(keep, like)  # in second derivatives `like` may be a DTensor; in kernels it is ordinary
    options = {option.name: getattr(a, option.name) for option in ADD_OPTIONS if option.kind not in _DROPOUT}
    for scale in SCALES:
        if options[scale.name] is None:
            options[scale.name] = getattr(a, scale.factor)
    return {**options, "keep": keep}


KERNELS: dict[str, Kernel] = {
    "add_norm_forward": add_norm_forward,
    "add_norm_backward": add_norm_backward,
    "add_norm_out": add_norm_out,
}
for _name, _kernel in KERNELS.items():
    for _op, _function in kernels_of(_name, _kernel):
        library.impl(_op, _function, "CompositeExplicitAutograd")
for _op, _function in kernels_of("add_norm_out", _add_norm_out_negative, ("",)):
    library.impl(_op, _function, "Negative")
