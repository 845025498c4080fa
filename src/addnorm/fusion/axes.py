"""Axes of the values of a boundary of n streams, followed backward from its results to the tensors that are multiplied.

A view, a broadcast, a product, a sum over an axis and a product of matrices state which axis of the result each dimension of an
operand holds. So matmul, einsum and broadcast sums are one formula, whatever the order of the dimensions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from addnorm.fusion.graph import TracedGraph, example_value, size_expr
from addnorm.stream.dataflow.graph import Op, Value
from addnorm.stream.layout.dimensions import Dims, Part, Roots, reshape_dims, split_views

Followed = tuple[Value, Dims]


class Operand(NamedTuple):
    """Tensor that a boundary reads.

    Attributes:
        node: its node.
        axes: the axis that each dimension holds; None for a dimension of size 1, or of which one place is read.
        cuts: for each dimension the first place and the number of places that are read; None for all.
    """

    node: fx.Node
    axes: tuple[int | None, ...]
    cuts: tuple[tuple[int, int] | None, ...]

    @property
    def held(self) -> set[int]:
        """The axes of the tensor."""
        return {axis for axis in self.axes if axis is not None}

    def rename(self, names: dict[int, int]) -> Operand:
        """Return the operand with other numbers of its axes."""
        return self._replace(axes=tuple(None if axis is None else names[axis] for axis in self.axes))


class Axes:
    """The axes of one boundary, by number.

    Attributes:
        sizes: the size of each axis.
    """

    def __init__(self, traced: TracedGraph) -> None:
        self.traced, self._roots = traced, Roots()
        self.sizes = self._roots.sizes
        self._cuts: dict[int, tuple[int | None, int, int]] = {}  # axis before a cut: the axis after it, start, length
        self._exprs: dict[int, Any] = {}
        self._eps = 0.0  # of the result's dtype

    def start(self, value: Value) -> tuple[list[int], Dims]:
        """Return a new axis for each dimension of a result, and its dimensions; those of size 1 are empty."""
        dims, self._eps = self._roots.start(value.shape), torch.finfo(value.tensor.dtype).eps
        if value in self.traced.nodes:
            sizes = example_value(self.traced.nodes[value]).shape
            self._exprs.update({dim[0].root: size_expr(size) for dim, size in zip(dims, sizes, strict=True)})
        return [dim[0].root for dim in dims], tuple(dim if dim[0].size > 1 else () for dim in dims)

    def factors(self, value: Value, dims: Dims) -> tuple[list[Followed], bool]:
        """Return the one or two values of whose product, perhaps summed over an axis, `value` is a view; whether it is a mean."""
        whole = [(value, dims)]
        value, dims = self._skip_views(value, dims, through_cuts=True)
        op, is_mean = value.op, False
        if op is None:
            return whole, False
        if op.name in ("bmm", "mm"):
            *batch, m, p = dims
            (q,) = self._make(op.inputs[0].shape[-1])
            return [(op.inputs[0], (*batch, m, q)), (op.inputs[1], (*batch, q, p))], False
        is_sum = "sum" in op.traits and len(op.get("dim") or ()) == 1
        if is_sum:
            inner = op.inputs[0]
            at, is_mean = op.get("dim")[0] % len(inner.shape), op.name == "mean"
            dims = (*dims[:at], *self._make(inner.shape[at]), *dims[at + bool(op.get("keepdim")) :])
            value, dims = self._skip_views(inner, dims)
        factors = self._multiplied(value, dims)
        return (factors if is_sum or len(factors) > 1 else whole), is_mean

    def _make(self, size: int) -> Dims:
        return (self._roots.make(size) if size > 1 else (),)

    def _multiplied(self, value: Value, dims: Dims) -> list[Followed]:
        op = value.op
        if op is None or op.name != "mul" or not all(isinstance(arg, Value) for arg in op.args) or _writes(op):
            return [(value, dims)]
        return [(arg, before_broadcast(dims, value, arg)) for arg in op.args]

    def _skip_views(self, value: Value, dims: Dims, through_cuts: bool = False) -> Followed:
        """Return what a value is a view or a cast of. A cast to fewer digits than the result has is not skipped."""
        while value.op is not None and value.op.inputs and not _writes(value.op):
            if _narrows(value.op, self._eps):
                break
            before = self._before_cut(value.op, dims) if through_cuts else None
            before = before or _before_view(value.op, dims)
            if before is None:
                break
            value, dims = value.op.inputs[0], before
        return value, dims

    def _before_cut(self, op: Op, dims: Dims) -> Dims | None:
        """Return the dimensions of the input of a slice or a selection along one dimension."""
        if op.name not in ("slice", "select"):
            return None
        old = op.inputs[0].shape
        at = op.get("dim", 0) % len(old)
        start, length = op.get("index", 0) if op.name == "select" else op.get("start") or 0, 1
        if op.name == "slice":
            length = op.outputs[0].shape[at]
            if op.get("step", 1) != 1 or len(dims[at]) > 1 or length == old[at]:
                return dims if length == old[at] else None
        root = self._roots.make(old[at])
        after = dims[at][0].root if op.name == "slice" and dims[at] else None
        self._cuts[root[0].root] = after, max(start + (start < 0) * old[at], 0), length
        return (*dims[:at], root, *dims[at + (op.name == "slice") :])

    def operand(self, value: Value, dims: Dims, stop: set[Value]) -> Operand | None:
        """Return the earliest node whose tensor has the value's numbers, one axis in a dimension; None if there is none.

        A cast is skipped only if it is exact. Values in `stop` are not skipped.
        """
        found = None
        while True:
            node = self.traced.nodes.get(value)
            if node is not None and isinstance(example_value(node), Tensor):
                own = self._read(node, dims)
                if own is not None and found is not None and own.held != found.held:
                    return found  # an axis arises here, as in copies of the embedding
                found = own or found
            op = value.op
            if value in stop or op is None or not op.inputs or _writes(op) or _narrows(op):
                return found
            before = _before_view(op, dims)
            if before is None:
                return found
            value, dims = op.inputs[0], before

    def _read(self, node: fx.Node, dims: Dims) -> Operand | None:
        axes: list[int | None] = []
        cuts: list[tuple[int, int] | None] = []
        for size, dim in zip(example_value(node).shape, dims, strict=True):
            if len(dim) > 1 or (dim and dim[0] != Part(dim[0].root, 1, self.sizes[dim[0].root])):
                return None
            root = dim[0].root if dim else None
            if root is not None and self._exprs.setdefault(root, size_expr(size)) != size_expr(size):
                return None  # equal in this call only
            after, *cut = self._cuts.get(root, (root,))  # type: ignore[arg-type]  # None is no cut
            if cut and not (isinstance(size, int) and (after is None or self.is_static(after))):
                return None  # its place is that of this call only
            axes.append(after)
            cuts.append((cut[0], cut[1]) if cut else None)
        return Operand(node, tuple(axes), tuple(cuts))

    def is_static(self, axis: int) -> bool:
        """Return whether the size of an axis is the same in all calls of the graph."""
        return getattr(self._exprs.get(axis, 0), "is_number", True) is not False


def before_broadcast(dims: Dims, result: Value, operand: Value) -> Dims:
    """Return the dimensions of an operand that is broadcast to a result."""
    first = len(result.shape) - len(operand.shape)
    return tuple(dims[first + k] if size == result.shape[first + k] else () for k, size in enumerate(operand.shape))


def _before_view(op: Op, dims: Dims) -> Dims | None:
    """Return the dimensions of the input of a view or a cast; None for other operators."""
    if "view" not in op.traits or op.name == "detach":
        return None
    old = op.inputs[0].shape
    if "reshape" in op.traits and old != op.outputs[0].shape:
        return reshape_dims(dims, old)
    after = split_views(op, tuple((Part(-1 - k, 1, size),) for k, size in enumerate(old)), Roots())
    places = {dim[0].root: k for k, dim in enumerate(after or ()) if dim}
    return None if after is None else tuple(dims[places[-1 - k]] if -1 - k in places else () for k in range(len(old)))


def _narrows(op: Op, eps: float = 0.0) -> bool:
    """Return whether an operator casts to fewer digits than those of `eps`, or from integers, or moves to another device."""
    x, out = op.inputs[0].tensor, op.outputs[0].tensor
    if not (x.is_floating_point() and out.is_floating_point()) or x.device != out.device:
        return True
    return torch.promote_types(x.dtype, out.dtype) != out.dtype and torch.finfo(out.dtype).eps > eps


def _writes(op: Op) -> bool:
    """Return whether an operator writes in place."""
    schema = getattr(op.func, "_schema", None)
    return schema is not None and schema.is_mutable
