"""Check of the passages of a stream from one sublayer to the next: whole tokens pass, and each feature stays in its place.

Between two sublayers a stream is viewed, cut, joined, masked and multiplied. The name of an operator shows neither the axis that
it moves nor from what a mask was computed. So each number of a state gets a label, its token and its feature, and the operators
are run again on the labels: a token that arrives must have all features of one token in their order, or no label (0).

A *guard*, such as a clamp, returns its input unless it binds. If a guard binds in the run, no `Row` expresses it. Otherwise the
guard is idle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from addnorm.stream.dataflow.arithmetic import get_number, is_ancestor, list_carried, match_factor
from addnorm.stream.dataflow.graph import Op, Value, walk
from addnorm.stream.dataflow.replay import move_labels
from addnorm.stream.find.adds import Add
from addnorm.stream.find.chain import Chain
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.stream_layout import StreamLayout
from addnorm.stream.find.sublayers import Sublayer

MOVED = "features of the stream are moved, cut or replaced on the way, which no row expresses"
CLAMPED = "values of the stream are clamped or replaced on the way, which no row expresses"
MASKED = "the stream is masked by what was computed from it, which no row expresses"

Axes = tuple[int, int]  # the first and the last dimension of the features, counted from the end


@dataclass(eq=False)
class PlacedChain(Chain):
    """Stream in a captured run with the dimensions of its values.

    Attributes:
        layout: the dimensions of features, tokens and sequences.
        passages: the passage to each add, and to the final norm.
    """

    layout: StreamLayout = field(kw_only=True)
    passages: list[Passage] = field(kw_only=True)


def place_chain(chain: Chain) -> PlacedChain:
    """Find the dimensions of a stream's values, correct the sublayers' kinds by them, and check its passages."""
    layout = StreamLayout(chain)
    for sublayer in chain.list_sublayers():
        if sublayer.kind == "attention" and layout.keeps_tokens_apart(sublayer):
            sublayer.kind = "feed-forward"
        if sublayer.kind == "feed-forward" and layout.mixes_tokens(sublayer):
            sublayer.kind = "other"
    # A norm of more features than the stream has reads several tokens that were joined along the features.
    wide = next((norm for norm in chain.final_norms if norm.x.shape[-1] > layout.width), None)
    if wide is not None and wide.x.op is not None:
        chain.final_norms, chain.next_norm, chain.pooled = [], None, (wide, wide.x.op)
    return PlacedChain(**vars(chain), layout=layout, passages=_check_passages(chain, layout))


def _check_passages(chain: Chain, layout: StreamLayout) -> list[Passage]:
    """Return the passages of a stream: to each of its adds, and from the last one to the final norm."""
    first, width = chain.adds[0].out, layout.width
    axes = _list_groups(first.shape, width, layout.axis)[0]
    passages = []
    for k, (add, sublayers) in enumerate(zip(chain.adds, chain.sublayers, strict=True)):
        passage = Passage(first, width) if k else _pass_start(chain, layout, axes)
        if k:
            axes = passage.pass_norms(chain.adds[k - 1].out, chain.norms_out[k - 1], add.x, axes)
            passage.check_reads(add, sublayers, axes)
            axes = passage.pass_ops(add.x, add.residual_path.ops, axes)
        for sublayer in sublayers:
            if sublayer.norm is not None:
                passage.pass_ops(sublayer.write_path.source, sublayer.write_path.ops, (-1, -1))
        passages.append(passage)
    passage = Passage(first, width)
    passage.pass_norms(chain.adds[-1].out, [*chain.norms_out[-1], *chain.final_norms], None, axes)
    return [*passages, passage]


def _pass_start(chain: Chain, layout: StreamLayout, axes: Axes) -> Passage:
    """Return the checked steps from x_0 to the first sum, in which the features have the dimensions `axes`."""
    add = chain.adds[0]
    for group in _list_groups(add.x.shape, layout.width, axes[1]):
        passage = Passage(add.out, layout.width)
        if passage.pass_ops(add.x, add.residual_path.ops, group) == axes and MOVED not in passage.reasons:
            return passage
    passage.reasons.setdefault(MOVED)
    return passage


def keeps_features(chain: PlacedChain, state: Value, target: Value) -> bool:
    """Return whether the tokens of `state` in `target`, a later value, are whole and have their features in order."""
    passage, layout = Passage(chain.adds[0].out, chain.layout.width), chain.layout.of(state)
    axis = chain.layout.axis if layout is None else layout.features[-1] - len(state.shape)
    passage.pass_norms(state, (), target, _list_groups(state.shape, chain.layout.width, axis)[0])
    return MOVED not in passage.reasons


def format_guard(op: Op) -> str:
    """Return a guard, an operator such as a clamp that rarely changes its input, with its numbers: "clamp(-6, 6)"."""
    numbers = [f"{x:g}" for x in map(get_number, [*op.args[1:], *op.kwargs.values()]) if x is not None]
    return f"{op.name}({', '.join(numbers)})" if numbers else op.name


@dataclass
class Passage:
    """Check of the steps of a stream from one state to the sum of the next add, or to the final norm.

    Attributes:
        first: the first sum of the stream. A mask that is computed from this sum depends on the stream.
        width: number of features.
        reasons: steps that no `Row` expresses, as text, each with its operator, or None if there are several operators.
        idle: guards that did not bind in this run.
        chosen: operators that select or sort tokens by indices that are computed from the stream.
        is_masked: whether tokens are set to a number by a mask that does not depend on the stream.
    """

    first: Value
    width: int
    reasons: dict[str, Op | None] = field(default_factory=dict)
    idle: list[Op] = field(default_factory=list)
    chosen: list[Op] = field(default_factory=list)
    is_masked: bool = False

    def pass_norms(self, source: Value, norms: Sequence[Norm], target: Value | None, axes: Axes) -> Axes:
        """Check the steps from `source` through `norms` to `target`, and return the dimensions of the features there."""
        for norm in norms:
            self._pass(source, norm.x, axes)
            source, axes = norm.y, (-1, -1)
        return axes if target is None else self._pass(source, target, axes)

    def pass_ops(self, source: Value, ops: Sequence[Op], axes: Axes) -> Axes:
        """Check `ops`, the operators after `source` (last one first), and return the dimensions of the features after them."""
        if not ops:
            return axes
        labels, value = _label(source.shape, axes), source
        for op in reversed(ops):
            (carried,) = list_carried(op.out)[:1] or (value,)
            shape = carried.shape if math.prod(carried.shape) >= labels.numel() else labels.shape
            labels = self._move(op, {carried: labels.expand(shape)}, source)
            value = op.out
        return self._locate(labels, axes)

    def check_reads(self, add: Add, sublayers: Sequence[Sublayer], axes: Axes) -> None:
        """Add a reason if a norm that reads the residual does not have the features in the last dimension of its input.

        `axes` are the dimensions of the features in the residual.
        """
        norms = [norm for sublayer in sublayers for norm in sublayer.reads.norms if add.read is add.x]
        for norm in norms:
            if self.width > 1 and Passage(self.first, self.width).pass_norms(add.x, (), norm.x, axes)[1] != -1:
                self.reasons.setdefault(MOVED)

    def _pass(self, source: Value, target: Value, axes: Axes) -> Axes:
        """Check the operators from `source` to `target`, and return the dimensions of the features in `target`."""
        if target is source:
            return axes
        labels = {source: _label(source.shape, axes)}
        values = walk([target], lambda value: [v for v in list_carried(value) if v.index > source.index])
        for value in sorted(values, key=lambda value: value.index):
            if value.op is not None and any(v in labels for v in list_carried(value)):
                labels[value] = self._move(value.op, labels, source, value.part)
        return self._locate(labels[target], axes) if target in labels else axes

    def _move(self, op: Op, labels: Mapping[Value, Tensor], source: Value, part: int | str = 0) -> Tensor:
        """Return the labels of output `part` of an operator.

        Record masks and guards, and indices that are computed from the stream.
        """
        out = op.out
        carried = list_carried(out)
        known = [labels[v] for v in carried if v in labels]
        product = match_factor(op)
        is_mask = op.name in ("where", "masked_fill", "masked_scatter")
        if product is not None and not is_mask:
            if product.kind == "guard":
                before, after = product.x.tensor.detach(), out.tensor.detach()
                changed = (before != after) & before.isfinite()
                if changed.any() or torch.equal(before, after):
                    self._add_reason(op, not bool(changed.any()), CLAMPED)
            return known[0]
        moved = move_labels(op, labels)
        new = moved[part] if isinstance(part, int) else moved[0]
        if is_mask:
            is_idle = any(torch.equal(new, one) for one in known)
            if self._is_computed(op.get("mask", op.get("condition")), source):
                self._add_reason(op, is_idle, MASKED)
                return known[0]
            self.is_masked |= not is_idle and all(v in labels or not v.kind for v in carried)
        else:
            indices = [v for v in op.inputs if v not in carried and not v.tensor.is_floating_point()]
            if any(self._is_computed(index, source) for index in indices):
                self.chosen.append(op)
        return new

    def _is_computed(self, selection: Value, source: Value) -> bool:
        """Return whether a mask or an index is computed from a state of the stream."""
        return is_ancestor(source, selection) or is_ancestor(self.first, selection)

    def _add_reason(self, op: Op, is_idle: bool, reason: str) -> None:
        if is_idle:
            self.idle.append(op)
        else:
            self.reasons.setdefault(reason, op)

    def _locate(self, labels: Tensor, axes: Axes) -> Axes:
        """Return the dimensions in which each token has its features in order; without such dimensions, add a reason."""
        for group in _list_groups(labels.shape, self.width, axes[1]):
            if _has_whole_tokens(_move_last(labels, group).flatten(group[0] - group[1] - 1), self.width):
                return group
        self.reasons.setdefault(MOVED)
        return axes


def _list_groups(shape: Sequence[int], width: int, last: int) -> list[Axes]:
    """Return the groups of adjacent dimensions whose sizes multiply to `width`, first those that end at dimension `last`.

    No group of several dimensions begins or ends with one of size 1.
    """
    groups = []
    for end in (last, *range(-1, -1 - len(shape), -1)):
        starts = [
            start for start in range(end, -1 - len(shape), -1) if start == end or 1 not in (shape[start], shape[end])
        ]
        groups += [(start, end) for start in starts if math.prod(shape[start : end + 1 or None]) == width]
    return [*dict.fromkeys(groups)] or [(-1, -1)]


def _move_last(labels: Tensor, axes: Axes) -> Tensor:
    """Return a view of a tensor with the dimensions from `axes[0]` to `axes[1]` moved to the end."""
    dims = [*range(axes[0], axes[1] + 1)]
    return labels.movedim(dims, [*range(-len(dims), 0)])


def _label(shape: Sequence[int], axes: Axes) -> Tensor:
    """Return a label for each element: 1, 2, 3, ... token by token, in float64, which every operator accepts."""
    labels = torch.empty([*shape], dtype=torch.float64)
    moved = _move_last(labels, axes)
    moved.copy_(torch.arange(1, labels.numel() + 1).reshape(moved.shape))
    return labels


def _has_whole_tokens(rows: Tensor, width: int) -> bool:
    """Return whether each vector along the last dimension has all labels of one token in order, or only zeros."""
    if rows.shape[-1] != width:
        return not rows.any()
    first = rows[..., :1]
    is_whole = (rows == first + torch.arange(width)) & ((first - 1) % width == 0)
    return bool((is_whole.all(-1) | (rows == 0).all(-1)).all())
