"""Dimensions of a stream, followed through views: which dimension of a value holds which part of which dimension of the stream.

A dimension of a value is a tuple of parts, the slowest first. A part is (root, stride, size): a root is a dimension of a value at
which the stream begins, and a part of it holds every `stride`-th of its places. So (batch * tokens, d) has the dimensions
((0, 1, batch), (1, 1, tokens)), ((2, 1, d),), and the windows of 7 of a dimension of 56 are ((1, 7, 8),) and ((1, 1, 7),).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import count
from typing import NamedTuple

from addnorm.stream.dataflow.graph import Op, Value
from addnorm.stream.find.moves import CUTS, JOINS, list_joined
from addnorm.stream.find.operators import TRANSPARENT, match_factor, match_terms

__all__ = ["ANONYMOUS", "Dims", "Part", "Roots", "broadcast", "relate", "resize", "split_views", "trace"]

ANONYMOUS = -1  # root of a dimension that is none of the stream
SWAPS = ("transpose", "swapaxes", "t", "numpy_T")


class Part(NamedTuple):
    """Part of a dimension of the stream."""

    root: int
    stride: int
    size: int


Dim = tuple[Part, ...]
Dims = tuple[Dim, ...]


class Roots:
    """Numbers of roots, and for roots that were cut out of others or joined from them, those others."""

    def __init__(self) -> None:
        self._numbers = count()
        self.sizes: dict[int, int] = {}
        self.sources: dict[int, tuple[int, ...]] = {}

    def make(self, size: int, sources: Iterable[int] = ()) -> Dim:
        """Return a dimension that is a new root."""
        root = next(self._numbers)
        self.sizes[root], self.sources[root] = size, tuple(dict.fromkeys(sources))
        return (Part(root, 1, size),)

    def start(self, shape: Iterable[int]) -> Dims:
        """Return the dimensions of a value at which a stream begins: each one a root."""
        return tuple(self.make(size) for size in shape)

    def find_origins(self, root: int) -> set[int]:
        """Return a root and those it was made from, directly or not."""
        origins, todo = {root}, [root]
        while todo:
            new = {*self.sources[todo.pop()]} - origins
            origins |= new
            todo.extend(new)
        return origins


def split_views(op: Op, dims: Dims, roots: Roots) -> Dims | None:
    """Return the dimensions of a view, copy or cast; None if they cannot be followed."""
    old, new = op.inputs[0].shape, op.outputs[0].shape
    rank = len(old)
    if op.name in SWAPS and rank == len(new):
        first, second = (d % rank for d in (op.args[1:3] if len(op.args) > 2 else (0, 1))) if rank > 1 else (0, 0)
        order = [*range(rank)]
        order[first], order[second] = second, first
        return tuple(dims[k] for k in order)
    if op.name == "permute":
        return tuple(dims[k % rank] for k in op.args[1])
    if op.name == "alias" and len(op.args) > 1:  # the same memory with permuted dimensions
        stride, _, strides = op.args[1:]
        if len({*stride}) < rank or sorted(stride) != sorted(strides):
            return None
        return tuple(dims[stride.index(step)] for step in strides)
    if op.name in ("unsqueeze", "squeeze"):
        return _squeeze(op, dims, len(new))
    if old == new:
        return dims
    if op.name in ("expand", "expand_as", "copy"):
        return broadcast(dims, old, new, roots)
    return _reshape(dims, new)


def _squeeze(op: Op, dims: Dims, rank: int) -> Dims | None:
    if op.name == "unsqueeze":
        at = op.args[1] % rank
        return (*dims[:at], (), *dims[at:])
    shape = op.inputs[0].shape
    chosen = op.args[1] if len(op.args) > 1 else [*range(len(shape))]
    chosen = [d % len(shape) for d in (chosen if isinstance(chosen, list | tuple) else [chosen])] if shape else []
    return tuple(dim for k, dim in enumerate(dims) if k not in chosen or shape[k] != 1)


def broadcast(dims: Dims, old: tuple[int, ...], new: tuple[int, ...], roots: Roots) -> Dims:
    """Return the dimensions of an expanded value: each expanded dimension is a new root."""
    before = len(new) - len(old)
    return tuple(
        dims[k - before] if k >= before and old[k - before] == size else roots.make(size) if size != 1 else ()
        for k, size in enumerate(new)
    )


def _reshape(dims: Dims, shape: tuple[int, ...]) -> Dims | None:
    """Return the dimensions after a reshape that preserves the order of the elements."""
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
            if missing % part.size == 0:
                parts.append(part)
                missing //= part.size
            elif part.size % missing == 0:
                inner = part.size // missing
                parts.append(Part(part.root, part.stride * inner, missing))
                rest.append(Part(part.root, part.stride, inner))
                missing = 1
            else:
                return None
        follows_one = k + 1 < len(shape) and shape[k + 1] == 1
        while (
            rest and rest[-1].size == 1 and not (parts and follows_one)
        ):  # a dimension of size one goes with one before it
            parts.append(rest.pop())
        new.append(parts)
    return None if rest else tuple(map(tuple, new))


def resize(dims: Dims, at: int, size: int, roots: Roots, others: Iterable[Dim] = ()) -> Dims:
    """Return the dimensions of a value one of whose dimensions was cut or joined with `others`."""
    sources = {dim[0].root for dim in (dims[at], *others) if len(dim) == 1} - {ANONYMOUS}
    return (*dims[:at], roots.make(size, sorted(sources)) if sources else (Part(ANONYMOUS, 1, size),), *dims[at + 1 :])


def trace(value: Value, known: dict[Value, Dims], roots: Roots) -> Dims | None:
    """Return the dimensions of a value that is computed from a known one by views, factors, norms, sums and changes of tokens.

    Args:
        value: the value.
        known: values with their dimensions. Values on the way are added.
        roots: the roots of the stream.
    """
    pending: list[tuple[Value, Value]] = []  # values with the values from which their dimensions follow
    first = min((other.index for other in known), default=0)
    current = value
    while current not in known:
        source = _find_source(current, known, first) if current.index >= first else None
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


def _find_source(value: Value, known: Mapping[Value, Dims], first: int) -> Value | None:
    """Return the value from which the dimensions of another follow, nearer to a known one."""
    op = value.op
    if op is None or not op.inputs:
        return None
    if value.norm is not None:
        x: Value = value.norm.x
        return x
    if op.name in TRANSPARENT:
        return op.inputs[0]
    product = match_factor(op)
    if product is not None:
        return product[0]
    terms = match_terms(op)
    if terms is not None:
        same = [term.value for term in terms if term.value.shape == value.shape]
        return next((v for v in same if v in known), max(same, key=lambda v: _reaches(v, known, first), default=None))
    if op.name in CUTS:
        return op.inputs[0]
    if op.name in JOINS:
        parts = [v for v in list_joined(op) if len(v.shape) == len(value.shape)]
        return next((v for v in parts if _reaches(v, known, first)), None)
    if len(op.inputs) == 1 and op.inputs[0].shape == value.shape:  # x + 0, a guard
        return op.inputs[0]
    return None


def _reaches(value: Value, known: Mapping[Value, Dims], first: int) -> bool:
    """Return whether a value leads to a known one through views, factors, norms and sums."""
    for _ in range(64):
        if value in known:
            return True
        source = _find_source(value, known, first) if value.index >= first else None
        if source is None:
            return False
        value = source
    return False


def _step(value: Value, source: Value, dims: Dims, roots: Roots) -> Dims | None:
    """Return the dimensions of a value from those of its source."""
    op = value.op
    assert op is not None
    if value.norm is None and op.name in TRANSPARENT:
        return split_views(op, dims, roots)
    if op.name in ("roll", "flip"):
        moved = op.args[2] if op.name == "roll" and len(op.args) > 2 else op.args[1]
        for d in moved:
            dims = resize(dims, d % len(dims), value.shape[d], roots)
        return dims
    if op.name in CUTS or op.name in JOINS:
        if len(value.shape) != len(source.shape):
            return None
        changed = [k for k, (n, m) in enumerate(zip(value.shape, source.shape, strict=True)) if n != m]
        if len(changed) == 1:
            return resize(dims, changed[0], value.shape[changed[0]], roots)
        return dims if not changed and op.name in JOINS else None
    if value.shape == source.shape:
        return dims
    return _reshape(dims, value.shape) if math.prod(value.shape) == math.prod(source.shape) else None


def relate(source: Value, target: Value, dims: Dims) -> Dims | None:
    """Return the dimensions of a value from those of a later one that is computed from it by views, factors and norms.

    Args:
        source: the value.
        target: the later value.
        dims: its dimensions.
    """
    roots = Roots()
    start = roots.start(source.shape)
    seen = trace(target, {source: start}, roots)
    if seen is None:
        return None
    places: dict[Part, Dim] = {}
    for own, dim in zip(seen, dims, strict=True):
        pieces = _cut(dim, [part.size for part in own])
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


def _cut(dim: Dim, sizes: list[int]) -> list[Dim] | None:
    """Return a dimension as several of these sizes, the slowest first."""
    if len(sizes) < 2:
        return [dim][: len(sizes)]
    cut = _reshape((dim,), tuple(sizes)) if math.prod(sizes) == math.prod(part.size for part in dim) else None
    return None if cut is None else [*cut]
