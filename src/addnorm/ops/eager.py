"""The reference registered for every device: what runs where there is no kernel, or none for these arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from addnorm import reference
from addnorm.ops import validation
from addnorm.ops.philox import keep_scale
from addnorm.ops.schema import CASTINGS, NORMS, SCHEMAS, WANTS, by_name, checked, library, nothing

CASTING_NAMES: dict[int, reference.Casting] = {CASTINGS[name]: name for name in ("float32", "llama", "t5")}


def norm_kind(norm: int) -> reference.Norm:
    """The schema's number as the reference's word."""
    return "layer" if norm == NORMS["layer"] else "rms"


def add_norm(
    residual: Tensor, branch: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> Tensor:
    """y alone."""
    validation.check(residual, branch, weight, bias, eps)
    z = (residual if branch is None else reference.add(residual, branch)).contiguous()  # sums depend on strides
    y = residual if branch is None else branch
    return _fresh(_normalize(z, weight, bias, "rms" if rms else "layer", eps, dtype=y.dtype), residual, branch)


def add_norm_stream(
    residual: Tensor, branch: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> tuple[Tensor, Tensor]:
    """y and the stream."""
    validation.check(residual, branch, weight, bias, eps)
    z = reference.add(residual, branch).contiguous()
    return _normalize(z, weight, bias, "rms" if rms else "layer", eps, dtype=branch.dtype), z


def add_norm_train(
    residual: Tensor, branch: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the stream and the statistics that the backward wants."""
    return add_norm_forward(residual, branch, weight, bias, eps, NORMS["rms" if rms else "layer"])


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
    wants: int,
) -> tuple[Tensor, ...]:
    """The gradients of residual, branch, weight and bias that `wants` asks for."""
    return add_norm_backward(
        dy, dz, z, stats, weight, NORMS["rms" if rms else "layer"],
        dresidual_dtype=dresidual_dtype, branch_dtype=branch_dtype, bias_dtype=bias_dtype, wants=wants,
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
    """The same with every option; of y, the stream and the statistics the first `outputs` are wanted."""
    validation.check(
        residual, branch, weight, bias, eps, weight_offset=weight_offset, residual_dtype=residual_dtype, out_dtype=out_dtype,
        **checked(options),
    )  # fmt: skip
    z = (
        residual
        if branch is None
        else reference.add(residual, branch, dtype=residual_dtype, **add_options(residual, options))
    )
    z = z.contiguous()  # torch's order of summation depends on strides
    alone = norm == NORMS["none"]
    stream = z if branch is not None and (outputs > 1 or alone) else nothing(residual)
    if alone:
        return nothing(residual), stream, nothing(residual)
    dtype = out_dtype or (residual if branch is None else branch).dtype
    y = _normalize(
        z, weight, bias, norm_kind(norm), eps, weight_offset=weight_offset, casting=CASTING_NAMES[casting], dtype=dtype
    )
    if outputs < 3:
        return y, stream, nothing(residual)
    mean, rstd = reference.statistics(z.to(reference.compute_dtype(z)), norm_kind(norm), eps)
    stats = torch.cat([mean if isinstance(mean, Tensor) else torch.zeros_like(rstd), rstd], dim=-1)
    return y, stream, stats.contiguous()


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
    wants: int,
    **options: Any,
) -> tuple[Tensor, ...]:
    """The same for every argument, with every option."""
    dy = None if dy is None else dy.contiguous()
    split = reference.Statistics(stats[..., :1], stats[..., 1:]) if dy is not None else None
    grads = gradients(dy, dz, z, split, weight, norm, **options)
    scales = {name: options[name].dtype for name in WANTS[4:] if options.get(name) is not None}
    dtypes = {"residual": dresidual_dtype, "branch": branch_dtype, "bias": bias_dtype, **scales}
    dtypes["weight"] = z.dtype if weight is None else weight.dtype
    taken: list[Tensor] = []
    for bit, name in enumerate(WANTS):
        grad = grads[name].to(dtypes[name]).contiguous() if wants >> bit & 1 else nothing(z)  # type: ignore[union-attr]  # wanted, so there
        taken.append(_fresh(grad, *taken, dy, dz))
    return tuple(taken)


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
    """The functional operator, by whatever computes that, then a copy: the same bits, and right whatever y and z alias."""
    validation.check(residual, branch, weight, bias, eps)
    targets = {name: t for name, t in (("y", y), ("z", z)) if t is not None}
    validation.check_targets(targets, residual)
    inputs = {"residual": residual, "branch": branch, "weight": weight, "bias": bias, **options}
    validation.check_memory(targets, inputs)
    results = torch.ops.addnorm.add_norm_forward.default(
        residual, branch, weight, bias, eps, norm, **options,
        residual_dtype=None if z is None else z.dtype, out_dtype=None if y is None else y.dtype,
    )  # fmt: skip
    with torch._C._AutoDispatchBelowADInplaceOrView():  # a kernel writes: what autograd is told is told by the caller
        for target, result in zip((y, z), results, strict=False):
            if target is not None:
                target.copy_(result)


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
    """Every gradient of `add_norm_forward` by name, in the dtype of the arithmetic; differentiable in its arguments."""
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
    """The options of `reference.add` from those of the schema: a scale is a tensor or a factor, dropout a mask."""
    p = options.get("dropout_p", 0.0)
    keep = None
    if p > 0.0:
        # In float64, for the sum that is float64 because of the branch or the stream; the sum itself rounds it to its own.
        keep = keep_scale(tuple(like.shape), p, options["seed"], options.get("offset", 0), torch.float64)
    residual_scale, layer_scale = options.get("residual_scale"), options.get("layer_scale")
    return {
        "residual_scale": options.get("residual_factor", 1.0) if residual_scale is None else residual_scale,
        "row_scale": options.get("row_scale"),
        "layer_scale": options.get("branch_factor", 1.0) if layer_scale is None else layer_scale,
        "keep": keep,
        "branch_bias": options.get("branch_bias"),
    }


def _normalize(
    z: Tensor, weight: Tensor | None, bias: Tensor | None, norm: reference.Norm, eps: float, **options: Any
) -> Tensor:
    return reference.normalize(z, weight, bias, norm=norm, eps=eps, **options).contiguous()


def _fresh(out: Tensor, *inputs: Tensor | None) -> Tensor:
    """An operator returns no alias: a copy, where a conversion that changed nothing gave an input back."""
    return out.clone() if any(out is t for t in inputs) else out


for _name in SCHEMAS:
    for _op in (_name, f"{_name}_reference"):
        library.impl(_op, globals()[_name], "CompositeExplicitAutograd")
