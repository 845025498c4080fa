"""Views of a value: where their axes are in it; and the replay of views, casts and factors for other numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from addnorm.stream.dataflow.graph import Op, Value
from addnorm.stream.find.operators import SAME_SHAPE, TRANSPARENT, match_factor, strip_views

__all__ = ["covers_features", "find_axis", "find_views", "replay_op"]

RESHAPES = {"view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten", "view_as"}


def find_axis(value: Value, source: Value, axis: int) -> int | None:
    """Return the axis of the source that is an axis of its view; None if it is a part of one, or several."""
    while value is not source:
        op = value.op
        if op is None or not op.inputs or strip_views(value) is value:
            return None
        shape, rank = op.inputs[0].shape, len(value.shape)
        if op.name in ("transpose", "swapaxes", "t", "numpy_T"):
            first, second = (d % rank for d in (op.args[1:3] if len(op.args) > 2 else (0, 1)))
            axis = {first: second, second: first}.get(axis, axis)
        elif op.name == "permute":
            axis = op.args[1][axis] % rank
        elif op.name == "alias" and len(op.args) > 1:  # the same memory with permuted dimensions
            stride, _, strides = op.args[1:]
            axis = stride.index(strides[axis]) if strides[axis] in stride else -1
        elif op.name == "expand":
            axis -= rank - len(shape)
        elif shape != value.shape:
            size, after = value.shape[axis], math.prod(value.shape[axis + 1 :])
            same = [k for k, n in enumerate(shape) if n == size and math.prod(shape[k + 1 :]) == after]
            if not same:
                return None
            axis = same[0]
        value = op.inputs[0]
    return axis if axis >= 0 else None


def find_views(value: Value, source: Value) -> list[Op] | None:
    """Return the views and casts from `source` to `value`, the first one first; None if there are other operators."""
    ops: list[Op] = []
    while value is not source:
        if value.op is None or value.op.name not in TRANSPARENT or not value.op.inputs:
            return None
        ops.insert(0, value.op)
        value = value.op.inputs[0]
    return ops


def covers_features(value: Value) -> bool:
    """Return whether the last axis of a view is a whole axis of its source: all features of a token, not those of one head."""
    source = strip_views(value)
    if find_axis(value, source, len(value.shape) - 1) is not None:
        return True
    views = find_views(value, source)
    if views and len(source.shape) == 2 and views[0].outputs[0].shape[-1:] == source.shape[-1:]:
        source, views = views[0].outputs[0], views[1:]  # a product, whose rows are several dimensions
    if not views or not value.tensor.numel():
        return False
    labels = torch.arange(source.tensor.numel()).reshape(source.shape)
    for op in views:
        labels = replay_op(op, labels)
    row = labels.reshape(-1, value.shape[-1])[0]
    indices = [index.unique() for index in torch.unravel_index(row, source.shape)]
    varying = [k for k, index in enumerate(indices) if len(index) > 1]
    return (
        len(row.unique()) == len(row) and len(varying) <= 1 and all(len(indices[k]) == source.shape[k] for k in varying)
    )


def replay_op(op: Op, value: Tensor) -> Tensor:
    """Return the output of a view, cast or factor for another input (float64 numbers, or labels)."""
    out = op.outputs[0]
    if (
        op.name == "alias" and len(op.args) > 1 and op.outputs[0].part == "memory"
    ):  # the same memory with permuted dimensions
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
    if strip_views(out) is not out:  # x + 0
        return value
    passed = match_factor(op)
    assert passed is not None
    source, factor = passed
    if factor.kind == "guard":
        args = [value if a is source else getattr(a, "tensor", a) for a in op.args]
        kwargs = {k: value if a is source else getattr(a, "tensor", a) for k, a in op.kwargs.items()}
        args = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        guarded: Tensor = _run_functional(op, args, kwargs)
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


def _run_functional(op: Op, args: list[object], kwargs: dict[str, object]) -> Tensor:
    """Run an operator out-of-place."""
    func: Any = op.func  # an OpOverload
    if func._schema.is_mutable:
        assert isinstance(args[0], Tensor)
        args = [args[0].clone(), *args[1:]]
    out: Tensor = func(*args, **kwargs)
    return out
