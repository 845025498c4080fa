"""Axes of the values of a boundary of n streams, followed backward from its results to the tensors that are multiplied.

Views, broadcasts, products, sums over an axis and products of matrices determine which axis of the result each dimension of an
operand holds. So matmul, einsum and broadcast sums are one formula, whatever the order of the dimensions. A result is a sum of
terms, and a term is a number times one or two factors. So subtractions, addcmul, baddbmm and the product of one matrix with
joined tensors are the same formula too.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from addnorm.fusion.graph import TracedGraph, example_value, is_in_place, size_expr
from addnorm.stream.dataflow.arithmetic import is_view, match_factor, match_terms
from addnorm.stream.dataflow.graph import Op, Value
from addnorm.stream.layout.dimensions import Dims, Part, Roots, reshape_dims, split_views

Followed = tuple[Value, Dims]


class Term(NamedTuple):
    """Term of a sum: a number times one or two factors, perhaps summed over an axis."""

    number: float
    factors: list[Followed]


class Operand(NamedTuple):
    """Tensor that a boundary (an Add & Norm of n streams) reads, with the axis of each of its dimensions.

    Attributes:
        node: its node.
        axes: the axis that each dimension holds; None for a dimension of size 1, or of which only one index is read.
        cuts: for each dimension the first index and the number of indices that are read; None: all are read.
        number: number by which the tensor is multiplied.
    """

    node: fx.Node
    axes: tuple[int | None, ...]
    cuts: tuple[tuple[int, int] | None, ...]
    number: float = 1.0

    @property
    def held(self) -> set[int]:
        """The axes of the tensor."""
        return {axis for axis in self.axes if axis is not None}

    def rename(self, names: dict[int, int]) -> Operand:
        """Return the operand with its axes renumbered by `names`: old number -> new number."""
        return self._replace(axes=tuple(None if axis is None else names[axis] for axis in self.axes))


class Axes:
    """Axes of the tensors of one boundary, identified by numbers.

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
        """Return a new axis for each dimension of a result, and its `Dims`, where a dimension of size 1 has no axis."""
        dims, self._eps = self._roots.start(value.shape), torch.finfo(value.tensor.dtype).eps
        if value in self.traced.nodes:
            sizes = example_value(self.traced.nodes[value]).shape
            self._exprs.update({dim[0].root: size_expr(size) for dim, size in zip(dims, sizes, strict=True)})
        return [dim[0].root for dim in dims], tuple(dim if dim[0].size > 1 else () for dim in dims)

    def terms(self, value: Value, dims: Dims) -> list[Term]:
        """Return the terms whose sum is `value`, up to views.

        A sum is an add, or a product of matrices with joined tensors; any other value is one term.
        """
        value, dims, _ = self._skip(value, dims, through_numbers=False)
        op = value.op
        if op is None:
            return []
        if op.name == "addcmul":
            added, *factors = op.args[:3]
            product = Term(op.get("value", 1.0), [(arg, before_broadcast(dims, value, arg)) for arg in factors])
            return [self._term(1.0, added, value, dims), product]
        added = match_terms(op)
        if added is not None and all(term.scale is None for term in added):
            return [self._term(term.factor, term.value, value, dims) for term in added]
        return self._split(self.product(value, dims))

    def _term(self, number: float, value: Value, total: Value, dims: Dims) -> Term:
        product = self.product(value, before_broadcast(dims, total, value))
        return product._replace(number=number * product.number)

    def product(self, value: Value, dims: Dims) -> Term:
        """Return `value`, up to views, as a term: a number times one or two factors, perhaps summed over an axis."""
        whole = Term(1.0, [(value, dims)])
        value, dims, number = self._skip(value, dims, through_cuts=True)
        op = value.op
        if op is None:
            return whole
        if op.name in ("bmm", "mm"):
            return Term(number, self._contract(op.inputs, dims))
        is_sum = "sum" in op.traits and len(op.get("dim") or ()) == 1
        if is_sum:
            inner = op.inputs[0]
            at = op.get("dim")[0] % len(inner.shape)
            dims = (*dims[:at], *self._make(inner.shape[at]), *dims[at + bool(op.get("keepdim")) :])
            value, dims, within = self._skip(inner, dims)
            number *= within / (inner.shape[at] if op.name == "mean" else 1)
        factors = self._multiplied(value, dims)
        return Term(number, factors) if is_sum or len(factors) > 1 else whole

    def _make(self, size: int) -> Dims:
        return (self._roots.make(size) if size > 1 else (),)

    def _contract(self, matrices: list[Value], dims: Dims) -> list[Followed]:
        """Return the factors of a product of two matrices, with their dimensions."""
        first, second = matrices
        *batch, m, p = dims
        (q,) = self._make(first.shape[-1])
        return [(first, (*batch, m, q)), (second, (*batch, q, p))]

    def _multiplied(self, value: Value, dims: Dims) -> list[Followed]:
        op = value.op
        if op is None or op.name != "mul" or not all(isinstance(arg, Value) for arg in op.args) or is_in_place(op):
            return [(value, dims)]
        return [(arg, before_broadcast(dims, value, arg)) for arg in op.args]

    def _split(self, term: Term) -> list[Term]:
        """Return a term as one or two: as two if it sums over an axis along which one factor joins two tensors."""
        for factor, other in (term.factors, term.factors[::-1]) if len(term.factors) == 2 else ():
            value, dims, number = self._skip(*factor)
            op = value.op
            if op is None or op.name != "cat" or len(op.args[0]) != 2:
                continue
            parts, at = op.args[0], op.get("dim", 0) % len(dims)
            if any(len(part.shape) != len(dims) for part in parts):  # torch.cat takes an empty vector among matrices
                continue
            if not dims[at] or dims[at] not in other[1] or dims[at][0].root in self._exprs:
                continue
            split, start = [], 0
            for part in parts:
                size, cut = part.shape[at], self._roots.make(value.shape[at])
                (own,) = self._make(size)
                self._cuts[cut[0].root] = own[0].root if own else None, start, size
                start += size
                cuts = tuple(cut if dim == dims[at] else dim for dim in other[1])
                split.append(Term(term.number * number, [(part, (*dims[:at], own, *dims[at + 1 :])), (other[0], cuts)]))
            return split
        return [term]

    def _skip(
        self, value: Value, dims: Dims, through_cuts: bool = False, through_numbers: bool = True
    ) -> tuple[Value, Dims, float]:
        """Follow views, casts and products with a number back; return their source, its dimensions and the factor.

        A cast to fewer digits than the result has is not skipped.
        """
        number = 1.0
        while value.op is not None and value.op.inputs and not is_in_place(value.op):
            if _narrows(value.op, self._eps):
                break
            before = self._before_cut(value.op, dims) if through_cuts else None
            before = before or _before_view(value.op, dims)
            if before is None and through_numbers and (factor := _number_of(value.op)) is not None:
                before, number = dims, number * factor
            if before is None:
                break
            value, dims = value.op.inputs[0], before
        return value, dims, number

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

    def operand(self, value: Value, dims: Dims, stop: Container[Value] = (), expands: bool = False) -> Operand | None:
        """Return the earliest node whose tensor has the elements of `value`, with at most one axis in each dimension.

        Return None if there is no such node. A cast is skipped only if it is exact. Values in `stop` are not skipped, and
        expansions are skipped only with `expands`.
        """
        found = None
        while True:
            node = self.traced.nodes.get(value)
            if node is not None and isinstance(example_value(node), Tensor):
                own = self._read(node, dims)
                if own is not None and found is not None and own.held != found.held and not expands:
                    return found  # an expansion adds an axis here, as in copies of the embedding
                found = own or found
            op = value.op
            if value in stop or op is None or not op.inputs or is_in_place(op) or _narrows(op):
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
                return None  # the sizes are equal in this call only
            after, *cut = self._cuts.get(root, (root,))  # type: ignore[arg-type]  # None is no cut
            if cut and not (isinstance(size, int) and (after is None or self.is_static(after))):
                return None  # the cut may begin elsewhere in other calls
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


def _number_of(op: Op) -> float | None:
    """Return the constant by which an operator multiplies a tensor, 1 if it adds zero; None for other operators."""
    if is_view(op) and "view" not in op.traits:
        return 1.0
    product = match_factor(op) if len(op.inputs) == 1 else None
    return product.number if product is not None and product.kind == "constant" else None
