"""The proof of a row: the equation computed in float64 from what the sublayer read and returned, against what the model has."""

from __future__ import annotations

import torch
from torch import Tensor

from addnorm.stream.adds import Add, Path
from addnorm.stream.graph import Op, Value
from addnorm.stream.found import Found
from addnorm.stream.norm import Norm
from addnorm.stream.ops import TRANSPARENT, factor_of, up
from addnorm.stream.sites import Branch

__all__ = ["TOLERANCE", "closure_of", "operand", "relative", "replay", "summed", "tolerance", "total_of", "views"]

# Relative errors of a whole tensor. Eight roundings of the dtype, and what the project's own issue asks for in float32.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 8 * torch.finfo(torch.float16).eps,
    torch.bfloat16: 8 * torch.finfo(torch.bfloat16).eps,
}
SAME_SHAPE = {"_to_copy", "clone", "detach", "alias", "contiguous", "lift_fresh", "copy", "to", "_conj"}
RESHAPES = {"view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten", "view_as"}


def tolerance(*tensors: Tensor) -> float:
    """What the coarsest of their dtypes allows."""
    return max(TOLERANCE.get(t.dtype, 1e-5) for t in tensors)


def relative(found: Tensor, exact: Tensor) -> float:
    """|found - exact| / |exact|, in float64; infinite where one is not finite and the other is, or where no number is finite."""
    found, exact = found.double(), exact.double()
    if not exact.isfinite().any():
        return float("inf")
    same = (found == exact) | (found.isnan() & exact.isnan())
    off = torch.where(same, 0.0, found - exact)
    size = torch.where(exact.isfinite(), exact, 0.0).square().sum().sqrt().clamp_min(1e-30)
    value = float(off.square().sum().sqrt() / size)
    return value if value == value else float("inf")


def operand(path: Path, source: Tensor) -> Tensor:
    """What arrives at the add, from what the source holds."""
    value = source
    for op in reversed(path.ops):
        value = replay(op, value)
    for term in (*path.sums[::-1], path.term):
        value = value * term.factor
        if term.scale is not None:
            value = value * term.scale.tensor.detach().double()
    return value


def summed(add: Add, branches: list[Branch]) -> Tensor:
    """a * x + b * N_branch(raw) + ..., in float64."""
    total = operand(add.kept, add.x.tensor.detach().double())
    for branch in branches:
        raw = branch.raw.tensor.detach().double()
        if branch.norm is not None:
            raw = branch.norm(raw).reshape(branch.path.source.shape)
        total = total + operand(branch.path, raw)
    return total.reshape(add.out.shape)


def total_of(found: Found) -> float | None:
    """The relative error of x_L == x_0 + all writes; None where more than views lies between the adds."""
    if any(add.early or add.late or add.retokened for add in found.adds[1:]):
        return None
    with torch.no_grad():
        total = found.adds[0].x.tensor.detach().double()
        for k, (parts, add) in enumerate(zip(found.branches, found.adds, strict=True)):
            way = views(add.x, found.adds[k - 1].out) if k else []
            if way is None:
                return None
            for op in way:
                total = replay(op, total)
            total = operand(add.kept, total)
            for branch in parts:
                total = total + operand(branch.path, branch.path.source.tensor.detach().double())
            total = total.reshape(add.out.shape)
        return relative(found.adds[-1].out.tensor.detach(), total)


def views(value: Value, source: Value) -> list[Op] | None:
    """The views and casts that lead from a value to another of the same numbers, the first one first; None if more does."""
    found: list[Op] = []
    while value is not source:
        if value.op is None or value.op.name not in TRANSPARENT or not value.op.inputs:
            return None
        found.insert(0, value.op)
        value = value.op.inputs[0]
    return found


def closure_of(add: Add, branches: list[Branch], norm_out: Norm | None) -> float:
    """The largest relative error of the row: of the sum or of its norm, and of every norm with which a sublayer reads."""
    with torch.no_grad():
        z = summed(add, branches)
        errors = [relative(add.out.tensor.detach(), z)]
        if norm_out is not None:
            errors.append(_of_norm(norm_out))
        for branch in branches:
            errors += [_of_norm(norm) for norm in branch.reads.norms]
        return max(errors)


def _of_norm(norm: Norm) -> float:
    y = norm.y.tensor.detach()
    return relative(y, norm(norm.x.tensor.detach().double()).reshape(y.shape))


def replay(op: Op, value: Tensor) -> Tensor:
    """One operator on the way, in float64."""
    out = op.outputs[0]
    if op.name == "alias" and len(op.args) > 1 and op.outputs[0].part == "memory":  # the same bytes in another order
        stride, shape, strides = op.args[1:]
        same = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)
        return same.as_strided(shape, strides)
    if op.name in SAME_SHAPE:
        return value if value.shape == out.shape else value.reshape(out.shape)
    if op.name in RESHAPES:
        return value.reshape(out.shape)
    if op.name in TRANSPARENT:
        result: Tensor = op.func(value, *op.args[1:], **op.kwargs)
        return result
    if up(out) is not out:  # x + 0
        return value
    passed = factor_of(op)
    assert passed is not None
    source, factor = passed
    if factor.kind == "guard":
        args = [value if a is source else getattr(a, "tensor", a) for a in op.args]
        kwargs = {k: value if a is source else getattr(a, "tensor", a) for k, a in op.kwargs.items()}
        args = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        guarded: Tensor = _functional(op, args, kwargs)
        return guarded
    if factor.value is not None:
        return value * factor.value.tensor.detach().double()
    if factor.kind == "constant":
        return value * factor.number
    if len(op.outputs) > 1:  # native_dropout
        mask = op.outputs[1].tensor.double()
        p = float(op.args[1])
        return value * mask / (1.0 - p) if p < 1.0 else value * 0.0
    return value


def _functional(op: Op, args: list[object], kwargs: dict[str, object]) -> Tensor:
    """The operator itself, never its form in place."""
    value: Tensor
    if op.func._schema.is_mutable:
        first, *rest = args
        assert isinstance(first, Tensor)
        value = op.func(first.clone(), *rest, **kwargs)
    else:
        value = op.func(*args, **kwargs)
    return value
