"""The dimensions along which the sublayers of a stream combine elements.

Attention, convolutions and products with parameters combine elements along a dimension; elementwise functions do not. Some
sublayer combines elements along a dimension of tokens, no sublayer along a dimension of the batch. An operator without a rule is
treated as an elementwise function. If its shapes or arguments do not fit the rule, the dimensions of its outputs are not known,
and nothing is concluded from the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from addnorm.stream.dataflow.arithmetic import has_numbers
from addnorm.stream.dataflow.graph import Op, Value
from addnorm.stream.layout.dimensions import ANONYMOUS, Dim, Dims, Part, Roots, list_dims, resize, split_views

Results = Sequence[Dims | None]


class Mixing:
    """Dimensions of a stream along which its sublayers combine elements.

    Attributes:
        strong: parts that attention, convolutions, products and scans combine.
        weak: parts that means, maxima and shifts combine.
        projected: parts that products with parameters combine, once for each product: features, or tokens in an MLP-Mixer.
        reduced: parts that sums and means combine, once for each sum or mean.
        repeated: the dimensions over which each product of two activations is repeated.
    """

    def __init__(self, roots: Roots) -> None:
        self.roots = roots
        self.strong: set[Part] = set()
        self.weak: set[Part] = set()
        self.projected: list[Part] = []
        self.reduced: list[Part] = []
        self.repeated: list[Dims] = []
        self._dims: dict[Value, Dims] = {}

    def follow(self, start: Value, dims: Dims, ops: Iterable[Op]) -> dict[Value, Dims]:
        """Follow the dimensions of a sublayer's input through its operators, and return the dimensions of every value.

        Args:
            start: the value that the sublayer reads.
            dims: the dimensions of this value.
            ops: the operators of the sublayer, in the order in which they ran.
        """
        self._dims = {start: dims}
        for op in ops:
            if not any(value in self._dims for value in op.inputs):
                continue
            for out, out_dims in zip(op.outputs, self._apply(op), strict=False):
                if out_dims is not None and len(out_dims) == len(out.shape):
                    self._dims[out] = tuple(map(_fill, out_dims, out.shape))
        return self._dims

    def _apply(self, op: Op) -> Results:
        """Return the dimensions of an operator's outputs, and record the dimensions that the operator combines."""
        rule = next((rule for trait, rule in _RULES.items() if trait in op.traits), Mixing._merge)
        try:
            return rule(self, op)
        except (IndexError, TypeError, ValueError, AttributeError):  # an overload with other arguments
            return []

    def _get(self, value: Any) -> Dims:
        return self._dims.get(value) or tuple(_fill((), size) for size in value.shape)

    def _note(self, into: set[Part], *dims: Dim) -> None:
        into.update(_list_known(*dims))

    def _project(self, dim: Dim) -> None:
        """Record a dimension that a product with a parameter combines."""
        self._note(self.strong, dim)
        self.projected += _list_known(dim)

    def _view(self, op: Op) -> Results:
        return [split_views(op, self._get(op.inputs[0]), self.roots)]

    def _merge(self, op: Op) -> Results:
        """Return the dimensions of the output of an elementwise function."""
        shape = op.out.shape
        inputs = [value for value in op.inputs if len(value.shape) <= len(shape)]
        if not any(value.shape == shape for value in inputs) and len(inputs) < 2:
            return []
        merged: list[Dim] = []
        for k in range(1, len(shape) + 1):
            size = shape[-k]
            fitting = [self._get(value)[-k] for value in inputs if len(value.shape) >= k and value.shape[-k] == size]
            if not fitting:
                return []
            merged.append(_select_known(fitting))
        return [tuple(merged[::-1])]

    def _product(self, op: Op) -> Results:
        first, second = op.args["added" in op.traits :][:2]
        a, b = self._get(first), self._get(second)
        inner = (*a[-1], *b[-2])
        batch = tuple(_select_known(pair) for pair in zip(a[:-2], b[:-2], strict=True))
        if first.has_data and second.has_data:
            self._note(self.strong, inner, a[-2], b[-1])
            self.repeated.append(batch)
        else:
            self._project(inner)
        return [(*batch, a[-2], b[-1])]

    def _linear(self, op: Op) -> Results:
        dims = self._get(op.args[0])
        self._project(dims[-1])
        return [(*dims[:-1], ())]

    def _attention(self, op: Op) -> Results:
        query, key, value = (self._get(v) for v in op.args[:3])
        at = 1 if "tokens_second" in op.traits else -2
        self._note(self.strong, query[at], key[at])
        return [(*query[:-1], value[-1])]

    def _convolve(self, op: Op) -> Results:
        x, weight = op.args[:2]
        dims, kernel = self._get(x), weight.shape[2:]
        first = len(dims) - len(kernel)
        is_depthwise = weight.shape[1] == 1 and weight.shape[0] == x.shape[first - 1] > 1
        if not is_depthwise:
            self._project(dims[first - 1])
            dims = (*dims[: first - 1], (), *dims[first:])
        self._note(self.strong, *(dims[first + k] for k, size in enumerate(kernel) if size > 1))
        return [self._resize(op, dims, range(first, len(dims)))]

    def _pool(self, op: Op) -> Results:
        dims = self._get(op.args[0])
        pooled = next(n for n in (1, 2, 3) if f"{n}d" in op.traits)
        self._note(self.strong, *dims[-pooled:])
        return [self._resize(op, dims, range(len(dims) - pooled, len(dims)))]

    def _resize(self, op: Op, dims: Dims, places: Iterable[int], part: int = 0) -> Dims:
        """Return `dims` with a new axis at each of `places` where output `part` has another size than the input."""
        x, shape = op.args[0], op.outputs[part].shape
        for k in places:
            if shape[k] != x.shape[k]:
                dims = resize(dims, k, shape[k], self.roots)
        return dims

    def _reduce(self, op: Op) -> Results:
        dims = self._get(op.args[0])
        rank = len(dims)
        chosen = list_dims(op, rank) or [*range(rank)]
        self._note(self.weak, *(dims[d] for d in chosen))
        if "sum" in op.traits:
            self.reduced += _list_known(*(dims[d] for d in chosen))
        keeps = len(op.out.shape) == rank
        reduced = tuple(() if k in chosen else dim for k, dim in enumerate(dims) if keeps or k not in chosen)
        return [reduced] * len(op.outputs)

    def _scan(self, op: Op) -> Results:
        dims = self._get(op.args[0])
        chosen = list_dims(op, len(dims))
        if has_numbers(op.out):
            self._note(self.strong, *(dims[d] for d in chosen))
        return [self._resize(op, dims, chosen)]

    def _recur(self, op: Op) -> Results:
        self._note(self.strong, self._get(op.args[0])[0])
        return []

    def _join(self, op: Op) -> Results:
        if op.name not in ("cat", "stack"):
            return self._merge(op)
        shape = op.out.shape
        rank = len(shape) - (op.name == "stack")
        at = op.get("dim", 0) % len(shape)
        known = [self._get(part) for part in op.args[0] if len(part.shape) == rank]
        dims = tuple(_select_known([dims[k] for dims in known]) for k in range(rank))
        if op.name == "stack":
            return [(*dims[:at], (), *dims[at:])]
        return [resize(dims, at, shape[at], self.roots, [dims[at] for dims in known])]

    def _crop(self, op: Op) -> Results:
        dims = self._get(op.args[0])
        return [self._resize(op, dims, range(len(dims)), part) for part in range(len(op.outputs))]

    def _select(self, op: Op) -> Results:
        dims = self._get(op.args[0])
        at = op.get("dim", 0) % len(dims)
        return [(*dims[:at], *dims[at + 1 :])] * len(op.outputs)

    def _shift(self, op: Op) -> Results:
        dims = self._get(op.args[0])
        self._note(self.weak, *(dims[d] for d in op.get("dims")))
        return [dims]

    def _embed(self, op: Op) -> Results:
        return [(*self._get(op.args[1]), ())]


def _fill(dim: Dim, size: int) -> Dim:
    """Return `dim`, or if nothing is known of it a dimension of this size that belongs to no axis of the stream."""
    return dim if dim or size == 1 else (Part(ANONYMOUS, 1, size),)


def _list_known(*dims: Dim) -> list[Part]:
    """Return the parts that belong to axes of the stream."""
    return [part for dim in dims for part in dim if part.root != ANONYMOUS]


def _select_known(dims: Iterable[Dim]) -> Dim:
    """Return the first dimension that has a part of an axis of the stream; an empty dimension if there is none."""
    return next(filter(_list_known, dims), ())


_RULES: dict[str, Callable[[Mixing, Op], Results]] = {
    "view": Mixing._view,
    "product": Mixing._product,
    "linear": Mixing._linear,
    "attention": Mixing._attention,
    "convolution": Mixing._convolve,
    "pool": Mixing._pool,
    "reduction": Mixing._reduce,
    "scan": Mixing._scan,
    "recurrent": Mixing._recur,
    "split": Mixing._crop,
    "crop": Mixing._crop,
    "shift": Mixing._shift,
    "select": Mixing._select,
    "embedding": Mixing._embed,
    "join": Mixing._join,
}
