"""Dimensions of a stream, followed through views: which dimension of a value holds which part of which dimension of the stream.

A dimension of a value is a tuple of parts, the slowest first. A part is (root, stride, size): the root is the number of an axis
of the stream, and the part has `size` places of this axis, `stride` apart. So a value of shape (batch * tokens, d) has the
dimensions ((0, 1, batch), (1, 1, tokens)), ((2, 1, d),). A view of axis 1 with 56 places as (8, 7) has the dimensions
((1, 7, 8),), ((1, 1, 7),).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import NamedTuple

from torch import Tensor

from addnorm.stream.dataflow.arithmetic import list_carried, match_terms, strip_views
from addnorm.stream.dataflow.graph import Op, Value, walk

ANONYMOUS = -1  # root of a dimension that belongs to no axis of the stream
MATRIX_PRODUCTS = ("mm", "bmm", "mv")


class Part(NamedTuple):
    """Part of an axis of the stream: `size` places of axis `root`, `stride` apart."""

    root: int
    stride: int
    size: int


Dim = tuple[Part, ...]
Dims = tuple[Dim, ...]
Layout = tuple[list[int], list[int]]  # the sizes to which a tensor is reshaped, and the permutation that follows


class Roots:
    """Numbered axes of a stream: the dimensions of its first state, and the axes that cuts, joins and broadcasts create later.

    Attributes:
        sizes: the size of each axis.
        sources: for each axis the axes from which it was made.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self.sizes: dict[int, int] = {}
        self.sources: dict[int, tuple[int, ...]] = {}

    def make(self, size: int, sources: Iterable[int] = ()) -> Dim:
        """Return a dimension that is a new axis of the stream, made from the axes `sources`."""
        root = next(self._numbers)
        self.sizes[root], self.sources[root] = size, tuple(dict.fromkeys(sources))
        return (Part(root, 1, size),)

    def start(self, shape: Iterable[int]) -> Dims:
        """Return the dimensions of the first value of a stream: each is a new axis of the stream."""
        return tuple(self.make(size) for size in shape)

    def find_origins(self, root: int) -> set[int]:
        """Return axis `root` and all axes from which it was made, directly or not."""
        return {*walk([root], self.sources.__getitem__)}


# Views.


def split_views(op: Op, dims: Dims, roots: Roots) -> Dims | None:
    """Derive the dimensions of the output of a view, copy or cast from `dims`, those of its input; None if not possible."""
    old, new = op.inputs[0].shape, op.out.shape
    rank = len(old)
    if "swap" in op.traits and rank == len(new):
        first, second = (d % rank for d in (op.args[1:3] if len(op.args) > 2 else (0, 1))) if rank > 1 else (0, 0)
        swapped = [*dims]
        swapped[first], swapped[second] = dims[second], dims[first]
        return tuple(swapped)
    if op.name == "permute":
        return tuple(dims[k % rank] for k in op.args[1])
    if op.name == "alias" and len(op.args) > 1:  # the same memory with permuted dimensions
        stride, _, strides = op.args[1:]
        if len({*stride}) < rank or sorted(stride) != sorted(strides):
            return None
        return tuple(dims[stride.index(step)] for step in strides)
    if op.name == "unsqueeze":
        at = op.args[1] % len(new)
        return (*dims[:at], (), *dims[at:])
    if op.name == "squeeze":
        chosen = list_dims(op, rank) or range(rank)
        return tuple(dim for k, dim in enumerate(dims) if k not in chosen or old[k] != 1)
    if old == new:
        return dims
    return broadcast(dims, old, new, roots) if "expand" in op.traits else reshape_dims(dims, new)


def list_dims(op: Op, rank: int) -> list[int]:
    """Return the argument `dim` of an operator as a list, counted from the front; an empty list if there is no such argument."""
    dims = op.get("dim")
    return [d % rank for d in (dims if isinstance(dims, list | tuple) else [dims]) if isinstance(d, int) and rank]


def broadcast(dims: Dims, old: tuple[int, ...], new: tuple[int, ...], roots: Roots) -> Dims:
    """Return the dimensions of an expanded value: each expanded dimension is a new axis of the stream."""
    before = len(new) - len(old)
    return tuple(
        dims[k - before] if k >= before and old[k - before] == size else roots.make(size) if size != 1 else ()
        for k, size in enumerate(new)
    )


