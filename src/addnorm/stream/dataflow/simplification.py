"""Removal of values that are equal to earlier ones, from a captured run: its graph then shows what is computed, and nothing else.

    cat(x[:, :2], x[:, 2:])      is x             cat(a, b)[:, :n]    is a, which has n tokens
    cat(a, b), cat(a, b)         are one value    stack(a, b)[0]      is a

So streams that a model cuts and joins in each layer (reversible layers, memories, two halves of the features) have the same graph
as those of a model that does not. Each number gets a label, and cuts and joins are run again on the labels: values of one shape
and dtype with the same labels are equal.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from addnorm.stream.dataflow.graph import DATA, Flow, Value
from addnorm.stream.dataflow.replay import run_op


def simplify(flow: Flow) -> None:
    """Remove unused copies and values that are equal to earlier ones from a run."""
    _remove_saved_copies(flow)
    _remove_redundant_moves(flow)


def _remove_saved_copies(flow: Flow) -> None:
    """Remove unused `detach` operators from `Value.users`. Autograd runs them when it saves values for the backward."""
    returned = flow.list_results()
    for op in flow.ops:
        if op.name == "detach" and not any(out.users or out in returned for out in op.outputs):
            for value in op.inputs:
                value.users = [user for user in value.users if user is not op]


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
        if "exact" not in op.traits or not op.outputs[0].kind & DATA:
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
    for op in dict.fromkeys(users):
        op.inputs = [equal if v is value else v for v in op.inputs]
        op.args, op.kwargs = pytree.tree_map_only(Value, lambda v: equal if v is value else v, (op.args, op.kwargs))
    equal.users += users


def _strip_copies(value: Value) -> Value:
    while value.op is not None and "copy" in value.op.traits and len(value.op.args) == 1 and value.op.name != "_conj":
        before = value.op.inputs[0]
        if before.shape != value.shape or before.tensor.dtype != value.tensor.dtype:
            break
        value = before
    return value
