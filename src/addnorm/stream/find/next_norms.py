"""The norms that follow the end of a stream, and which of its tokens they read.

Between a stream and its final norm a model may drop tokens (registers, padding, all but the last one), reorder them or join
others to them. The final norm then acts on the tokens that remain. To find these tokens, the elements of the end are numbered,
and the operators are run again on the numbers. A norm of a mean of tokens, or of only some features, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from addnorm.stream.dataflow.arithmetic import Factor, has_numbers, is_view, match_factor
from addnorm.stream.dataflow.graph import Op, Value, walk
from addnorm.stream.dataflow.replay import move_labels
from addnorm.stream.find.norm import Norm


@dataclass(frozen=True)
class Regions:
    """Operators and results of a run, grouped by their role in the streams.

    Attributes:
        inner: the operators of sublayers.
        path: the operators of the streams' adds.
        results: the values that the model returns.
    """

    inner: Set[Op]
    path: Set[Op]
    results: Set[Value]

    def is_read_only(self, values: Iterable[Value]) -> bool:
        """Return whether `values` are used in sublayers only, not directly in results of the model or adds of a stream."""
        reached = _walk_users(values, self.inner)
        return not any(value in self.results or not self.path.isdisjoint(value.users) for value in reached)

    def is_used(self, value: Value) -> bool:
        """Return whether a result of the model depends on `value`; True if `results` is empty."""
        return not self.results or any(v in self.results for v in _walk_users([value]))

    def is_returned(self, value: Value) -> bool:
        """Return whether the model returns `value`, some of its tokens or their mean, not only what a head computes from them."""
        return any(v in self.results for v in _walk_users([value], self.inner, may_mix=False))


def _walk_users(values: Iterable[Value], without: Set[Op] = frozenset(), may_mix: bool = True) -> Iterator[Value]:
    """Yield `values` and the values that are computed from them.

    Outputs of operators in `without` are left out. If not `may_mix`, so are outputs of operators that mix tokens or features.
    """

    def follow(value: Value) -> list[Value]:
        users = [op for op in value.users if op not in without and (may_mix or "mixing" not in op.traits)]
        return [out for op in users for out in op.outputs]

    return walk(values, follow)


@dataclass
class NextNorm:
    """Norm that comes next after a state of the stream, and the tokens of the state that it reads.

    Attributes:
        norm: the norm.
        factors: factors between the state and the norm.
        tokens: numbers of the tokens that the norm reads; None if they are not known.
        num_tokens: number of tokens of the state.
        num_others: number of other norms of the state that lead to the model's output.
        is_ambiguous: whether one of these other norms reads, or may read, some of the same tokens.
    """

    norm: Norm
    factors: list[Factor] = field(default_factory=list)
    tokens: frozenset[int] | None = None
    num_tokens: int = 0
    num_others: int = 0
    is_ambiguous: bool = False

    @property
    def is_partial(self) -> bool:
        """Whether the norm reads only some tokens of the state."""
        return self.tokens is not None and len(self.tokens) < self.num_tokens


# The labels of a state's elements in a later value (None if they are not known), and the factors between the two.
Carried = tuple[Tensor | None, list[Factor]]


def list_next_norms(state: Value) -> list[NextNorm]:
    """Return the norms that read a state, its views, some of its tokens, its tokens with others, or a multiple of it."""
    numel = state.tensor.numel()
    labels = torch.arange(1, numel + 1, dtype=torch.float64).reshape(state.shape) if numel else None
    carried: dict[Value, Carried] = {state: (labels, [])}
    found: dict[Norm, NextNorm] = {}
    later = walk(state.users, lambda op: [user for out in op.outputs for user in out.users])
    for op in sorted(later, key=lambda op: op.index):
        value = next((v for v in op.inputs if v in carried), None)
        if value is None:
            continue
        if op.norms:
            norm = op.norms[0]
            d, (labels, factors) = norm.x.shape[-1], carried[value]
            tokens = _find_tokens(labels, state) if labels is not None and labels.shape[-1] == d else None
            if tokens is None or tokens:
                found.setdefault(norm, NextNorm(norm, factors, tokens, numel // d))
        elif op.outputs:
            carried.update(zip(op.outputs, _follow(op, value, carried), strict=False))
    return [*found.values()]


def _follow(op: Op, value: Value, carried: Mapping[Value, Carried]) -> list[Carried]:
    """Return the labels and factors of each output if `op` moves or multiplies `value`, else [].

    Labels say from which element of the state each element came (None if unknown); factors are those since the state.
    """
    out, (before, factors) = op.out, carried[value]
    product = match_factor(op)
    if "view" in op.traits:
        keeps = True
    elif "join" in op.traits:
        keeps = out.shape[-1:] == value.shape[-1:]
    elif "cut" in op.traits and op.inputs[0] is value:
        keeps = out.shape == value.shape
    elif product is not None and product.x is value:
        return [(before, [*factors, product])]
    else:
        return [carried[value]] if is_view(op) else []
    inputs = [v for v in op.inputs if v in carried]
    known = {v: labels for v in inputs if (labels := carried[v][0]) is not None}
    try:
        moved: Sequence[Tensor | None] = move_labels(op, known) if len(known) == len({*inputs}) else [None] * keeps
    except Exception:  # of any kind: the operator cannot be computed again
        moved = [None] * keeps
    return [(labels, factors) for labels in moved]


def _find_tokens(labels: Tensor, state: Value) -> frozenset[int] | None:
    """Return which tokens of `state` the labels belong to; an empty set if the last dimension mixes several tokens."""
    rows = labels.reshape(-1, labels.shape[-1]).long()
    has_own = rows != 0
    rows, has_own = rows[has_own.any(-1)], has_own[has_own.any(-1)]
    if not len(rows):
        return frozenset()
    # An element without a label (0) was joined to the token. It gets the largest label of the token.
    first = torch.where(has_own, rows, rows.amax(-1, keepdim=True)) - 1
    places = torch.unravel_index(first, state.shape)
    axes = [k for k, place in enumerate(places) if not bool((place == place[:, :1]).all())]
    if math.prod(state.shape[k] for k in axes) != rows.shape[-1]:
        return frozenset()
    strides = torch.empty(state.shape, device="meta").stride()
    offset = sum(places[k][:, 0] * strides[k] for k in axes)
    return frozenset((first[:, 0] - offset).tolist())


def select_norm(candidates: Sequence[NextNorm], regions: Regions) -> NextNorm:
    """Return the norm that leads to the model's output, in preference to norms that only sublayers read.

    Set its `num_others` and `is_ambiguous`.
    """
    candidates = [c for c in candidates if not regions.is_read_only([c.norm.y])] or candidates
    candidates = [c for c in candidates if regions.is_returned(c.norm.y)] or candidates
    first = max(candidates, key=lambda c: len(c.tokens or ()))
    first.num_others = len(candidates) - 1
    others = [c.tokens for c in candidates if c is not first]
    first.is_ambiguous = any(tokens is None or first.tokens is None or tokens & first.tokens for tokens in others)
    return first


def find_pooled_norm(state: Value, regions: Regions) -> tuple[Norm, Op] | None:
    """Return the norm of a pooled state, such as mean(x), and the operator that pools; None if there is none.

    A product with a learned matrix ends the search, since the output of such a product is no state.
    """
    todo: list[tuple[Value, Op | None]] = [(state, None)]
    seen: set[Op] = set()
    for value, first in todo:
        for op in value.users:
            if op in seen or op in regions.inner or op in regions.path or not op.outputs:
                continue
            seen.add(op)
            whole = [norm for norm in op.norms if norm.x.shape[-1:] == state.shape[-1:]]
            if whole and first is not None:
                return whole[0], first
            if "mixing" not in op.traits or not any(v.is_learned for v in op.inputs):
                step = first if first is not None or "view" in op.traits else op
                todo += [(out, step) for out in op.outputs if has_numbers(out)]
    return None
