"""Coverage of the streams: everything that happens to a stream on its way through the model is in its rows, or is a gap.

A value *carries* another one if it has its numbers, up to moves, norms and elementwise functions, and no operator in between
mixes tokens or features. Three walks over the captured run look for steps that no row contains:

    sums      an add of p and q, where q was computed by a sublayer from a value that p carries, is a residual add. It must be
              the add of a site, or be in a sublayer.
    starts    x_0 of a stream must not carry the state of another stream, or a residual sum that is not understood, unless it
              has all or some tokens of it.
    states    what carries a state, from x_0 to x_L and from x_L to the model's output, must not be summed with something else,
              and its tokens must not be replaced by values computed from the stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch.utils import _pytree as pytree

from addnorm.stream.dataflow.graph import DATA, PARAMETER, Flow, Op, Value
from addnorm.stream.find.adds import PARTIAL, Add
from addnorm.stream.find.chain import Chain, Selection
from addnorm.stream.find.interpolation import match_interpolation
from addnorm.stream.find.moves import find_moved, is_move, list_joined, strip_moves
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.operators import (
    is_ancestor,
    is_mixing,
    match_factor,
    match_terms,
    strip_views,
)  # fmt: skip
from addnorm.stream.find.passages import keeps_features
from addnorm.stream.find.paths import find_ops_between
from addnorm.stream.find.regions import Regions
from addnorm.stream.find.sums import BATCH_NORM, CENTRED, LONE_ADD, explain_sum, is_batch_normed, is_centring

__all__ = ["Gap", "find_gaps", "list_carried", "list_inner_ops"]

SUM = "a sum of a value and what was computed from it, which is no add of a sublayer"
CHANGED = "a function of the end of the stream is normalized: the norm before the output is no final norm of the stream"
TWO_FUNCTIONS = (
    "the stream begins with a sum of two functions of another stream, as of a projection and a sublayer's output"
)
CONTINUED = "the stream begins with a function of the end of another stream, not with a product or with the end itself"
RESIZED = "the stream begins with features of the end of another stream, cut, joined or padded"
STARTS_IN_SUM = "the stream begins with a residual sum that is not understood"
ADDED = "something that no sublayer of the stream wrote is added to the stream after its last add"
REPLACED = "tokens of the stream are replaced by values that were computed from it"

# Operators of the output's shape that combine elements.
REDUCING = {
    "softmax", "_softmax", "_log_softmax", "_safe_softmax", "sort", "argsort", "cummax", "cummin",
}  # fmt: skip


class Gap(NamedTuple):
    """Operator that changes a stream, or may, and is in no row.

    Attributes:
        op: the operator.
        reason: what it does.
        chains: indices of the streams that it concerns.
    """

    op: Op
    reason: str
    chains: frozenset[int]


def list_inner_ops(chain: Chain) -> set[Op]:
    """Return the operators inside the sublayers of a stream, with those of their norms."""
    inner: set[Op] = set()
    for sublayers in chain.sublayers:
        for sublayer in sublayers:
            inner.update(sublayer.ops, sublayer.write_path.ops)
    return inner


def find_gaps(flow: Flow, norms: Sequence[Norm], adds: Selection) -> list[Gap]:
    """Find the operators that change a stream and are in no row."""
    chains = adds.chains
    coverage = _Coverage(flow, norms, adds)
    sums = [*coverage.find_sums()]
    unexplained = {gap.op for gap in sums}
    gaps = [*sums]
    for k, chain in enumerate(chains):
        gaps += coverage.check_start(k, chain, unexplained)
    for k in range(len(chains)):
        gaps += coverage.check_states(k, unexplained)
    return gaps


class _Coverage:
    """The operators of a run that are accounted for, and the walks over the others."""

    def __init__(self, flow: Flow, norms: Sequence[Norm], adds: Selection) -> None:
        chains = adds.chains
        self.flow = flow
        self.chains = chains
        self.states: dict[Value, int] = {}  # the stream after each add, and after each norm on it
        self.inner: set[Op] = set()
        self.path: set[Op] = set()
        for k, chain in enumerate(chains):
            self.inner |= list_inner_ops(chain)
            for add, after, norms_out in zip(chain.adds, [*chain.adds[1:], None], chain.norms_out, strict=True):
                self.path.update(_list_add_ops(add))
                if after is not None:
                    self.path.update(find_ops_between(add.out, after.x))
                self.states |= dict.fromkeys([add.out, *(norm.y for norm in norms_out)], k)
            for add in chain.dual_adds:
                self.path.update(_list_add_ops(add))
        self.of_norms = {op for norm in norms for op in norm.ops}
        self.left = {add.op for add in adds.left}
        self.reads = {add.op for add in adds.reads}
        results = {v for v in pytree.tree_leaves(flow.result) if isinstance(v, Value)}
        self.regions = Regions(self.inner, self.path, results)

    # Sums.

    def find_sums(self) -> Iterator[Gap]:
        """Yield the residual sums that are in no row and in no sublayer."""
        known = self.path | self.inner | self.of_norms | self.reads
        known |= _list_users(self.flow, self.chains, known)
        known |= {
            inner for op in self.flow.ops if (found := match_interpolation(op)) is not None for inner in found.ops
        }
        for op in self.flow.ops:
            if op in known:
                continue
            carried = [(q, list_carried(p)) for p, q in _list_operands(op)]
            reason = (BATCH_NORM if is_batch_normed(op) else LONE_ADD) if op in self.left else explain_sum(op)
            if reason is None and any(_is_computed_from(q, values) for q, values in carried):
                reason = SUM
            if reason is not None:
                reason = CENTRED if is_centring(op) else reason
                yield Gap(
                    op, reason, frozenset(self.states[v] for _, values in carried for v in values if v in self.states)
                )

    # The start of a stream.

    def check_start(self, k: int, chain: Chain, unexplained: set[Op]) -> Iterator[Gap]:
        """Yield a gap if x_0 carries the state of another stream, or a sum that is not understood."""
        todo = [(chain.adds[0].x, True)]
        seen: set[tuple[Value, bool]] = set()
        width = chain.layout.width
        while todo:
            value, is_moved = item = todo.pop()
            if item in seen:
                continue
            seen.add(item)
            other = self.states.get(value)
            if other is not None and other != k:
                if (
                    not is_moved
                    or self.chains[other].layout.width != width
                    or not keeps_features(self.chains[other], value, chain.adds[0].x)
                ):
                    reason = CONTINUED if self.chains[other].layout.width == width else RESIZED
                    yield Gap(chain.adds[0].op, reason, frozenset((k, other)))
                continue
            op = value.op
            if op is None:
                continue
            if op in unexplained or (op not in self.inner and op not in self.path and _grows_from_parameter(op)):
                yield Gap(op, STARTS_IN_SUM, frozenset((k,)))
                continue
            if op not in self.inner and op not in self.path and (ends := self._find_common_ends(k, op)):
                yield Gap(op, TWO_FUNCTIONS, frozenset((k, *ends)))
                continue
            sources = [(v, False) for v in op.inputs[:1]] if op.name in REDUCING else _list_sources(value)
            todo += [(v, is_moved and keeps) for v, keeps in sources]

    def _find_common_ends(self, k: int, op: Op) -> set[int]:
        """Return the other streams on whose last state both operands of a sum depend."""
        operands = [p for p, _ in _list_operands(op)]
        ends = {j: chain.find_end(-1) for j, chain in enumerate(self.chains) if j != k} if operands else {}
        return {j for j, end in ends.items() if all(is_ancestor(end, p) for p in operands)}

    # The states of a stream.

    def check_states(self, k: int, unexplained: set[Op]) -> Iterator[Gap]:
        """Yield what is done to the values that carry a state, outside of the rows."""
        starts = {value for value, of in self.states.items() if of == k}
        todo = [(value, False, False) for value in starts]
        seen: set[Value] = set()
        while todo:
            value, is_normed, is_changed = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            for op in dict.fromkeys(value.users):
                if op in self.inner or op in self.path or not op.outputs:
                    continue
                out = op.outputs[0]
                if op.norms:
                    if is_changed and not is_normed and not self.regions.is_read_only([norm.y for norm in op.norms]):
                        yield Gap(op, CHANGED, frozenset((k,)))
                    todo += [(norm.y, True, is_changed) for norm in op.norms]
                elif out.shape[-1:] != value.shape[-1:] and op not in self.left and not _list_operands(op):
                    continue
                elif (joined := list_joined(op)) and value in joined:
                    if self._joins_older_state(k, joined) and not self.regions.is_read_only(op.outputs):
                        yield Gap(op, PARTIAL, frozenset((k,)))
                    elif (
                        op.name != "stack"
                        and any(self._is_replacement(k, v) for v in joined if v is not value)
                        and not self.regions.is_read_only(op.outputs)
                    ):
                        yield Gap(op, REPLACED, frozenset((k,)))
                    else:
                        todo.append((out, is_normed, is_changed))
                elif operands := [(p, q) for p, q in _list_operands(op) if p is value]:
                    is_injection = not is_normed and any(self._is_injection(q) for _, q in operands)
                    if is_injection and op not in unexplained and not self.regions.is_read_only(op.outputs):
                        yield Gap(op, ADDED, frozenset((k,)))
                elif carried := [keeps for source, keeps in _list_sources(out) if source is value]:
                    keeps_numbers = match_factor(op) is not None or carried[0]
                    todo += [(v, is_normed, is_changed or not keeps_numbers) for v in op.outputs]

    def _joins_older_state(self, k: int, parts: Sequence[Value]) -> bool:
        """Return whether a state is joined with some tokens of another state of its stream."""
        starts = {strip_moves(add.x) for add in self.chains[k].adds}
        wholes = [next((v for v in _list_moved(part) if v in self.states or v in starts), None) for part in parts]
        of_stream = {part: v for part, v in zip(parts, wholes, strict=True) if v and self.states.get(v, k) == k}
        return len({*of_stream.values()}) > 1 and any(strip_views(part) is not v for part, v in of_stream.items())

    def _is_replacement(self, k: int, value: Value) -> bool:
        """Return whether tokens that are joined to a state were computed from the stream, and are no state themselves."""
        if strip_moves(value) in self.states or any(v in self.states for v in _list_moved(value)):
            return False
        return any(
            is_ancestor(state, value) for state, of in self.states.items() if of == k and state.index < value.index
        )

    @staticmethod
    def _is_injection(value: Value) -> bool:
        return value.kind & (DATA | PARAMETER) == DATA | PARAMETER


def _list_add_ops(add: Add) -> Iterator[Op]:
    """Yield the operators of an add: of its sum, of partial sums, and between x and the sum."""
    yield add.op
    yield from (
        value.op for value in add.op.inputs if add.op.name in ("sum", "mean") and value.op is not None
    )  # of a stack
    yield from add.residual_path.ops
    for path in (add.residual_path, *(write.path for write in add.writes)):
        yield from (term.op for term in path.terms if term.op is not None)
    for write in add.writes:
        yield from write.path.ops


def _list_operands(op: Op) -> list[tuple[Value, Value]]:
    """Return the pairs of operands of a sum of two values that both depend on the data, and are no multiples of one."""
    if match_factor(op) is not None:
        return []
    if op.name in ("index_add", "scatter_add", "addcdiv") and len(op.inputs) > 1:
        terms = [op.inputs[0], op.inputs[-1]]
    elif (interpolation := match_interpolation(op)) is not None:
        terms = [interpolation.x, interpolation.y]
    elif (matched := match_terms(op)) is not None:
        terms = [term.value for term in matched]
    else:
        return []
    if not all(value.kind & DATA and value.tensor.is_floating_point() for value in terms):
        return []
    return [(terms[0], terms[1]), (terms[1], terms[0])]


def _grows_from_parameter(op: Op) -> bool:
    """Return whether an operator adds to a parameter, such as learned queries, what was computed from it and the data."""
    terms = [term.value for term in match_terms(op) or ()]
    return any(
        p.kind & (DATA | PARAMETER) == PARAMETER and q.kind & DATA and is_ancestor(strip_moves(p), q)
        for p, q in zip(terms, reversed(terms), strict=True)
        if len(terms) == 2
    )


def _list_sources(value: Value) -> list[tuple[Value, bool]]:
    """Return the values that a value carries in one step, each with whether it only moves or norms their numbers."""
    op = value.op
    if op is None:
        return []
    if value.norm is not None:
        return [(value.norm.x, True)]
    moved = op.inputs[0] if strip_views(value) is not value else find_moved(op)  # x + 0 is a view
    if moved is not None:
        return [(moved, moved.shape[-1:] == value.shape[-1:] or len(moved.shape) != len(value.shape))]
    if joined := list_joined(op):
        return [(v, True) for v in joined if v.kind & DATA]
    product = match_factor(op)
    if product is not None and product[1].kind in ("noise", "mask", "guard"):
        return [(product[0], True)]
    if is_mixing(op) or op.name in REDUCING:
        return []
    same = [v for v in op.inputs if v.kind & DATA and _count_numbers(v) == _count_numbers(value)]
    return [(v, False) for v in same]


def _count_numbers(value: Value) -> int:
    """Return the number of real numbers of a value, two for a complex one; 0 for integers."""
    is_complex = value.tensor.is_complex()
    return math.prod(value.shape) * (2 if is_complex else int(value.tensor.is_floating_point()))


def list_carried(value: Value) -> set[Value]:
    """Return the values that a value carries."""
    carried, todo = {value}, [value]
    while todo:
        for source, _ in _list_sources(todo.pop()):
            if source not in carried:
                carried.add(source)
                todo.append(source)
    return carried


def _list_moved(value: Value) -> Iterator[Value]:
    """Yield the values of which a value has all or some numbers."""
    todo, seen = [value], {value}
    while todo:
        value = todo.pop()
        yield value
        if value.op is not None and (is_move(value.op) or value.norm is not None):
            sources = [value.norm.x] if value.norm is not None else [find_moved(value.op), *list_joined(value.op)]
            new = [v for v in sources if v is not None and v not in seen]
            seen.update(new)
            todo += new


def _is_computed_from(value: Value, carried: set[Value]) -> bool:
    """Return whether a value depends on one of others through an operator that mixes tokens or features."""
    lowest = min((v.index for v in carried), default=0)
    todo, seen = [(value, False)], set()
    while todo:
        item = v, is_mixed = todo.pop()
        if item in seen or v.index < lowest:
            continue
        seen.add(item)
        if is_mixed and v in carried:
            return True
        if v.op is not None:
            todo += [(source, is_mixed or is_mixing(v.op)) for source in v.op.inputs]
    return False


def _list_users(flow: Flow, chains: Sequence[Chain], known: set[Op]) -> set[Op]:
    """Return the operators that use intermediate values of sublayers and write no stream: a cache, a loss, a recurrent state."""
    parts = [(chain.adds[k], sublayer) for chain in chains for k, sublayer in chain.numbered()]
    ends = {value for add, sublayer in parts for value in (sublayer.raw, sublayer.write_path.source, add.out)}
    ends |= {strip_views(end) for end in ends}
    intermediate = {out for _, sublayer in parts for op in sublayer.ops for out in op.outputs} - ends
    users: set[Op] = set()
    for op in flow.ops:
        if op not in known and any(value in intermediate for value in op.inputs):
            users.add(op)
            intermediate.update(op.outputs)
    return users
