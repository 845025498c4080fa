"""Operators on the way of a value computed again: on float64 numbers, or on labels, to see where each number went."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from addnorm.stream.dataflow.graph import Op, Value
from addnorm.stream.find.ops import TRANSPARENT, axis_of, factor_of, up

__all__ = ["replay", "views", "whole"]

SAME_SHAPE = {"_to_copy", "clone", "detach", "alias", "contiguous", "lift_fresh", "copy", "to", "_conj"}
RESHAPES = {"view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten", "view_as"}


def views(value: Value, source: Value) -> list[Op] | None:
    """The views and casts that lead from a value to another of the same numbers, the first one first; None if more does."""
    found: list[Op] = []
    while value is not source:
        if value.op is None or value.op.name not in TRANSPARENT or not value.op.inputs:
            return None
        found.insert(0, value.op)
        value = value.op.inputs[0]
    return found


def whole(value: Value) -> bool:
    """Whether the last axis of a view is a whole axis of its source: all features of a token, not those of a head."""
    source = up(value)
    if axis_of(value, source, len(value.shape) - 1) is not None:
        return True
    way = views(value, source)
    if not way or not value.tensor.numel():
        return False
    labels = torch.arange(source.tensor.numel()).reshape(source.shape)
    for op in way:
        labels = replay(op, labels)
    row = labels.reshape(-1, value.shape[-1])[0]
    places = [at.unique() for at in torch.unravel_index(row, source.shape)]
    moved = [k for k, at in enumerate(places) if len(at) > 1]
    return len(row.unique()) == len(row) and len(moved) <= 1 and all(len(places[k]) == source.shape[k] for k in moved)


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
    schema: Any = op.func  # an OpOverload
    if schema._schema.is_mutable:
        first, *rest = args
        assert isinstance(first, Tensor)
        value = op.func(first.clone(), *rest, **kwargs)
    else:
        value = op.func(*args, **kwargs)
    return value
