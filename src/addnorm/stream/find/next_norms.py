"""The norms that follow the end of a stream, and which of its tokens they read.

Between a stream and its final norm a model may drop tokens (registers, padding, all but the last one), reorder them or join
others to them. The final norm then acts on the tokens that remain. Which those are is computed: the elements of the end are
numbered, and the numbers are moved as the elements are. A norm of a mean of tokens, or of some features, is no norm of tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from addnorm.stream.dataflow.graph import DATA, PARAMETER, Op, Value
from addnorm.stream.find.functions import run_op
from addnorm.stream.find.moves import CUTS, JOINS
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.operators import TRANSPARENT, Factor, is_mixing, match_factor, strip_views
from addnorm.stream.find.regions import Regions

__all__ = ["NextNorm", "find_pooled_norm", "list_next_norms", "select_norm"]

OTHER = 0  # label of an element that is not one of the stream's


@dataclass
class NextNorm:
    """Norm that reads a state or some of its tokens.

    Attributes:
        norm: the norm.
        factors: factors between the state and the norm.
        tokens: numbers of the tokens that it reads; None where they are not known.
        num_tokens: number of tokens that the state has.
        num_others: number of norms that read other tokens.
    """

    norm: Norm
    factors: list[Factor] = field(default_factory=list)
    tokens: frozenset[int] | None = None
    num_tokens: int = 0
    num_others: int = 0

    @property
    def is_partial(self) -> bool:
        """Whether some tokens of the state are not read."""
        return self.tokens is not None and len(self.tokens) < self.num_tokens


@dataclass
class _Carried:
    """Value that has elements of the state: their numbers, or None if they are not known, and the factors on the way."""

    labels: Tensor | None
    factors: list[Factor]


def list_next_norms(state: Value) -> list[NextNorm]:
    """Return the norms that read a state, its views, some of its tokens, its tokens with others, or a multiple of it."""
    numel = state.tensor.numel()
    carried = {state: _Carried(torch.arange(1, numel + 1).reshape(state.shape) if numel else None, [])}
    found: dict[Norm, NextNorm] = {}
    todo, seen = [(op.index, op) for op in {*state.users}], {*state.users}
    heapq.heapify(todo)
    while todo:
        _, op = heapq.heappop(todo)  # in the order of the run: all parts of a join are known
        value = next(v for v in op.inputs if v in carried)
        if op.norms:
            norm = min(op.norms, key=lambda norm: norm.y.index)  # graph.py does not import Norm
            d, labels = norm.x.shape[-1], carried[value].labels
            tokens = _find_tokens(labels, state) if labels is not None and labels.shape[-1] == d else None
            if tokens is None or tokens:
                found.setdefault(norm, NextNorm(norm, carried[value].factors, tokens, numel // d))
            continue
        after = _follow(op, value, carried) if op.outputs else []
        for out, of_out in zip(op.outputs, after, strict=False):
            carried[out] = of_out
            for user in {*out.users} - seen:
                seen.add(user)
                heapq.heappush(todo, (user.index, user))
    return [*found.values()]


def _follow(op: Op, value: Value, carried: Mapping[Value, _Carried]) -> list[_Carried]:
    """Return what the outputs of an operator carry that moves a value or multiplies it; nothing for other operators."""
    out, before = op.outputs[0], carried[value]
    product = match_factor(op)
    labels: Sequence[Tensor | None] = [before.labels]
    factors = before.factors
    if op.name in JOINS or (op.name in CUTS and op.inputs[0] is value):
        keeps = out.shape[-1:] == value.shape[-1:] if op.name in JOINS else out.shape == value.shape
        labels = _move_labels(op, carried) or [None] * keeps
    elif op.name in TRANSPARENT:
        labels = _move_labels(op, carried) or [None]
    elif product is not None and product[0] is value:
        factors = [*factors, product[1]]
    elif strip_views(out) is out:
        return []
    return [_Carried(of_out, factors) for of_out in labels]


def _move_labels(op: Op, carried: Mapping[Value, _Carried]) -> list[Tensor] | None:
    """Return the labels of the outputs of a move; None if they are not known."""
    values: dict[Value, Tensor] = {}
    for value in op.inputs:
        if value in carried:
            labels = carried[value].labels
            if labels is None:
                return None
            values[value] = labels
        else:
            values[value] = (
                torch.full(value.shape, OTHER) if value.tensor.is_floating_point() else value.tensor.detach().cpu()
            )
    try:
        return [*run_op(op, values)]
    except Exception:  # of any kind: the operator cannot be computed again
        return None


def _find_tokens(labels: Tensor, state: Value) -> frozenset[int] | None:
    """Return the tokens that the rows are or have parts of (passages.py); empty if a row has numbers of several tokens."""
    rows = labels.reshape(-1, labels.shape[-1])
    has_own = rows != OTHER
    rows, has_own = rows[has_own.any(-1)], has_own[has_own.any(-1)]
    if not len(rows):
        return frozenset()
    first = (
        torch.where(has_own, rows, rows.amax(-1, keepdim=True)) - 1
    )  # what is joined counts as the last of the row's own
    places = torch.unravel_index(first, state.shape)
    for axis, size in enumerate(state.shape):
        others = [place for k, place in enumerate(places) if k != axis]
        if size == rows.shape[-1] and all(bool((place == place[:, :1]).all()) for place in others):
            strides = torch.empty(state.shape, device="meta").stride()
            return frozenset((first[:, 0] - places[axis][:, 0] * strides[axis]).tolist())
    return frozenset()


def select_norm(candidates: Sequence[NextNorm], regions: Regions) -> tuple[NextNorm, bool]:
    """Select the norm that leads to the model's output, not that of a sublayer that reads the stream.

    Returns:
        The norm, and whether another norm of the same tokens leads to the output as well.
    """
    if len(candidates) > 1:
        candidates = [c for c in candidates if not regions.is_read_only([c.norm.y])] or candidates
    returned = [c for c in candidates if regions.is_returned(c.norm.y)] if len(candidates) > 1 else []
    candidates = returned or candidates
    first = max(candidates, key=lambda c: len(c.tokens or ()))
    first.num_others = len(candidates) - 1
    others = [c.tokens for c in candidates if c is not first]
    return first, any(tokens is None or first.tokens is None or tokens & first.tokens for tokens in others)


def find_pooled_norm(state: Value, regions: Regions) -> tuple[Norm, Op] | None:
    """Return a norm outside of the sublayers that reads what other operators compute from a state, and the first of these.

    A product with a learned matrix ends the search: its output is no state.
    """
    todo: list[tuple[Value, Op | None]] = [(state, None)]
    seen: set[Op] = set()
    while todo:
        value, first = todo.pop(0)
        for op in dict.fromkeys(value.users):
            if op in seen or op in regions.inner or op in regions.path or not op.outputs:
                continue
            seen.add(op)
            whole = [norm for norm in op.norms if norm.x.shape[-1:] == state.shape[-1:]]
            if whole and first is not None:
                return whole[0], first
            if not is_mixing(op) or not any(v.kind & PARAMETER and not v.kind & DATA for v in op.inputs):
                step = first if first is not None or op.name in TRANSPARENT else op
                todo += [(out, step) for out in op.outputs if out.tensor.is_floating_point()]
    return None