def reshape_dims(dims: Dims, shape: tuple[int, ...]) -> Dims | None:
    """Return the dimensions after a reshape to `shape`, which keeps the order of elements; None if they do not fit."""
    if 0 in shape:
        return None
    rest = [part for dim in dims for part in dim][::-1]
    new: list[list[Part]] = []
    for k, size in enumerate(shape):
        parts: list[Part] = []
        missing = size
        while missing > 1:
            if not rest:
                return None
            part = rest.pop()
            inner = part.size // missing
            if missing % part.size == 0:
                parts.append(part)
                missing //= part.size
            elif part.size % missing == 0:
                parts.append(Part(part.root, part.stride * inner, missing))
                rest.append(Part(part.root, part.stride, inner))
                missing = 1
            else:
                return None
        follows_one = k + 1 < len(shape) and shape[k + 1] == 1
        # A part of size one is added to the dimension before it.
        while rest and rest[-1].size == 1 and not (parts and follows_one):
            parts.append(rest.pop())
        new.append(parts)
    return None if rest else tuple(map(tuple, new))


def _follow_views(value: Value, source: Value) -> Dims | None:
    """Return the dimensions of `value`, a view of `source`, as parts of the axes of `source`; None if they are not known."""
    roots = Roots()
    return trace(value, {source: roots.start(source.shape)}, roots)


def find_axis(value: Value, source: Value, axis: int) -> int | None:
    """Return the axis of `source` that is dimension `axis` of its view `value`; None if it is not one whole axis."""
    dims = _follow_views(value, source)
    dim = () if dims is None else dims[axis]
    parts = [part for part in dim if part.size > 1] or dim[:1]
    root = parts[0].root if len(parts) == 1 else len(source.shape)
    return root if root < len(source.shape) and source.shape[root] == parts[0].size else None


def covers_features(value: Value, joined: bool = False) -> bool:
    """Return whether the last axis of a view is a whole axis of its source: all features of a token, not those of one head.

    With `joined`, several whole axes are features too, as in a stream `(batch, tokens, heads, features)`.
    """
    source = strip_views(value)
    first = value  # view of the source
    while first is not source and first.inputs[0] is not source:
        first = first.inputs[0]
    if len(source.shape) == 2 and first.shape[-1:] == source.shape[-1:]:
        source = first  # a matrix product, viewed with several dimensions in place of its rows
    return any(_is_whole(dims, shape, joined) for dims, shape, _ in _list_starts(value, source))


def _list_starts(value: Value, source: Value) -> Iterator[tuple[Dims | None, tuple[int, ...], Roots]]:
    """Yield the dimensions of `value`, a view of `source`, as parts of the axes of `source` and of other values.

    If `source` is a matrix product, the other values are its factors: a product of several streams may have all their tokens and
    features in one dimension, which only the view separates. A factor may itself be a view of a product. Each item also has the
    shape of the value to whose axes the parts belong, and the numbers of these axes.
    """
    roots = Roots()
    dims = trace(value, {source: roots.start(source.shape)}, roots)
    yield dims, source.shape, roots
    is_part = dims is not None and len({part.root for part in dims[-1] if part.size > 1}) == 1
    if not is_part or source.op is None or source.op.name not in MATRIX_PRODUCTS:
        return
    for k, operand in enumerate(source.op.args[:2]):
        for own, shape, roots in _list_starts(operand, strip_views(operand)) if operand.has_data else ():
            if own is not None and len(own) > 1:
                new = roots.make(source.shape[-1 - k]) if source.op.name != "mv" else ()
                kept = (*own[:-2], new, own[-1]) if k else (*own[:-1], new)[: len(source.shape)]
                yield trace(value, {source: kept}, roots), shape, roots


def _is_whole(dims: Dims | None, shape: tuple[int, ...], joined: bool) -> bool:
    """Return whether the last dimension is a whole axis of a value of this shape, or with `joined` several of them."""
    roots = {part.root for part in dims[-1] if part.size > 1} if dims else set()
    sizes = [shape[root] for root in roots if root < len(shape)]
    size = math.prod(part.size for part in dims[-1]) if dims and roots else 1
    return dims is not None and len(sizes) == len(roots) and math.prod(sizes) == size and (joined or len(roots) < 2)


# Dimensions of values that are computed from others.


def resize(dims: Dims, at: int, size: int, roots: Roots, others: Iterable[Dim] = ()) -> Dims:
    """Return `dims` with a new axis of this size in place of dimension `at`, which was cut, or joined with `others`."""
    sources = {dim[0].root for dim in (dims[at], *others) if len(dim) == 1} - {ANONYMOUS}
    return (*dims[:at], roots.make(size, sorted(sources)) if sources else (Part(ANONYMOUS, 1, size),), *dims[at + 1 :])


def trace(value: Value, known: dict[Value, Dims], roots: Roots) -> Dims | None:
    """Return the dimensions of a value that is computed from a known one by views, factors, norms, sums, cuts and joins.

    Args:
        value: the value.
        known: values with their dimensions. Values on the way are added.
        roots: the numbered axes of the stream.
    """
    pending: list[tuple[Value, Value]] = []  # values with the values from which their dimensions follow
    chosen: dict[Value, Value | None] = {}
    first = min((other.index for other in known), default=0)
    current = value
    while current not in known:
        source = _find_source(current, known, first, chosen)
        if source is None:
            return None
        pending.append((current, source))
        current = source
    for later, source in reversed(pending):
        dims = _step(later, source, known[source], roots)
        if dims is None:
            return None
        known[later] = dims
    return known[value]


