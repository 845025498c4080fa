"""Operators of a run, computed again on other inputs: numbers, or labels that show where each element goes.

`simplify` removes values that are equal to earlier ones, so that the graph shows what is computed, and nothing else.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from addnorm.stream.dataflow.arithmetic import has_numbers, is_view, match_factor
from addnorm.stream.dataflow.graph import Flow, Op, Value, walk

FILLS = ("self", "other", "value")  # arguments that, as numbers, fill elements of the output


def replay_op(op: Op, value: Tensor) -> Tensor:
    """Apply a captured view, cast or factor to another input: float64 numbers, or labels that show where elements move."""
    out = op.out
    if op.name == "alias" and len(op.args) > 1 and out.part == "memory":  # the same memory with permuted dimensions
        stride, shape, strides = op.args[1:]
        same = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)
        return same.as_strided(shape, strides)
    if "copy" in op.traits or "reshape" in op.traits:
        return value if value.shape == out.shape else value.reshape(out.shape)
    if "view" in op.traits:
        result: Tensor = op.func(value, *op.args[1:], **op.kwargs)
        return result
    if is_view(op):  # x + 0
        return value
    factor = match_factor(op)
    assert factor is not None
    if factor.kind == "guard":
        others = {v: v.tensor.double() if v.tensor.is_floating_point() else v.tensor for v in op.inputs}
        return run_op(op, {**others, factor.x: value})[0]
    return value * (factor.number if factor.value is None else factor.value.exact)


def run_op(op: Op, values: Mapping[Value, Tensor], fill: float | None = None) -> list[Tensor]:
    """Return the outputs of an operator for other inputs, computed out-of-place, and in float64 where it sets a dtype.

    Args:
        op: the operator.
        values: tensors for its inputs. An input that the operator overwrites without a read, as `copy` does, may be missing.
        fill: replaces the numbers with which the operator fills elements; None keeps those numbers.

    Raises:
        Exception: the operator cannot be computed again with these inputs.
    """
    if op.name == "write_into":
        return [_write(op, values)]
    if "view" in op.traits:
        if not op.out.tensor.is_floating_point():
            raise NotImplementedError  # a cast that loses numbers
        return [replay_op(op, values[op.inputs[0]])]

    def get(value: Value) -> Tensor:
        return values[value].clone() if value in values else torch.empty(value.shape, dtype=torch.float64)

    args, kwargs = pytree.tree_map_only(Value, get, (op.args, op.kwargs))
    kwargs = {
        name: torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value
        for name, value in kwargs.items() if name != "device"
    }  # fmt: skip
    if fill is not None:
        names = [argument.name for argument in op.func._schema.arguments]  # type: ignore[attr-defined]  # of an OpOverload
        args = [
            fill if name in FILLS and isinstance(a, int | float) else a for name, a in zip(names, args, strict=False)
        ]
    out: Any = op.func(*args, **kwargs)
    return [*out] if isinstance(out, tuple | list) else [out]


def move_labels(op: Op, labels: Mapping[Value, Tensor]) -> list[Tensor]:
    """Return the labels of the outputs of a view, cut or join; elements of inputs without labels get label 0.

    Raises:
        Exception: the operator cannot be computed again.
    """
    values = {value: labels[value] if value in labels else _fill_zeros(value) for value in op.inputs}
    return [replay_op(op, values[op.inputs[0]])] if is_view(op) else run_op(op, values, fill=0.0)


def _fill_zeros(value: Value) -> Tensor:
    """Return zeros of the shape of a real or complex value; for an index or a mask, return the tensor itself."""
    return torch.zeros(value.shape, dtype=torch.float64) if has_numbers(value) else value.tensor.detach().cpu()


def _write(op: Op, values: Mapping[Value, Tensor]) -> Tensor:
    """Return the labels or numbers of a tensor after writes to parts of its memory (`Memory`)."""
    size = op.inputs[0].tensor.element_size()
    places = [(shape, stride, start // size) for start, (shape, stride) in op.args[-1]]
    ends = [start + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) for shape, stride, start in places]
    memory = torch.zeros(max(ends) + 1, dtype=torch.float64)
    for value, (shape, stride, start) in zip(op.inputs, places, strict=False):
        memory.as_strided(shape, stride, start).copy_(values[value].reshape(shape))
    return memory.as_strided(*places[-1])


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Return |actual - exact| / |exact| in float64.

    The error is infinite if an element is finite in only one of the tensors, or if no element is finite.
    """
    actual, exact = actual.double(), exact.double()
    if not exact.isfinite().any():
        return float("inf")
    same = (actual == exact) | (actual.isnan() & exact.isnan())
    difference = torch.where(same, 0.0, actual - exact)
    size = torch.where(exact.isfinite(), exact, 0.0).square().sum().sqrt().clamp_min(1e-30)
    value = float(difference.square().sum().sqrt() / size)
    return value if value == value else float("inf")


