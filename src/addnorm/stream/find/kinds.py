"""Kinds of sublayers, from their operators: attention, cross-attention, feed-forward, other.

attention          a softmax, or another product of two activations, weights values that come from the stream
cross-attention    the values come from elsewhere
feed-forward       products that do not combine neighbouring tokens: no convolution over tokens, no recurrence. Products of two
                   activations of one token, such as a weighted sum of experts, become feed-forward in `place_chain`.

The names of modules and classes are not used.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import pairwise

import torch
from torch import Tensor

from addnorm.stream.dataflow.arithmetic import has_numbers, is_activation, is_ancestor, match_factor, strip_views
from addnorm.stream.dataflow.graph import Op, Value


def classify_sublayer(x: Value, ops: Sequence[Op], without: Set[Op] = frozenset()) -> str:
    """Return the kind of a sublayer that reads x: "attention", "cross-attention", "feed-forward" or "other".

    `without` has the adds of other streams. A value that depends on x only through these adds does not come from the stream.
    """
    # `weighted`: the keys and values of attention, or the values that are multiplied by a softmax. Parameters are left out: a
    # product of a softmax and a parameter mixes the heads.
    weighted = [v for op in ops if "attention" in op.traits for v in op.args[1:3] if isinstance(v, Value)]
    if not weighted:
        pairs = [op for op in ops if "pair" in op.traits and any(map(_comes_from_softmax, op.inputs))]
        weighted = [v for v in map(_find_weighted, pairs) if v.has_data]
    if weighted:
        return "attention" if any(is_ancestor(x, v, without) for v in weighted) else "cross-attention"
    products = [op for op in ops if "pair" in op.traits and all(map(is_activation, op.inputs))]
    # A squared norm multiplies a value by itself.
    products = [op for op in products if len({*map(strip_views, op.inputs)}) > 1]
    is_own = all(is_ancestor(x, v, without) for op in products for v in op.inputs)
    attention = "attention" if is_own else "cross-attention"
    if products and any("softmax" in op.traits for op in ops):  # not next to the product, as in attention over windows
        return attention
    is_local = any("local" in op.traits and has_numbers(op.out) and _mixes_neighbours(op) for op in ops)
    if (not products and (_has_recurrence(ops) or _passes_messages(ops))) or is_local:
        return "other"
    if products:
        return attention
    is_mixed = any("mixing" in op.traits and "cut" not in op.traits for op in ops if not _is_other_library(op))
    return "feed-forward" if is_mixed else "other"


def _is_other_library(op: Op) -> bool:
    """Return whether an operator belongs to another library, and its name does not contain "linear"."""
    return "opaque" in op.traits and "linear" not in op.name


def _comes_from_softmax(value: Value) -> bool:
    for _ in range(8):
        op = strip_views(value).op
        if op is None or "softmax" in op.traits:
            return op is not None
        product = match_factor(op)
        if product is None and op.name not in ("slice", "narrow", "split"):
            return False
        value = product.x if product is not None else op.inputs[0]
    return False


def _find_weighted(op: Op) -> Value:
    """Return the factor that `op` multiplies by a softmax."""
    return next((value for value in op.inputs if not _comes_from_softmax(value)), op.inputs[-1])


def _mixes_neighbours(op: Op) -> bool:
    """Return whether an operator combines neighbouring tokens: not a convolution whose kernel has size one."""
    if "convolution" not in op.name:
        return True
    kernel = op.inputs[1].shape[2:] if len(op.inputs) > 1 else ()
    return any(size > 1 for size in kernel)


def _has_recurrence(ops: Sequence[Op]) -> bool:
    """Return whether one parameter is used in three products, each computed from the result of the one before, as in an RNN."""
    calls: dict[Value, list[Op]] = {}
    for op in ops:
        if op.traits & {"product", "linear"}:
            weights = [v for v in op.inputs if v.is_learned and len(v.shape) > 1]
            for weight in weights[:1]:
                calls.setdefault(strip_views(weight), []).append(op)
    return any(
        len(same) > 2 and all(is_ancestor(a.out, b.out) for a, b in pairwise(same[:3])) for same in calls.values()
    )


def _passes_messages(ops: Sequence[Op]) -> bool:
    """Return whether tokens are gathered by one index and scattered by another one, as in a graph network.

    Mixtures of experts use the same index for both.
    """
    read, added = (
        [found for op in ops if trait in op.traits and (found := _find_index(op))] for trait in ("gather", "scatter")
    )
    alike = [[torch.equal(sources, targets) for n, sources in read if n == m] for m, targets in added]
    return any(found and not any(found) for found in alike)


def _find_index(op: Op) -> tuple[int, Tensor] | None:
    """Return the number of tokens from which `op` selects, and the selected indices; None if it selects no tokens."""
    source, *args = op.args[:3]
    if isinstance(args[0], int):
        dim, index = args[0] % len(source.shape), args[1]
    else:  # of x[i]
        chosen = [(k, value) for k, value in enumerate(args[0]) if value is not None]
        dim, index = chosen[0] if len(chosen) == 1 else (0, None)
    if not isinstance(index, Value) or index.tensor.dtype == torch.bool or dim == len(source.shape) - 1:
        return None
    if not source.tensor.is_floating_point() or not op.out.has_data or not index.tensor.numel():
        return None
    rows = index.tensor.movedim(dim, 0) if len(index.shape) == len(source.shape) else index.tensor
    return source.shape[dim], rows.reshape(len(rows), -1)[:, 0]
