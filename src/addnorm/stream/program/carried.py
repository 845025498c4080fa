"""Values that a run carries: linear functions of earlier values in which every feature is treated alike.

With its other operands frozen at the run's values, an operator *carries* an input if its output is linear in this input and never
combines or exchanges features: sums, products with numbers, gates and vectors, sums and matrix products over an axis of streams,
views, slices and concatenations. The output of any other operator is a *source* if it has the width of the stream: the embedding,
the output of a linear layer. So every carried value is a sum of multiples of sources, which is how streams are found.

An axis of streams is one that arises in the run: by an expansion, a stack, a repetition or a product with a matrix.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from addnorm._util.torch_internals import FakeTensor
from addnorm.stream.dataflow.arithmetic import is_ancestor
from addnorm.stream.dataflow.graph import DATA, Flow, Op, Value
from addnorm.stream.layout.dimensions import MATRIX_PRODUCTS, Dim, Dims, Part, Roots, reshape_dims, split_views

FEATURES = 0  # the root of the features; a root is the number of an axis, of which dimensions are parts
# Operators that carry their first operands, each with the number of these operands.
AFFINE = {
    "add": 2,
    "sub": 2,
    "rsub": 2,
    "lerp": 2,
    "where": 3,
    "masked_fill": 1,
    "neg": 1,
    "addcmul": 3,
}
SUMS = frozenset(("add", "sub", "rsub", "addcmul", "lerp", "sum", "mean", *MATRIX_PRODUCTS))


class Carried(NamedTuple):
    """Value that is a linear function of earlier values, with equal coefficients for all features.

    Attributes:
        dims: for each dimension the axes of which it consists, such as streams and features in a flat `n * d`.
        sources: the sources of which it is a sum of multiples, as bits.
    """

    dims: Dims
    sources: int


class Carrier:
    """The carried values of a run whose streams have `width` features.

    Attributes:
        known: the carried values; the sources are among them.
        sources: the sources in the order of the run; source k is bit k.
        used: for each operator, the inputs that it carries.
        roots: the numbered axes, of which the dimensions of carried values are parts.
    """

    def __init__(self, flow: Flow, width: int) -> None:
        self.width = width
        self.known: dict[Value, Carried] = {}
        self.sources: list[Value] = []
        self.sources_set: set[Value] = set()
        self.used: dict[Op, list[Value]] = {}
        self.roots = Roots()
        self.roots.make(width)  # FEATURES
        self._streams: set[int] = set()
        for leaf in flow.leaves:
            self._add_source(leaf)
        for op in flow.ops:
            self._add(op)

    def is_stream(self, dim: Dim) -> bool:
        """Return whether a dimension is an axis of streams, or has size 1."""
        return all(part.root in self._streams or part.size == 1 for part in dim)

    def order(self, value: Value, like: Iterable[Value] = ()) -> tuple[list[int], list[int], int]:
        """Return how a carried value becomes `(tokens, n, d)`: the sizes to reshape it to, their permutation, and n.

        Its tokens get the order that they have in the first value of `like` with the same tokens.
        """
        parts = [part for dim in self.known[value].dims for part in dim]
        at = range(len(parts))
        features = sorted((k for k in at if parts[k].root == FEATURES), key=lambda k: -parts[k].stride)
        streams = [k for k in at if parts[k].root in self._streams]
        tokens = [k for k in at if k not in features and k not in streams]
        for other in like:
            places = {part: k for k, part in enumerate(self.list_tokens(other))}
            if all(parts[k] in places or parts[k].size == 1 for k in tokens):
                tokens.sort(key=lambda k: places.get(parts[k], 0))
                break
        return [part.size for part in parts], [*tokens, *streams, *features], self.count_streams(value)

    def count_streams(self, *values: Value) -> int:
        """Return how many streams some carried values have together."""
        dims = (self.known[value].dims for value in values)
        return sum(math.prod(part.size for dim in own for part in dim if part.root in self._streams) for own in dims)

    def list_tokens(self, value: Value) -> list[Part]:
        """Return the parts of a carried value's dimensions that hold tokens, in their order."""
        parts = [part for dim in self.known[value].dims for part in dim]
        return [part for part in parts if part.root != FEATURES and part.root not in self._streams]

    def list_sizes(self, value: Value) -> list[int]:
        """Return the sizes of the parts of a carried value's dimensions that hold tokens."""
        return [part.size for part in self.list_tokens(value)]

    def find_sources(self, value: Value) -> list[Value]:
        """Return the sources of which a value is a sum of multiples; an empty list if it is not carried."""
        bits = self.known[value].sources if value in self.known else 0
        return [source for k, source in enumerate(self.sources) if bits >> k & 1]

    def join_sources(self, values: Iterable[Value]) -> int:
        """Return the sources of which any of some carried values is a sum of multiples, as bits."""
        return functools.reduce(operator.or_, (self.known[value].sources for value in values), 0)

    def find_residual_sums(self, flow: Flow) -> set[Op]:
        """Return the operators that sum sources of which one is computed from another, as in x + f(x)."""
        own = {source: 1 << k for k, source in enumerate(self.sources)}
        before: dict[Value, int] = {}  # the sources from which a value is computed, as bits
        for op in flow.ops:
            bits = 0
            for value in op.inputs:
                bits |= before.get(value, 0) | own.get(value, 0)
            before |= dict.fromkeys(op.outputs, bits)
        sums: set[Op] = set()
        for value, carried in self.known.items():
            is_residual = any(before.get(source, 0) & carried.sources for source in self.find_sources(value))
            if is_residual and value.op is not None and value.op.name in SUMS:
                sums.add(value.op)
        return sums

    def _add_source(self, value: Value) -> None:
        tensor = value.tensor
        if value.kind & DATA and tensor.is_floating_point() and len(value.shape) > 1 and value.shape[-1] == self.width:
            dims = (*(self.roots.make(size) for size in value.shape[:-1]), (Part(FEATURES, 1, self.width),))
            self.known[value] = Carried(dims, 1 << len(self.sources))
            self.sources.append(value)
            self.sources_set.add(value)

    def _add(self, op: Op) -> None:
        """Add the outputs of an operator: as carried values, or else as sources."""
        used, dims = self._carry(op)
        for out, of_output in zip(op.outputs, dims, strict=False):
            if of_output is not None and out.tensor.is_floating_point():
                self.known[out] = Carried(of_output, self.join_sources(used))
                self.used[op] = used
        for out in op.outputs:
            if out not in self.known:
                self._add_source(out)

    def _carry(self, op: Op) -> tuple[list[Value], Sequence[Dims | None]]:
        """Return the inputs that an operator carries, and the dimensions of its outputs: None for one that is not carried."""
        norm = op.outputs[0].norm if op.outputs else None
        if norm is not None:
            carried = self.known.get(norm.x)
            last = [part for part in carried.dims[-1] if part.size > 1] if carried else []
            is_whole = last == [Part(FEATURES, 1, self.width)]
            return [norm.x], [reshape_dims(carried.dims, norm.y.shape)] if carried and is_whole else []
        used = [value for value in dict.fromkeys(op.inputs) if value in self.known]
        if not used:
            return [], []
        first = self.known[used[0]].dims
        is_first = used[0] is op.inputs[0]
        if "view" in op.traits:
            return used[:1], [self._view(op, first)] * len(op.outputs) if is_first else []
        if op.name in ("stack", "cat"):
            return used, [self._join(op, op.args[0])]
        if "cut" in op.traits:
            return used[:1], self._cut(op, first) if is_first else []
        if op.name in AFFINE:
            return used, [self._merge(op, used)]
        if op.name in ("mul", "div", *MATRIX_PRODUCTS):
            used = self._choose_factor(op, used)
            combine = self._multiply if op.name in MATRIX_PRODUCTS else self._merge
            return used, [combine(op, used)] if used else []
        if op.name in ("sum", "mean"):
            return used, [self._reduce(op, first)]
        if "attention" in op.traits:
            return [op.args[2]], [self._attend(op, op.args[2])]
        is_kept = "guard" in op.traits and len(used) == 1 and _changes_nothing(op, used[0])
        return used, [first] if is_kept else []

    def _born(self, size: int) -> Dim:
        """Make a new dimension of this size, and mark it as an axis of streams."""
        dim = self.roots.make(size)
        self._streams.add(dim[0].root)
        return dim

    def _view(self, op: Op, dims: Dims) -> Dims | None:
        known = {*self.roots.sizes}
        new = split_views(op, dims, self.roots)
        self._streams |= {*self.roots.sizes} - known  # of an expansion
        return new

    def _merge(self, op: Op, used: Iterable[Value]) -> Dims | None:
        """Return the dimensions of the result of an elementwise operator; None if features meet another axis.

        An axis of streams in one operand is one in the result. An axis of tokens is that of the older operand, which is the
        stream, not the write that is added to it.
        """
        shape = op.outputs[0].shape
        dims: list[Dim] = [()] * len(shape)
        for value in used:
            for k, dim in enumerate(self.known[value].dims, len(shape) - len(value.shape)):
                if value.shape[k - len(shape)] != shape[k]:
                    if any(part.root == FEATURES for part in dim):
                        return None
                    continue
                features = [[part.root == FEATURES for part in d if part.size > 1] for d in (dims[k], dim)]
                if dims[k] and features[0] != features[1]:
                    return None
                if not dims[k] or self.is_stream(dim) or (dim < dims[k] and not self.is_stream(dims[k])):
                    dims[k] = dim
        for k, size in enumerate(shape):
            if size > 1 and not dims[k]:
                dims[k] = self._born(size)
        return tuple(dims)

    def _choose_factor(self, op: Op, used: list[Value]) -> list[Value]:
        """Return the operand that a product or quotient carries, alone; an empty list if it carries none.

        Of two candidates it is the one from which the other one, a gate, is computed, or else the only one with features.
        """
        operands = [argument for argument in op.args[:2] if isinstance(argument, Value)]
        if len(operands) == 2 and operands[0] is operands[1]:
            return []
        if op.name == "div":
            return [value for value in operands[:1] if value in used and op.args[0] is value]
        if len(used) == 1:
            return used
        first, second = used
        if is_ancestor(first, second):
            return [first]
        if is_ancestor(second, first):
            return [second]
        ends = [value for value in used if any(part.root == FEATURES for part in self.known[value].dims[-1])]
        return ends if len(ends) == 1 else []  # the other operand's last dimension has streams

    def _cut(self, op: Op, dims: Dims) -> list[Dims]:
        """Return the dimensions of each output of a slice, index or split; an empty list if it separates features."""
        rank = len(dims)
        if op.name in ("repeat", "repeat_interleave"):
            return self._repeat(op, dims)
        if op.name == "index" and len(op.args[1]) <= rank:
            at = [k for k, index in enumerate(op.args[1]) if index is not None]
        elif "exact" in op.traits or op.name == "index_select":
            at = [op.get("dim", 0) % rank]
        else:
            return []
        results = []
        for out in op.outputs:
            if len(at) != 1 or len(out.shape) != rank - ("select" in op.traits):
                return []
            k = at[0]
            is_features = any(part.root == FEATURES for part in dims[k])
            if is_features and (
                "select" in op.traits or "exact" not in op.traits or not self._keeps_features(op, dims[k], out.shape[k])
            ):
                return []
            rest = (*dims[:k], *dims[k + 1 :])
            if "select" in op.traits:
                results.append(rest)
                continue
            size = out.shape[k] // self.width if is_features else out.shape[k]
            new = (
                ()
                if size == 1
                else self._born(size)
                if self.is_stream(dims[k][:-1] if is_features else dims[k])
                else self.roots.make(size)
            )
            results.append((*dims[:k], (*new, dims[k][-1]) if is_features else new, *dims[k + 1 :]))
        return results

    def _keeps_features(self, op: Op, dim: Dim, size: int) -> bool:
        """Return whether a cut of a dimension `n * d`, with n streams one after the other, keeps whole streams."""
        start = op.get("start", 0) or 0
        is_flat = dim[-1] == Part(FEATURES, 1, self.width) and self.is_stream(dim[:-1])
        return is_flat and size % self.width == 0 and start % self.width == 0

    def _repeat(self, op: Op, dims: Dims) -> list[Dims]:
        shape = op.outputs[0].shape
        if len(shape) != len(dims):
            return []
        results: list[Dim] = []
        for dim, old, size in zip(dims, op.inputs[0].shape, shape, strict=True):
            new = self._born(size // old) if size > old else ()
            is_interleaved = op.name == "repeat_interleave"
            if new and is_interleaved and any(part.root == FEATURES for part in dim):
                return []
            results.append((*dim, *new) if is_interleaved else (*new, *dim))
        return [tuple(results)]

    def _join(self, op: Op, parts: Sequence[Value]) -> Dims | None:
        """Return the dimensions of a `stack` or `cat` along an axis of streams or of tokens; None for other joins."""
        if any(value.kind & DATA and value not in self.known for value in parts):
            return None
        each = [self.known[value].dims for value in parts if value in self.known]
        first, shape = each[0], op.outputs[0].shape
        k = op.get("dim", 0) % len(shape)
        if op.name == "stack":
            return (*first[:k], self._born(shape[k]), *first[k:])
        flat = [dims[k] for dims in each if any(part.root == FEATURES for part in dims[k])]
        if flat:
            is_whole = all(dim[-1] == Part(FEATURES, 1, self.width) and self.is_stream(dim[:-1]) for dim in flat)
            if len(flat) < len(parts) or not is_whole:
                return None
            return (*first[:k], (*self._born(shape[k] // self.width), flat[0][-1]), *first[k + 1 :])
        new = self._born(shape[k]) if all(self.is_stream(dims[k]) for dims in each) else self.roots.make(shape[k])
        return (*first[:k], new, *first[k + 1 :])

    def _reduce(self, op: Op, dims: Dims) -> Dims | None:
        """Return the dimensions of a sum or mean over streams; None for one over other dimensions."""
        axes = op.get("dim")
        if not axes or op.get("dim") is None:
            return None
        chosen = {k % len(dims) for k in axes}
        if not all(self.is_stream(dims[k]) for k in chosen):
            return None
        keeps = bool(op.get("keepdim", False))
        return tuple(() if k in chosen else dim for k, dim in enumerate(dims) if keeps or k not in chosen)

    def _multiply(self, op: Op, used: Sequence[Value]) -> Dims | None:
        """Return the dimensions of a matrix product over an axis of streams; None for a product over another axis."""
        dims, at = self.known[used[0]].dims, op.args.index(used[0])
        if op.name == "mv":
            return dims[:-1] if at == 0 and self.is_stream(dims[-1]) else None
        own, other = (-1, -2) if at == 0 else (-2, -1)
        if not self.is_stream(dims[own]):
            return None
        size = op.outputs[0].shape[own]
        new = self._born(size) if size > 1 else ()
        return (*dims[:-2], dims[other], new) if at == 0 else (*dims[:-2], new, dims[other])

    def _attend(self, op: Op, values: Value) -> Dims | None:
        """Return the dimensions of an attention over streams; None for one over tokens, or with a mask."""
        dims = self.known[values].dims if values in self.known else ()
        is_among_streams = len(dims) > 2 and bool(dims[-2]) and self.is_stream(dims[-2])
        if not is_among_streams or dims[-1] != (Part(FEATURES, 1, self.width),) or find_weights(op) is None:
            return None
        size = op.outputs[0].shape[-2]
        return (*dims[:-2], self._born(size) if size > 1 else (), dims[-1])


def find_weights(op: Op) -> Tensor | None:
    """Return the attention weights of an attention operator without a mask, in float64; None for one with a mask."""
    if op.get("is_causal", False) or op.get("attn_mask", op.get("attn_bias")) is not None:
        return None
    query, key = (value.exact for value in op.args[:2])
    scale = op.get("scale")
    return torch.softmax(query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale), -1)


def _changes_nothing(op: Op, value: Value) -> bool:
    """Return whether a guard, such as a clamp, changed no number; of fake tensors only shapes are compared."""
    out = op.outputs[0]
    return out.shape == value.shape and (isinstance(out.tensor, FakeTensor) or torch.equal(out.tensor, value.tensor))