def recompute(target: Value, known: Mapping[Value, Tensor]) -> Tensor:
    """Return a value of the run, computed again in the run's own dtypes from other contents of some earlier values.

    Args:
        target: the value.
        known: the other contents. Values that depend on none of these keep their contents.

    Raises:
        Exception: an operator cannot be computed again.
    """

    def follow(value: Value) -> list[Value]:
        return [] if value in known else value.inputs

    values = dict(known)
    ops = {value.op for value in walk([target], follow) if value.op is not None and value not in known}
    for op in sorted(ops, key=lambda op: op.index):
        if not values.keys().isdisjoint(op.inputs):
            for value, tensor in zip(op.outputs, _repeat(op, values), strict=False):
                values.setdefault(value, tensor.to(value.tensor.dtype))
    return values.get(target, target.tensor)


def _repeat(op: Op, values: Mapping[Value, Tensor]) -> list[Tensor]:
    """Return the outputs of an operator for other inputs. An operator in place writes to copies."""
    is_step = op.origin != op.name  # of a fused operator, which rounds once
    writes = "running" in op.traits or getattr(getattr(op.func, "_schema", None), "is_mutable", False)

    def get(value: Value) -> Tensor:
        tensor = values.get(value, value.tensor).detach()
        return tensor.double() if is_step and tensor.is_floating_point() else tensor.clone() if writes else tensor

    out = op.out
    if op.name == "write_into":
        return [_write(op, {value: get(value) for value in op.inputs})]
    if out.part == "memory" or "reshape" in op.traits:
        return [replay_op(op, get(op.inputs[0]))]
    args, kwargs = pytree.tree_map_only(Value, get, (op.args, op.kwargs))
    result: Any = op.func(*args, **kwargs)
    return [*result] if isinstance(result, tuple | list) else [result]


# Removal of equal values.


def simplify(flow: Flow) -> None:
    """Remove unused copies and values that are equal to earlier ones from a run.

        cat(x[:, :2], x[:, 2:])      is x             cat(a, b)[:, :n]    is a, which has n tokens
        cat(a, b), cat(a, b)         are one value    stack(a, b)[0]      is a

    So streams that a model cuts and joins in each layer (reversible layers, memories, two halves of the features) have the same
    graph as those of a model that does not. Each number gets a label, and cuts and joins are run again on the labels: values of
    one shape and dtype with the same labels are equal.
    """
    _remove_saved_copies(flow)
    _remove_redundant_moves(flow)


def _remove_saved_copies(flow: Flow) -> None:
    """Remove unused `detach` operators from `Value.users`. Autograd runs them when it saves values for the backward."""
    returned = flow.list_results()
    for op in flow.ops:
        if op.name == "detach" and not any(out.users or out in returned for out in op.outputs):
            for value in op.inputs:
                value.users.remove(op)


def _remove_redundant_moves(flow: Flow) -> None:
    """Replace values that are equal to earlier ones by construction, in all operators and in the result."""
    labels: dict[Value, Tensor] = {}
    alike: dict[Hashable, list[Value]] = {}
    same: dict[Value, Value] = {}
    count = 0

    def find_first(value: Value, own: Tensor) -> Value:
        labels[value] = own
        others = alike.setdefault((value.shape, value.tensor.dtype, int(own.min()), int(own.max())), [])
        others.append(value)
        return next(other for other in others if torch.equal(labels[other], own))

    for op in flow.ops:
        if "exact" not in op.traits or not op.out.has_data:
            continue
        sources = {value: _strip_copies(value) for value in op.inputs}
        for source in sources.values():
            if source not in labels and (size := source.tensor.numel()):
                find_first(source, torch.arange(count, count + size, dtype=torch.float64).reshape(source.shape))
                count += size
        if not labels.keys() >= {*sources.values()}:
            continue
        moved = run_op(op, {value: labels[source] for value, source in sources.items()})
        for value, own in zip(op.outputs, moved, strict=True):
            if own.numel() and (equal := find_first(value, own)) is not value:
                same[value] = equal
                _replace(value, equal)
    if same:
        flow.result = pytree.tree_map_only(Value, lambda value: same.get(value, value), flow.result)


def _replace(value: Value, equal: Value) -> None:
    """Replace `value` by `equal` in all operators that read the value."""
    users, value.users = value.users, []
    for op in users:
        op.inputs = [equal if v is value else v for v in op.inputs]
        op.args, op.kwargs = pytree.tree_map_only(Value, lambda v: equal if v is value else v, (op.args, op.kwargs))
    equal.users = [*dict.fromkeys([*equal.users, *users])]


def _strip_copies(value: Value) -> Value:
    while value.op is not None and "copy" in value.op.traits and len(value.op.args) == 1 and value.op.name != "_conj":
        before = value.op.inputs[0]
        if before.shape != value.shape or before.tensor.dtype != value.tensor.dtype:
            break
        value = before
    return value
