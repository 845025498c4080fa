"""The dimensions along which the sublayers of a stream combine elements.

Attention, convolutions and products with parameters combine elements along a dimension; elementwise functions do not. A dimension
of the tokens is combined with itself by some sublayer, a dimension of the batch by none. Operators without a rule have no known
dimensions; nothing is concluded from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from addnorm.stream.dataflow.graph import DATA, Op, Value
from addnorm.stream.find.operators import ATTENTION, NORMALIZING, TRANSPARENT
from addnorm.stream.layout.dimensions import ANONYMOUS, Dim, Dims, Part, Roots, resize, split_views

__all__ = ["Mixing"]

TOKENS_SECOND = {"_flash_attention_forward", "_efficient_attention_forward", "_native_multi_head_attention"}
POOLS = {
    "avg_pool1d": 1, "avg_pool2d": 2, "avg_pool3d": 3, "max_pool2d_with_indices": 2, "max_pool3d_with_indices": 3,
    "adaptive_avg_pool1d": 1, "_adaptive_avg_pool2d": 2, "adaptive_avg_pool2d": 2,
}  # fmt: skip
CONVOLUTIONS = {"convolution", "_convolution", "mkldnn_convolution", "conv_depthwise3d"}
REDUCTIONS = {
    "sum", "mean", "amax", "amin", "max", "min", "logsumexp", "prod", "var", "std", "norm", "linalg_vector_norm", "var_mean",
}  # fmt: skip
SCANS = {"cumsum", "cumprod", "logcumsumexp", "_fft_r2c", "_fft_c2c", "_fft_c2r"}
SPLITS = {"split", "split_with_sizes", "unsafe_split", "chunk", "tensor_split", "unsafe_chunk"}
MOVES = {"roll", "flip"}
CUTS = {"slice", "narrow", "index_select", "constant_pad_nd"}
LINEAR = {"linear", "mkldnn_linear"}
PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}
RECURRENT = {"mkldnn_rnn_layer", "lstm", "gru", "rnn_tanh", "rnn_relu"}


class Mixing:
    """Dimensions that sublayers combine.

    Attributes:
        strong: parts that attention, convolutions, products and scans combine.
        weak: parts that means, maxima and shifts combine.
        projected: parts that products with parameters combine, once for each product: features, or tokens in a mixer.
        reduced: parts that sums and means combine, once for each.
    """

    def __init__(self, roots: Roots) -> None:
        self.roots = roots
        self.strong: set[Part] = set()
        self.weak: set[Part] = set()
        self.projected: list[Part] = []
        self.reduced: list[Part] = []
        self._dims: dict[Value, Dims] = {}

    def follow(self, start: Value, dims: Dims, ops: Iterable[Op]) -> dict[Value, Dims]:
        """Follow the dimensions of a sublayer's input through its operators, and return those of every value.

        Args:
            start: the value that the sublayer reads.
            dims: its dimensions.
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

    def _apply(self, op: Op) -> Sequence[Dims | None]:
        """Return the dimensions of an operator's outputs, and note those that it combines."""
        rule = _RULES.get(op.name)
        try:
            if rule is not None:
                return rule(self, op)
            if op.name in TRANSPARENT:
                return [split_views(op, self._get(op.inputs[0]), self.roots)]
            return [self._merge(op)]
        except (IndexError, TypeError, ValueError, AttributeError):  # an overload with other arguments
            return []

    def _get(self, value: Any) -> Dims:
        known = self._dims.get(value)
        return known if known is not None else tuple(_fill((), size) for size in value.shape)

    def _note(self, into: set[Part], *dims: Dim) -> None:
        into.update(part for dim in dims for part in dim if part.root != ANONYMOUS)

    def _merge(self, op: Op) -> Dims | None:
        """Return the dimensions of the output of an elementwise function."""
        shape = op.outputs[0].shape
        inputs = [value for value in op.inputs if len(value.shape) <= len(shape)]
        if not any(value.shape == shape for value in inputs) and len(inputs) < 2:
            return None
        merged: list[Dim] = []
        for k in range(1, len(shape) + 1):
            size = shape[-k]
            fitting = [self._get(value)[-k] for value in inputs if len(value.shape) >= k and value.shape[-k] == size]
            if not fitting:
                return None
            merged.append(next(filter(_is_known, fitting), ()))
        return tuple(merged[::-1])

    def _product(self, op: Op) -> Sequence[Dims | None]:
        first, second = (op.args[k] for k in PRODUCTS[op.name])
        a, b = self._get(first), self._get(second)
        inner = (*a[-1], *b[-2])
        self._note(self.strong, inner)
        is_pair = bool(first.kind & DATA and second.kind & DATA)
        if is_pair:
            self._note(self.strong, a[-2], b[-1])
        else:
            self.projected += [part for part in inner if part.root != ANONYMOUS]
        batch = tuple(x if _is_known(x) else y for x, y in zip(a[:-2], b[:-2], strict=True))
        return [(*batch, a[-2], b[-1])]

    def _linear(self, op: Op) -> Sequence[Dims | None]:
        dims = self._get(op.args[0])
        self._note(self.strong, dims[-1])
        self.projected += [part for part in dims[-1] if part.root != ANONYMOUS]
        return [(*dims[:-1], ())]

    def _attention(self, op: Op) -> Sequence[Dims | None]:
        query, key, value = (self._get(v) for v in op.args[:3])
        at = 1 if op.name in TOKENS_SECOND else -2
        self._note(self.strong, query[at], key[at])
        return [(*query[:-1], value[-1])]

    def _convolve(self, op: Op) -> Sequence[Dims | None]:
        x, weight = op.args[:2]
        dims, shape = self._get(x), op.outputs[0].shape
        kernel = weight.shape[2:]
        first = len(dims) - len(kernel)
        is_depthwise = weight.shape[1] == 1 and weight.shape[0] == x.shape[first - 1] > 1
        if not is_depthwise:
            self._note(self.strong, dims[first - 1])
            self.projected += [part for part in dims[first - 1] if part.root != ANONYMOUS]
            dims = (*dims[: first - 1], (), *dims[first:])
        for k, size in enumerate(kernel):
            if size > 1:
                self._note(self.strong, dims[first + k])
            if shape[first + k] != x.shape[first + k]:
                dims = resize(dims, first + k, shape[first + k], self.roots)
        return [dims]

    def _pool(self, op: Op) -> Sequence[Dims | None]:
        x = op.args[0]
        dims, shape = self._get(x), op.outputs[0].shape
        for k in range(-POOLS[op.name], 0):
            self._note(self.strong, dims[k])
            if shape[k] != x.shape[k]:
                dims = resize(dims, len(dims) + k, shape[k], self.roots)
        return [dims]

    def _reduce(self, op: Op) -> Sequence[Dims | None]:
        x, shape = op.args[0], op.outputs[0].shape
        given = op.kwargs.get(
            "dim", op.args[2 if op.name in ("norm", "linalg_vector_norm") and len(op.args) > 2 else 1 :][:1]
        )
        given = given[0] if isinstance(given, list | tuple) and given and isinstance(given[0], list | tuple) else given
        rank = len(x.shape)
        chosen = [d % rank for d in (given if isinstance(given, list | tuple) else [given]) if isinstance(d, int)]
        chosen = chosen or [*range(rank)]
        dims = self._get(x)
        self._note(self.weak, *(dims[d] for d in chosen))
        if op.name in ("mean", "sum"):
            self.reduced += [part for d in chosen for part in dims[d] if part.root != ANONYMOUS]
        keeps = len(shape) == rank
        reduced = tuple(() if k in chosen else dim for k, dim in enumerate(dims) if keeps or k not in chosen)
        return [reduced] * len(op.outputs)

    def _scan(self, op: Op) -> Sequence[Dims | None]:
        dims, (x, given, *_) = self._get(op.args[0]), op.args
        chosen = [d % len(dims) for d in (given if isinstance(given, list | tuple) else [given])]
        if op.outputs[0].tensor.is_floating_point() or op.outputs[0].tensor.is_complex():
            self._note(self.strong, *(dims[d] for d in chosen))
        for d in chosen:
            if x.shape[d] != op.outputs[0].shape[d]:
                dims = resize(dims, d, op.outputs[0].shape[d], self.roots)
        return [dims]

    def _recur(self, op: Op) -> Sequence[Dims | None]:
        dims = self._get(op.args[0])
        self._note(self.strong, dims[int(bool(op.kwargs.get("batch_first", False)))])
        return []

    def _concatenate(self, op: Op) -> Sequence[Dims | None]:
        parts = op.args[0]
        rank = len(op.outputs[0].shape)
        at = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0) % rank
        known = [self._get(part) for part in parts if len(part.shape) == rank]
        dims = tuple(next((dims[k] for dims in known if _is_known(dims[k])), ()) for k in range(rank))
        return [resize(dims, at, op.outputs[0].shape[at], self.roots, [dims[at] for dims in known])]

    def _stack(self, op: Op) -> Sequence[Dims | None]:
        rank = len(op.outputs[0].shape)
        at = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0) % rank
        known = [self._get(part) for part in op.args[0]]
        dims = tuple(next((dims[k] for dims in known if _is_known(dims[k])), ()) for k in range(rank - 1))
        return [(*dims[:at], (), *dims[at:])]

    def _cut(self, op: Op) -> Sequence[Dims | None]:
        x, shape = op.args[0], op.outputs[0].shape
        dims = self._get(x)
        for k in [k for k, (n, m) in enumerate(zip(x.shape, shape, strict=True)) if n != m]:
            dims = resize(dims, k, shape[k], self.roots)
        return [dims]

    def _split(self, op: Op) -> Sequence[Dims | None]:
        x = op.args[0]
        at = op.kwargs.get("dim", op.args[2] if len(op.args) > 2 else 0) % len(x.shape)
        return [resize(self._get(x), at, out.shape[at], self.roots) for out in op.outputs]

    def _select(self, op: Op) -> Sequence[Dims | None]:
        dims = self._get(op.args[0])
        at = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0) % len(dims)
        return [(*dims[:at], *dims[at + 1 :])] * len(op.outputs)

    def _move(self, op: Op) -> Sequence[Dims | None]:
        dims = self._get(op.args[0])
        chosen = op.args[2] if op.name == "roll" and len(op.args) > 2 else op.args[1] if op.name == "flip" else []
        self._note(self.weak, *(dims[d] for d in chosen))
        return [dims]

    def _embed(self, op: Op) -> Sequence[Dims | None]:
        return [(*self._get(op.args[1]), ())]

    def _normalize(self, op: Op) -> Sequence[Dims | None]:
        dims = self._get(op.args[0])
        return [dims if math.prod(op.outputs[0].shape) == math.prod(op.args[0].shape) else None]