def _find_source(
    value: Value, known: Mapping[Value, Dims], first: int, chosen: dict[Value, Value | None]
) -> Value | None:
    """Return the input from which the dimensions of `value` follow and that leads to a value in `known`, or None.

    `chosen` has the results for values with several inputs, so that each is found once.
    """
    op = value.op
    if op is None or not op.inputs or value.index < first:
        return None
    if value.norm is not None:
        x: Value = value.norm.x
        return x
    sources = list_carried(value)
    terms = None if sources else match_terms(op)
    if terms is not None:
        sources = [term.value for term in terms if term.value.shape == value.shape]
    elif "join" in op.traits:
        sources = [v for v in sources if len(v.shape) == len(value.shape)]
    elif not sources and len(op.inputs) == 1 and op.inputs[0].shape == value.shape:  # x + 0, a guard
        sources = op.inputs
    if len(sources) < 2:
        return sources[0] if sources else None
    if value not in chosen:
        reaching = (v for v in sources if _reaches(v, known, first, chosen))
        chosen[value] = next((v for v in sources if v in known), None) or next(reaching, None)
    return chosen[value]


def _reaches(value: Value, known: Mapping[Value, Dims], first: int, chosen: dict[Value, Value | None]) -> bool:
    """Return whether `value` is computed from a value in `known` by views, factors, norms and sums."""
    for _ in range(64):
        if value in known:
            return True
        source = _find_source(value, known, first, chosen)
        if source is None:
            return False
        value = source
    return False


def _step(value: Value, source: Value, dims: Dims, roots: Roots) -> Dims | None:
    """Derive the dimensions of `value` from `dims`, those of its input `source`; None if they cannot be followed."""
    op = value.op
    assert op is not None
    if value.norm is None and "view" in op.traits:
        return split_views(op, dims, roots)
    if "shift" in op.traits:
        for d in op.get("dims"):
            dims = resize(dims, d % len(dims), value.shape[d], roots)
        return dims
    if "cut" in op.traits or "join" in op.traits:
        if len(value.shape) != len(source.shape):
            return None
        changed = [k for k, (n, m) in enumerate(zip(value.shape, source.shape, strict=True)) if n != m]
        if len(changed) == 1:
            return resize(dims, changed[0], value.shape[changed[0]], roots)
        return dims if not changed and "join" in op.traits else None
    if value.shape == source.shape:
        return dims
    return reshape_dims(dims, value.shape) if math.prod(value.shape) == math.prod(source.shape) else None


def relate(source: Value, target: Value, dims: Dims) -> Dims | None:
    """Derive the dimensions of a value from those of a later value; None if they cannot be followed.

    Args:
        source: the value.
        target: the later value, which is computed from `source` by views, factors and norms.
        dims: the dimensions of `target`.
    """
    roots = Roots()
    start = roots.start(source.shape)
    seen = trace(target, {source: start}, roots)
    if seen is None:
        return None
    places: dict[Part, Dim] = {}
    for own, dim in zip(seen, dims, strict=True):
        sizes = [part.size for part in own]
        is_split = len(sizes) > 1 and math.prod(sizes) == math.prod(part.size for part in dim)
        pieces = reshape_dims((dim,), tuple(sizes)) if is_split else None if len(sizes) > 1 else [dim][: len(sizes)]
        if pieces is None:
            return None
        places |= dict(zip(own, pieces, strict=True))
    related: list[Dim] = []
    for (root,) in start:
        parts = sorted((part for part in places if part.root == root.root), key=lambda part: -part.stride)
        if math.prod(part.size for part in parts) != root.size:
            return None
        related.append(tuple(piece for part in parts for piece in places[part]))
    return tuple(related)


def find_layout(value: Value, state: Value) -> Layout | None:
    """Return the layout with which `apply_layout` puts the elements of `value` into the order of `state`.

    `value` is computed from `state`, as its norm is. None if it does not have the same tokens.
    """
    parts = [part for dim in _follow_views(value, state) or () for part in dim]
    is_whole = math.prod(part.size for part in parts) == math.prod(state.shape)
    if not is_whole or not {part.root for part in parts} <= {*range(len(state.shape))}:
        return None
    return [part.size for part in parts], sorted(range(len(parts)), key=lambda k: (parts[k].root, -parts[k].stride))


def apply_layout(layout: Layout, tensor: Tensor) -> Tensor:
    """Return a tensor reshaped and permuted so that its elements have the order of the state (`find_layout`)."""
    sizes, order = layout
    return tensor.reshape(sizes).permute(order)
