"""The states of a residual program: before and after each sublayer, the fewest carried values from which all later ones follow.

For n streams in one tensor a state is this tensor; for streams in separate tensors it is several values; where every sublayer
reads the outputs of all earlier ones, the state grows. A state is a minimum vertex cut of the graph of carried values, found by
augmenting paths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import pairwise

from addnorm.stream.dataflow.arithmetic import is_move
from addnorm.stream.dataflow.graph import DATA, Op, Value, walk
from addnorm.stream.program.carried import Carrier
from addnorm.stream.program.spine import (
    Spine,
    are_transposed,
    filter_ops,
    find_write,
    follow_tokens,
    join_writes,
    list_carried_inputs,
    trace_single,
)

_Node = tuple[Value, int]
# The uses of a value: the index of the operator, and its carried output, or None if it computes coefficients.
_Uses = dict[Value, list[tuple[int, Value | None]]]


def find_spine(carrier: Carrier) -> Spine | None:
    """Return the states and writes of the carried value that sums the most sources; None if it sums fewer than three."""
    known = carrier.known
    end = max(known, key=lambda value: (known[value].sources.bit_count(), value.index), default=None)
    if end is None or known[end].sources.bit_count() < 3:
        return None
    end = _find_whole(carrier, end)
    spine = Spine(carrier, end)
    whole = known[end].sources
    inside = {value for value, carried in known.items() if not carried.sources & ~whole}
    for source in carrier.find_sources(end):
        write = find_write(carrier, source, inside)
        spine.writes += [write] if write.reads else []
        spine.starts += [] if write.reads else [source]
    join_writes(spine)
    for write in spine.writes:
        write.value = follow_tokens(carrier, write.value)
        carrier.sources_set.add(write.value)
    before: set[Value] = set()
    for write in spine.writes:  # what an earlier sublayer read, as shared keys and values, is no read of the state
        write.reads = [value for value in write.reads if value not in before] or write.reads
        write.ops = filter_ops(carrier, write.ops, write.reads)
        before.update(write.reads)
    reads = [value for write in spine.writes for value in write.reads]
    spine.relevant = {*walk([end, *reads], lambda value: list_carried_inputs(carrier, value))}
    if spine.writes:
        _find_states(spine)
    return spine if spine.writes else None


def _find_whole(carrier: Carrier, end: Value) -> Value:
    """Return `end`; or if the model cut it to some of its tokens, as to the class token, the value before this cut."""
    for value, before in pairwise(trace_single(carrier, end, lambda op: is_move(op) or op.name in ("mul", "div"))):
        if carrier.count_streams(before) != carrier.count_streams(value):
            break
        end = before if "cut" in value.traits else end
    return end


def _find_states(spine: Spine) -> None:
    """Set the state before each sublayer, and the state after the last one."""
    carrier, writes, uses = spine.carrier, spine.writes, _list_uses(spine)
    state = spine.starts
    for k, write in enumerate(writes):
        available = {*spine.starts, *(earlier.value for earlier in writes[:k])}
        last = writes[k - 1].value if k else None
        targets = _find_live(spine, uses, available, write.start, last) | {*write.reads}
        most = len(state) + (k == 1)  # one value at the start may be two streams
        before, state = state, _cut(carrier, [*state, last] if last else state, targets, last)
        if last is not None and len(state) < most:  # a mix of streams that nothing reads later is a read
            kept = _find_sums(carrier, before, last, targets, targets)
            # But where a norm of the sum of two states follows, that sum is a state.
            is_normed = any(_move_forward(spine, uses, v, True, write.start, targets).norm is not None for v in state)
            state = kept if len(kept) == most and not is_normed else state
        moved = [_move_forward(spine, uses, value, True, write.start, targets) for value in state]
        spine.states.append(state := sorted(dict.fromkeys(moved), key=lambda value: value.index))
    last, available = writes[-1].value, {*spine.starts, *(write.value for write in writes)}
    live = _find_live(spine, uses, available, spine.end.index, last, only_coefficients=True)
    state = _find_sums(carrier, state, last, [spine.end], live)
    normed = {len(earlier): [value.norm is not None for value in earlier] for earlier in spine.states[1:]}
    whole = _cut(carrier, state, {spine.end})
    state = whole if any(normed.get(len(whole), ())) else state  # (x + f(x)) + h ends in a norm as in earlier layers
    pairs = zip(state, normed.get(len(state), [False] * len(state)), strict=True)
    spine.states.append([_move_forward(spine, uses, *pair, spine.end.index + 1, set()) for pair in pairs])


def _list_uses(spine: Spine) -> _Uses:
    """Return the uses of each relevant value, as pairs of the index and the output of the operator that uses it.

    The output is a relevant value that carries the used one. If the operator computes coefficients, None is in its place.
    """
    uses: _Uses = {}
    inside: set[Op] = {op for write in spine.writes for op in write.ops}
    coefficients = {*find_coefficient_ops(spine)}
    for out in spine.relevant:
        for value in list_carried_inputs(spine.carrier, out):
            uses.setdefault(value, []).append((out.index, out))
    for value in spine.relevant:
        ops = [op for op in value.users if op in coefficients and op not in inside]
        uses.setdefault(value, []).extend((op.index, None) for op in ops)
    return uses


def find_coefficient_ops(spine: Spine) -> list[Op]:
    """Return the operators that compute the coefficients of relevant values."""
    return find_leaves(spine, list_coefficients(spine))[1]


def list_coefficients(spine: Spine) -> list[Value]:
    """Return the coefficients of relevant values: operands that are not carried, other than those of norms."""
    found: dict[Value, None] = {}
    for value in spine.relevant:
        carried = list_carried_inputs(spine.carrier, value)
        if carried and value.op is not None and value.norm is None:
            found.update(dict.fromkeys(other for other in value.op.inputs if other not in carried))
    return [*found]


def find_leaves(spine: Spine, operands: Sequence[Value]) -> tuple[list[Value], list[Op]]:
    """Return the parameters and buffers from which `operands` are computed, and the operators that compute them.

    The search stops at the values of the streams.
    """

    def follow(value: Value) -> list[Value]:
        return [] if value in spine.relevant else value.inputs

    values = [*walk(operands, follow)]
    leaves = [value for value in values if value.op is None and value.name and not value.kind & DATA]
    ops = dict.fromkeys(value.op for value in values if value.op is not None and value not in spine.relevant)
    return sorted(leaves, key=lambda value: value.name), [*ops]


def _find_live(
    spine: Spine, uses: _Uses, available: Set[Value], now: int, last: Value | None, only_coefficients: bool = False
) -> set[Value]:
    """Return the values that a state before operator `now` must determine.

    These are the values that operators from `now` on use, and the values that contain the last write, `last`, and from which
    coefficients are computed after it. With `only_coefficients` they are only the latter.
    """
    carrier = spine.carrier
    since, own = (last.index, carrier.known[last].sources) if last is not None else (-1, -1)
    bits = carrier.join_sources(available)
    live: set[Value] = set()
    for value, of_value in uses.items():
        is_available = value.index < now and not carrier.known[value].sources & ~bits
        later = [index for index, out in of_value if index >= now] if not only_coefficients else []
        new = any(out is None and index > since for index, out in of_value) and carrier.known[value].sources & own
        if is_available and (later or new):
            live.add(value)
    return live


def _cut(carrier: Carrier, sources: Sequence[Value], targets: Set[Value], last: Value | None = None) -> list[Value]:
    """Return the minimum cut: the values with the fewest streams in all that lie on all paths from sources to targets.

    Of several such cuts it is one with the fewest values, and of these the one nearest to the sources. The last write, `last`,
    is in the cut only if every cut contains it: a state usually has the sum to which the write is added.
    """
    start = {*sources}
    region = _find_region(carrier, start, targets)
    own = carrier.known[last].sources if last is not None else 0
    capacities = {value: carrier.count_streams(value) * len(region) + 1 for value in region}
    most = sum(capacities.values())
    # A value is two nodes, and the edge between them has its capacity. Other edges have no limit.
    room: dict[tuple[_Node, _Node], int] = {}
    ends: dict[_Node, list[_Node]] = {}

    def connect(a: _Node, b: _Node, capacity: int) -> None:
        room[a, b], room[b, a] = capacity, 0
        ends.setdefault(a, []).append(b)
        ends.setdefault(b, []).append(a)

    for value, inputs in region.items():
        connect((value, 0), (value, 1), most if carrier.known[value].sources == own else capacities[value])
        for other in inputs:
            connect((other, 1), (value, 0), len(region) * most + 1)
    while True:
        parents: dict[_Node, _Node | None] = {(value, 0): None for value in sources if value in region}
        todo = deque(parents)
        node: _Node | None = None
        while todo:
            node = todo.popleft()
            if node[1] and node[0] in targets:
                break
            for end in ends[node]:
                if room[node, end] and end not in parents:
                    parents[end] = node
                    todo.append(end)
            node = None
        if node is None:
            return [value for value in region if (value, 0) in parents and (value, 1) not in parents]
        path = [node]
        while (before := parents[path[-1]]) is not None:
            path.append(before)
        edges = [*zip(path[1:], path, strict=False)]
        flow = min(room[edge] for edge in edges)
        for a, b in edges:
            room[a, b] -= flow
            room[b, a] += flow


def _find_region(carrier: Carrier, start: Set[Value], targets: Iterable[Value]) -> dict[Value, list[Value]]:
    """Return the values from which `targets` are computed, back to `start`, each with the inputs that its operator carries."""

    def follow(value: Value) -> list[Value]:
        return [] if value in start else list_carried_inputs(carrier, value)

    return {value: follow(value) for value in walk(targets, follow)}


def _find_sums(
    carrier: Carrier, state: Sequence[Value], last: Value, targets: Iterable[Value], live: Set[Value]
) -> list[Value]:
    """Return the state after the write `last`: the sums that contain it, and the earlier values that `targets` need.

    If `live` has a value of the write alone, coefficients are computed from it, and it is one more stream. If the streams and the
    write are concatenated before a product mixes them, as in `[A b] @ [X; w]`, the state is the result of this product.
    """
    region = _find_region(carrier, {*state, last}, targets)
    own = {value for value in region if carrier.known[value].sources == carrier.known[last].sources}
    if appended := own & live:
        return [*state, min(appended, key=lambda value: value.index)]
    sums: dict[Value, None] = {}

    def follow(value: Value) -> list[Value]:
        if value not in own and not own.isdisjoint(region[value]):
            sums[value] = None
            return []
        return region[value]

    beside = [value for value in walk(targets, follow) if value in state]
    if len(sums) == 1 and not beside:
        return _follow_join(carrier, region, next(iter(sums)), carrier.count_streams(*state))
    return sorted([*sums, *beside], key=lambda value: value.index)


def _follow_join(carrier: Carrier, region: Mapping[Value, list[Value]], joined: Value, n: int) -> list[Value]:
    """Return the first values with `n` streams in all that are computed from `joined`, which has more streams.

    If there are no such values, or `joined` has no more than `n` streams, return `joined` alone.
    """
    last_use: dict[Value, int] = {}
    for out, inputs in region.items():
        for value in inputs:
            last_use[value] = max(last_use.get(value, 0), out.index)
    after = sorted((value for value in region if value.index >= joined.index), key=lambda value: value.index)
    for now in after if carrier.count_streams(joined) > n else ():
        kept = [value for value in after if value.index <= now.index < last_use.get(value, 0)]
        if carrier.count_streams(*kept) == n:
            return kept
    return [joined]


def _move_forward(spine: Spine, uses: _Uses, value: Value, through_norms: bool, now: int, targets: Set[Value]) -> Value:
    """Return the last value computed from `value` by views and added biases, or with `through_norms` by norms, alone.

    Each step is the only use of its input, which is no target, and runs before operator `now`. The result has its tokens in the
    order of the state before. Before the first state factors are followed too, since they belong to the embedding. But a product
    that makes more streams of several, such as the read and the mixed streams at once, belongs to a sublayer.
    """
    found = value
    while True:
        of_value = uses.get(value, [])
        out = of_value[0][1] if len(of_value) == 1 else None
        if out is None or of_value[0][0] >= now or value in targets or out.op is None:
            return found
        is_shifted = out.op.name == "add" and not any(v.kind & DATA for v in out.op.inputs if v is not value)
        n, n_out = (spine.carrier.count_streams(v) for v in (value, out))
        is_factor = not spine.states and len(list_carried_inputs(spine.carrier, out)) == 1 and not 1 < n < n_out
        if not through_norms if out.norm is not None else not (is_shifted or is_factor or "view" in out.op.traits):
            return found
        value = out
        if not spine.states or not are_transposed(spine.carrier, spine.states[-1][0], value):
            found = value
