"""Operators that change or may change a stream, and that no `Row` describes. `inspect` must report them all.

A value *carries* an earlier one if it has the numbers of the earlier one, up to moves, norms and elementwise functions, and no
operator in between mixes tokens or features. Three walks over the captured run look for steps that no `Row` describes:

    sums      an add of p and q, where q was computed by a sublayer from a value that p carries, is a residual add. It must be
              the add of a site, or be in a sublayer.
    starts    x_0 of a stream must not carry the state of another stream, unless x_0 has all or some tokens of that state, and
              must not carry a residual sum that is not understood.
    states    a value that carries a state, from x_0 to x_L and from x_L to the model's output, must not be summed with another
              value, and its tokens must not be replaced by values computed from the stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from functools import cache
from itertools import pairwise, permutations
from typing import NamedTuple

from addnorm.stream.dataflow.arithmetic import (
    find_moved,
    find_summed_stack,
    is_activation,
    is_ancestor,
    is_move,
    list_carried,
    list_joined,
    list_views,
    match_factor,
    match_terms,
    pair_terms,
    strip_moves,
    strip_views,
)
from addnorm.stream.dataflow.graph import Flow, Op, Value, find_ops_between, walk
from addnorm.stream.dataflow.registered_ops import suggest_equation
from addnorm.stream.find.adds import PARTIAL, REPLACED, Add
from addnorm.stream.find.chain import Selection
from addnorm.stream.find.next_norms import Regions
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.passages import PlacedChain, keeps_features
from addnorm.stream.find.paths import match_interpolation
from addnorm.stream.layout.dimensions import find_axis

SUM = "a sum of a value and what was computed from it, which is not understood as the add of a sublayer"
CHANGED = "a function of the end of the stream is normalized: the norm before the output is no final norm of the stream"
TWO_FUNCTIONS = (
    "the stream begins with a sum of two functions of another stream, as of a projection and a sublayer's output"
)
CONTINUED = "the stream begins with a function of the end of another stream, not with a product or with the end itself"
RESIZED = "the stream begins with features of the end of another stream, cut, joined or padded"
STARTS_IN_SUM = "the stream begins with a residual sum that is not understood"
ADDED = "something that no sublayer of the stream wrote is added to the stream after its last add"
LONE_ADD = "a single add x + f(x): neither another add nor a norm over the features is seen to continue its sum"
BATCH_NORM = "x' = BatchNorm(x + f(x)): the sum is normalized over other tokens too, which no row expresses"
GATED = "x' = g * x + ... with a gate g computed from the data, which no row expresses (a highway network, a recurrent cell)"
SHORTCUT = "x' = W x + ...: the stream is multiplied by a matrix over its last dimension, which no row expresses"
MIXED = "x' = A x + ... with a matrix A over another dimension than the last: it mixes states, tokens or parts of the features"
MULTIPLIED = "x' = A x + ... with a matrix A that mixes features, states or tokens, which no row expresses"
SEVERAL = "a sum of three or more values, some of which are computed from others, which no row expresses"
CENTRED = (
    "a mean is subtracted from the stream: a norm that is written out over another dimension than the last, or centred tokens; "
    "neither is in a row"
)
STRUCTURAL = (GATED, MIXED, MULTIPLIED, SHORTCUT, SEVERAL)  # reasons that explain a sum better than SUM
UNREGISTERED = "what {} computes is not known; if it adds or normalizes, register it: {}"


class Unexplained(NamedTuple):
    """Operator that changes or may change a stream, and that no `Row` describes.

    Attributes:
        op: the operator.
        reason: what the operator does.
        chains: indices of the streams that the operator may change.
    """

    op: Op
    reason: str
    chains: frozenset[int]


def find_unexplained(
    flow: Flow, norms: Sequence[Norm], adds: Selection, chains: Sequence[PlacedChain]
) -> list[Unexplained]:
    """Return the operators that change or may change a stream, and that no `Row` describes."""
    search = _Search(flow, norms, adds, chains)
    sums = [*search.find_sums()]
    of_sums = {found.op for found in sums}
    starts = [found for k in range(len(chains)) for found in search.check_start(k, of_sums)]
    states = [found for k in range(len(chains)) for found in search.check_states(k, of_sums)]
    return [*search.find_foreign(), *sums, *starts, *states]


class _Search:
    """Search for the operators that change or may change a stream, and that no `Row` describes."""

    def __init__(self, flow: Flow, norms: Sequence[Norm], adds: Selection, chains: Sequence[PlacedChain]) -> None:
        self.flow = flow
        self.chains = chains
        self.states: dict[Value, int] = {}  # the index of the stream of each state
        self.inner = adds.regions.inner
        self.path: set[Op] = set()
        for k, chain in enumerate(chains):
            self.path |= {op for add in (*chain.adds, *chain.dual_adds) for op in _list_add_ops(add)}
            for before, after in pairwise(chain.adds):
                self.path.update(find_ops_between(before.out, after.x))
            for add, norms_out in zip(chain.adds, chain.norms_out, strict=True):
                self.states |= dict.fromkeys([add.out, *(norm.y for norm in norms_out)], k)
        self.left = {add.op for add in adds.left}
        self.known = self.path | self.inner | {op for norm in norms for op in norm.ops} | {add.op for add in adds.reads}
        self.regions = Regions(self.inner, self.path, flow.list_results())

    # Operators of other libraries.

    def find_foreign(self) -> Iterator[Unexplained]:
        """Yield operators of other libraries that may add to a state or normalize it, and those whose equation is refuted.

        An operator may do so if it returns the shape of a state, and reads this state, no matrix, and either a vector over the
        features or a value computed from the state. Without a stream, any input counts as a state.
        """
        states = {strip_views(chain.adds[0].x): k for k, chain in enumerate(self.chains)}
        states |= {strip_views(value): k for value, k in self.states.items()}
        reasons: dict[str, str] = {}
        for op in self.flow.ops:
            if "opaque" not in op.traits or op.name.startswith("hidden::"):
                continue
            shapes = {out.shape for out in op.outputs}
            read = [v for v in op.inputs if v.has_data and v.tensor.is_floating_point() and v.shape in shapes]
            near = [v for v in read if strip_views(v) in states or not self.chains]
            sizes = {math.prod(v.shape) for v in op.inputs if not v.has_data}
            widths = {v.shape[-1] for v in near if v.shape[-1] >= max(sizes, default=0)}
            others = read if self.chains else [v for v in op.inputs if v.has_data and {*v.shape[-1:]} & widths]
            is_near = sizes & widths or (widths and any(is_ancestor(p, q) for p in near for q in others if p is not q))
            if op.note or is_near:
                reason = op.note or UNREGISTERED.format(op.name, suggest_equation(op.func))
                reason = reasons.setdefault(op.name, reason)  # the same for all calls, with the numbers of the first
                yield Unexplained(op, reason, frozenset(states[strip_views(v)] for v in near if self.chains))

    # Sums.

    def find_sums(self) -> Iterator[Unexplained]:
        """Yield the residual sums that no `Row` describes and that are in no sublayer."""
        interpolations = filter(None, map(match_interpolation, self.flow.ops))
        known = self.known | self._list_users() | {op for interpolation in interpolations for op in interpolation.ops}
        list_sources = cache(_list_sources)  # the operands of a sum of many streams carry the same values
        for op in self.flow.ops:
            if op in known:
                continue
            carried = [(q, list_carried_values(p, list_sources)) for p, q in _list_operands(op)]
            reason = (BATCH_NORM if _is_batch_normed(op) else LONE_ADD) if op in self.left else _explain_sum(op)
            if reason is None and any(is_computed_from(q, values) for q, values in carried):
                reason = SUM
            if reason is not None:
                chains = frozenset(self.states[v] for _, values in carried for v in values if v in self.states)
                yield Unexplained(op, CENTRED if _is_centring(op) else reason, chains)

    def _list_users(self) -> set[Op]:
        """Return operators outside the streams that read values inside sublayers, as a cache or an auxiliary loss does."""
        parts = [part for chain in self.chains for part in chain.list_sublayers()]
        ends = {value for part in parts for value in (part.raw, part.write_path.source, part.add.out)}
        ends |= {strip_views(end) for end in ends}
        intermediate = {out for part in parts for op in part.ops for out in op.outputs} - ends
        users: set[Op] = set()
        for op in self.flow.ops:
            if op not in self.known and not intermediate.isdisjoint(op.inputs):
                users.add(op)
                intermediate.update(op.outputs)
        return users

    # The start of a stream.

    def check_start(self, k: int, of_sums: Set[Op]) -> Iterator[Unexplained]:
        """Yield an `Unexplained` where stream `k` continues another stream, or begins in a sum that no `Row` describes.

        `of_sums` has the operators that `find_sums` yielded.
        """
        start, width = self.chains[k].adds[0], self.chains[k].layout.width
        operand = start.residual_path.terms[0].value
        todo = [(start.x, True)]
        seen: set[tuple[Value, bool]] = set()
        while todo:
            value, is_moved = item = todo.pop()
            if item in seen:
                continue
            seen.add(item)
            op, other = value.op, self.states.get(value, k)
            is_outside = op not in self.inner and op not in self.path
            if other != k:
                is_same = self.chains[other].layout.width == width
                if not (is_moved and is_same and keeps_features(self.chains[other], value, operand)):
                    yield Unexplained(start.op, CONTINUED if is_same else RESIZED, frozenset((k, other)))
            elif op is None:
                continue
            elif op in of_sums or (is_outside and _grows_from_parameter(op)):
                yield Unexplained(op, STARTS_IN_SUM, frozenset((k,)))
            elif is_outside and (ends := self._find_common_ends(k, op)):
                yield Unexplained(op, TWO_FUNCTIONS, frozenset((k, *ends)))
            else:
                sources = [(v, False) for v in op.inputs[:1]] if "combining" in op.traits else _list_sources(value)
                todo += [(v, is_moved and keeps) for v, keeps in sources]

    def _find_common_ends(self, k: int, op: Op) -> set[int]:
        """Return the indices of the streams, except `k`, on whose last state both operands of the sum `op` depend."""
        operands = [p for p, _ in _list_operands(op)]
        ends = {j: chain.find_end(-1) for j, chain in enumerate(self.chains) if j != k} if operands else {}
        return {j for j, end in ends.items() if all(is_ancestor(end, p) for p in operands)}

    # The states of a stream.

    def check_states(self, k: int, of_sums: Set[Op]) -> Iterator[Unexplained]:
        """Yield the operators that no `Row` describes and that change a value that carries a state of stream `k`."""
        todo = [(value, False, False) for value, of in self.states.items() if of == k]
        seen: set[Value] = set()
        while todo:
            value, is_normed, is_changed = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            for op in value.users:
                if op in self.inner or op in self.path or not op.outputs:
                    continue
                if op.norms:
                    reason = CHANGED if is_changed and not is_normed else None
                    todo += [(norm.y, True, is_changed) for norm in op.norms]
                    results = [norm.y for norm in op.norms]
                else:
                    reason, after = self._check_use(k, op, value, is_normed)
                    todo += [(v, is_normed, is_changed or changes) for v, changes in after]
                    results = op.outputs
                if reason is not None and op not in of_sums and not self.regions.is_read_only(results):
                    yield Unexplained(op, reason, frozenset((k,)))

    def _check_use(
        self, k: int, op: Op, value: Value, is_normed: bool
    ) -> tuple[str | None, list[tuple[Value, bool]]]:  # fmt: skip
        """Return the reason why an operator that no `Row` describes changes a state of stream `k`, or None.

        Also return the outputs that carry the state, each with whether its numbers have changed.
        """
        out = op.out
        operands = _list_operands(op)
        joined = list_joined(op)
        is_flat = is_move(op) and len(out.shape) != len(value.shape)
        if out.shape[-1:] != value.shape[-1:] and op not in self.left and not operands and not (is_flat and joined):
            return None, [(v, False) for v in op.outputs if is_flat]
        if value in joined:
            if self._joins_older_state(k, joined):
                return PARTIAL, []
            is_replaced = op.name != "stack" and any(self._is_replacement(k, v) for v in joined if v is not value)
            return (REPLACED, []) if is_replaced else (None, [(out, False)])
        if added := [q for p, q in operands if p is value]:
            return (ADDED if not is_normed and any(map(is_activation, added)) else None), []
        carried = [keeps for source, keeps in _list_sources(out) if source is value]
        return None, [(v, not (carried[0] or match_factor(op) is not None)) for v in op.outputs if carried]

    def _joins_older_state(self, k: int, parts: Sequence[Value]) -> bool:
        """Return whether the parts of a join are a state of stream `k` and some tokens of another state of this stream."""
        starts = {strip_moves(add.x) for add in self.chains[k].adds}
        wholes = [next((v for v in _walk_moved(part) if v in self.states or v in starts), None) for part in parts]
        of_stream = {part: v for part, v in zip(parts, wholes, strict=True) if v and self.states.get(v, k) == k}
        return len({*of_stream.values()}) > 1 and any(strip_views(part) is not v for part, v in of_stream.items())

    def _is_replacement(self, k: int, value: Value) -> bool:
        """Return whether `value`, whose tokens are joined to a state, is computed from stream `k` and is no state itself."""
        if any(v in self.states for v in _walk_moved(value)):
            return False
        own = [state for state, of in self.states.items() if of == k and state.index < value.index]
        return any(is_ancestor(state, value) for state in own)


def _list_add_ops(add: Add) -> Iterator[Op]:
    """Yield the operators of an add: of its sum, of partial sums, and between x and the sum."""
    paths = (add.residual_path, *(write.path for write in add.writes))
    stack = find_summed_stack(add.op)
    yield from (add.op, *([stack] if stack is not None else ()))
    yield from (op for path in paths for op in path.ops)
    yield from (term.op for path in paths for term in path.terms if term.op is not None)


def _list_operands(op: Op) -> list[tuple[Value, Value]]:
    """Return the operands of a sum as [(p, q), (q, p)] if both depend on the data; an empty list otherwise."""
    if match_factor(op) is not None:
        return []
    if (op.name == "addcdiv" or ("scatter" in op.traits and not is_move(op))) and len(op.inputs) > 1:
        terms = [op.inputs[0], op.inputs[-1]]
    elif (interpolation := match_interpolation(op)) is not None:
        terms = [interpolation.x, interpolation.y]
    else:
        terms = [term.value for term in match_terms(op) or ()]
    is_sum = all(value.has_data and value.tensor.is_floating_point() for value in terms)
    return [*permutations(terms, 2)] if is_sum else []


def _grows_from_parameter(op: Op) -> bool:
    """Return whether an operator is the first add to learned queries: a parameter plus a value computed from it and the data."""
    return any(
        p.value.is_learned and q.value.has_data and is_ancestor(strip_moves(p.value), q.value)
        for p, q in pair_terms(op)
    )


# Values that carry others.


def _list_sources(value: Value) -> list[tuple[Value, bool]]:
    """Return the inputs that `value` carries, each with whether the operator only moves or normalizes their numbers."""
    op = value.op
    if op is None:
        return []
    if value.norm is not None:
        return [(value.norm.x, True)]
    if (moved := find_moved(op)) is not None:
        return [(moved, moved.shape[-1:] == value.shape[-1:] or len(moved.shape) != len(value.shape))]
    if joined := list_joined(op):
        return [(v, True) for v in joined if v.has_data]
    product = match_factor(op)
    if product is not None and product.kind in ("noise", "mask", "guard"):
        return [(product.x, True)]
    if op.traits & {"mixing", "combining"}:
        return []
    return [(v, False) for v in op.inputs if v.has_data and not _list_sizes(v).isdisjoint(_list_sizes(value))]


def _list_sizes(value: Value) -> set[int]:
    """Return the number of elements, for a complex value also twice this number; an empty set for integers."""
    size = math.prod(value.shape)
    return {size, 2 * size} if value.tensor.is_complex() else {size} if value.tensor.is_floating_point() else set()


def list_carried_values(
    value: Value, list_sources: Callable[[Value], list[tuple[Value, bool]]] = _list_sources
) -> set[Value]:
    """Return `value` and the earlier values that reach it through moves, norms, masks and elementwise operators only."""
    return {*walk([value], lambda v: [source for source, _ in list_sources(v)])}


def _walk_moved(value: Value) -> Iterator[Value]:
    """Yield `value` and the earlier values from which its tokens were moved, also through norms."""

    def follow(v: Value) -> list[Value]:
        if v.norm is not None:
            return [v.norm.x]
        return list_carried(v) if v.op is not None and is_move(v.op) else []

    return walk([value], follow)


def is_computed_from(value: Value, carried: set[Value]) -> bool:
    """Return whether `value` depends on a value in `carried` through an operator that mixes tokens or features."""
    lowest = min((v.index for v in carried), default=0)

    def follow(item: tuple[Value, bool]) -> list[tuple[Value, bool]]:
        v, is_mixed = item
        return [(source, is_mixed or "mixing" in v.traits) for source in v.inputs if source.index >= lowest]

    return any(is_mixed and v in carried for v, is_mixed in walk([(value, False)], follow))


# Sums that are no residual add, and why.


def _explain_sum(op: Op) -> str | None:
    """Return why the sum `op` is no residual add: a gate or matrix on the residual, or many terms; None otherwise."""
    if (stack := find_summed_stack(op)) is not None:
        first, *others = stack.inputs
        return SEVERAL if len(others) > 1 and any(is_ancestor(first, part) for part in others) else None
    interpolation = match_interpolation(op)
    if interpolation is not None and interpolation.terms is None:
        x, y = interpolation.x, interpolation.y
        return GATED if is_ancestor(x, y) or is_ancestor(y, x) else None
    for p, q in pair_terms(op):
        product = strip_views(p.value).op
        if product is None or len(product.inputs) < 2:
            continue
        for x, factor in (product.inputs[:2], product.inputs[1::-1]):
            if math.prod(x.shape) != math.prod(op.out.shape) or not is_ancestor(x, q.value):
                continue
            if product.name == "mul" and is_activation(factor):
                return GATED
            if "pair" in product.traits:
                return _describe_product(product, x, p.value)
    return None


def _describe_product(op: Op, x: Value, operand: Value) -> str:
    """Return the reason for `op`, a product of x with a matrix. It depends on the dimension of x over which `op` sums."""
    if "product" not in op.traits:
        return MULTIPLIED
    out, base = op.out, strip_views(x)
    back = 1 if op.args[int("added" in op.traits)] is x else 2
    if (axis := find_axis(operand, out, len(operand.shape) - 1)) is not None:
        return SHORTCUT if axis == len(out.shape) - back else MIXED
    if (axis := find_axis(x, base, len(x.shape) - back)) is not None:
        return SHORTCUT if axis == len(base.shape) - 1 else MIXED
    return MULTIPLIED


def _is_batch_normed(op: Op) -> bool:
    """Return whether a sum, or a view of it, is normalized over the batch, or over other dimensions than the features."""
    views = list_views(op.out)
    return any({"normalizing", "channels_first"} <= user.traits for value in views for user in value.users)


def _is_centring(op: Op) -> bool:
    """Return whether an operator computes x - mean(x)."""
    terms = match_terms(op)
    if terms is None or terms[1].factor != -1.0:
        return False
    mean = strip_views(terms[1].value).op
    return mean is not None and mean.name in ("mean", "var_mean", "std_mean") and mean.inputs[0] is terms[0].value
