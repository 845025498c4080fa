"""How a tensor lies in memory, so that what a call returns lies as it did: views later in the graph count on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from addnorm.fusion.traced import given_to, numbers_of

__all__ = ["laid", "like", "order_of", "ordered", "same_layout", "turned"]


def like(given: Tensor) -> Tensor:
    """A tensor that lies as another does, with nothing in it."""
    size, stride = numbers_of(tuple(given.shape)), numbers_of(given.stride())
    return torch.empty_strided(size, stride, dtype=given.dtype, device="meta")


def order_of(tensor: Tensor) -> list[int]:
    """Its dimensions from the longest step to the shortest; as they are where they already lie so, or overlap."""
    usual = list(range(tensor.dim()))
    order = sorted(usual, key=tensor.stride().__getitem__, reverse=True)
    dense = not tensor.is_contiguous() and tensor.permute(order).is_contiguous()
    return order if dense else usual


def same_layout(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape and steps."""
    sizes = zip(one.shape, one.stride(), other.stride(), strict=True)
    return one.shape == other.shape and all(n < 2 or a == b for n, a, b in sizes)


def ordered(graph: fx.Graph, node: fx.Node, order: Sequence[int]) -> fx.Node:
    """A view with the dimensions in that order."""
    return _call(graph, "permute", node, tuple(order)) if list(order) != sorted(order) else node


def turned(graph: fx.Graph, node: fx.Node, order: Sequence[int]) -> fx.Node:
    """The dimensions back from that order."""
    return ordered(graph, node, sorted(order, key=list(order).__getitem__))


def laid(graph: fx.Graph, node: fx.Node, order: Sequence[int]) -> fx.Node:
    """The same numbers, with the dimensions in memory in that order."""
    return turned(graph, _call(graph, "contiguous", ordered(graph, node, order)), order)


def _call(graph: fx.Graph, name: str, node: fx.Node, *args: Any) -> fx.Node:
    new = graph.call_method(name, (node, *args))
    new.meta["example_value"] = getattr(given_to(node), name)(*args)
    return new