def _fill(dim: Dim, size: int) -> Dim:
    """Return a dimension; one that is none of the stream has a part of its size."""
    return dim if dim or size == 1 else (Part(ANONYMOUS, 1, size),)


def _is_known(dim: Dim) -> bool:
    return any(part.root != ANONYMOUS for part in dim)


_RULES: dict[str, Callable[[Mixing, Op], Sequence[Dims | None]]] = {
    **dict.fromkeys(PRODUCTS, Mixing._product),
    **dict.fromkeys(LINEAR, Mixing._linear),
    **dict.fromkeys(ATTENTION, Mixing._attention),
    **dict.fromkeys(CONVOLUTIONS, Mixing._convolve),
    **dict.fromkeys(POOLS, Mixing._pool),
    **dict.fromkeys(NORMALIZING - REDUCTIONS - {"rsqrt", "sqrt"}, Mixing._normalize),
    **dict.fromkeys(REDUCTIONS, Mixing._reduce),
    **dict.fromkeys(SCANS, Mixing._scan),
    **dict.fromkeys(RECURRENT, Mixing._recur),
    **dict.fromkeys(SPLITS, Mixing._split),
    **dict.fromkeys(CUTS, Mixing._cut),
    **dict.fromkeys(MOVES, Mixing._move),
    **dict.fromkeys(("select", "unbind"), Mixing._select),
    "embedding": Mixing._embed,
    "cat": Mixing._concatenate,
    "stack": Mixing._stack,
}
