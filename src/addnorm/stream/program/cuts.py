"""The states of a residual program: before and after each sublayer, the fewest carried values from which all later ones follow.

For n streams in one tensor a state is this tensor; for streams in separate tensors it is several values; where every sublayer
reads the outputs of all earlier ones, the state grows. A state is a minimum vertex cut of the graph of carried values, found by
augmenting paths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from addnorm.stream.dataflow.arithmetic import is_move, is_view, match_factor
from addnorm.stream.dataflow.graph import DATA, EDIT, Op, Value, find_ops_between, walk
from addnorm.stream.find.norm import Norm
from addnorm.stream.program.carried import Carrier

_Node = tuple[Value, int]
# The uses of a value: the index of the operator, and its carried output; None if it computes coefficients.
_Uses = dict[Value, list[tuple[int, Value | None]]]


@dataclass(eq=False)
class Write:
    """The output of a sublayer.

    Attributes:
        value: the output, a source; of sublayers that add up before they write, the sum.
        reads: the carried values that the sublayer reads.
        ops: the operators of the sublayer, which depend on the reads.
        norm: the norm of the output, if `ablate` changes what it returns.
    """

    value: Value
    reads: list[Value]
    ops: list[Op]
    norm: Norm | None = None

    @property
    def raw(self) -> Value:
        """The output before its norm."""
        return self.value if self.norm is None else self.norm.x

    @property
    def start(self) -> int:
        """The index of the sublayer's first operator."""
        return min(op.index for op in self.ops)


@dataclass(eq=False)
class Spine:
    """The carried values of one residual program.

    Attributes:
        carrier: all carried values of the run.
        end: the last read of the streams, or its norm.
        writes: the outputs of the sublayers, in the order of the run.
        starts: the sources that depend on no state: embeddings.
        relevant: the carried values of which the end or a read is a function.
        states: the state before each sublayer, and the state at the end.
    """

    carrier: Carrier
    end: Value
    writes: list[Write] = field(default_factory=list)
    starts: list[Value] = field(default_factory=list)
    relevant: set[Value] = field(default_factory=set)
    states: list[list[Value]] = field(default_factory=list)

    @property
    def sizes(self) -> list[int]:
        """The number of streams of each state."""
        return [sum(self.carrier.order(value)[2] for value in state) for state in self.states]


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
        write = _find_write(carrier, source, inside)
        spine.writes += [write] if write.reads else []
        spine.starts += [] if write.reads else [source]
    _join_writes(spine)
    for write in spine.writes:
        write.value = _follow_tokens(carrier, write.value)
        carrier.sources_set.add(write.value)
    before: set[Value] = set()
    for write in spine.writes:  # an earlier read again, as of shared keys and values, is not a read of the state
        write.reads = [value for value in write.reads if value not in before] or write.reads
        write.ops = _filter_ops(carrier, write.ops, write.reads)
        before.update(write.reads)
    reads = [value for write in spine.writes for value in write.reads]
    spine.relevant = {*walk([end, *reads], lambda value: list_carried_inputs(carrier, value))}
    if spine.writes:
        _find_states(spine)
    return spine if spine.writes else None


def _find_whole(carrier: Carrier, end: Value) -> Value:
    """Return the value before the last one was cut to some of its tokens, such as to the class token."""
    value = end
    while value.norm is None and value.op is not None and (is_move(value.op) or value.op.name in ("mul", "div")):
        inputs = list_carried_inputs(carrier, value)
        if len(inputs) != 1 or carrier.order(inputs[0])[2] != carrier.order(value)[2]:
            break
        end = inputs[0] if "cut" in value.op.traits else end
        value = inputs[0]
    return end


def _join_writes(spine: Spine) -> None:
    """Join the writes that are summed before they reach the stream: those of experts, or of parallel sublayers.

    None of them reads a state that contains another of them. A write may read another one itself, as a convolution of a
    sublayer's output does.
    """
    carrier = spine.carrier
    bits = {write: carrier.known[write.value].sources for write in spine.writes}
    sums = {}
    for value in walk([spine.end], lambda value: list_carried_inputs(carrier, value)):
        of_value = carrier.known[value].sources
        parts = [write for write, bit in bits.items() if bit & of_value]
        is_sum = value.op is not None and value.op.name in ("add", "sum") and value not in carrier.sources_set
        if is_sum and len(parts) > 1 and sum(bits[part] for part in parts) == of_value:
            reads = [carrier.known[read].sources for part in parts for read in part.reads]
            if not any(read & of_value and read & ~of_value for read in reads):
                sums[value] = parts
    for value, parts in sums.items():
        if any({*parts} < {*others} for others in sums.values()) or not {*parts} <= {*spine.writes}:
            continue
        is_nested = any(read in carrier.sources_set for part in parts for read in part.reads)
        whole = _follow_constants(value) if is_nested else value
        carrier.sources_set.add(whole)
        inner = dict.fromkeys(read for part in parts for read in part.reads)
        outer = [read for read in inner if not carrier.known[read].sources & carrier.known[whole].sources]
        ops = {op for part in parts for op in (*part.ops, *find_ops_between(part.value, whole))}
        joined = Write(whole, outer, sorted(ops, key=lambda op: op.index))
        spine.writes = sorted(
            [*(w for w in spine.writes if w not in parts), joined], key=lambda write: write.value.index
        )


def list_carried_inputs(carrier: Carrier, value: Value) -> list[Value]:
    """Return the values of which a carried value is a linear function in one step."""
    return carrier.used.get(value.op, []) if value.op is not None and value not in carrier.sources_set else []


def _find_write(carrier: Carrier, source: Value, inside: Set[Value]) -> Write:
    """Return the sublayer that computes a source: the operators back to the carried values that it reads."""
    ops: set[Op] = set()
    reads: dict[Value, None] = {}
    start = unedited = source
    while unedited.op is not None and unedited.op.name == EDIT:
        unedited = unedited.op.inputs[0]
        own = carrier.find_sources(unedited)
        start = own[0] if len(own) == 1 else unedited  # without a dropout or a norm before the edit
    todo = [start]
    while todo:
        value = todo.pop()
        if value is not start and value in inside and value.part != "memory":
            reads[value] = None
        elif value.op is not None and value.op not in ops:
            ops.add(value.op)
            todo += value.op.inputs
    roots = sorted({_find_root(carrier, read) for read in reads}, key=lambda value: value.index)
    norm = None if unedited is source else unedited.norm
    return Write(source, roots, _filter_ops(carrier, sorted(ops, key=lambda op: op.index), roots), norm)


def _filter_ops(carrier: Carrier, ops: Iterable[Op], reads: Iterable[Value]) -> list[Op]:
    """Return the operators that depend on what a sublayer reads; its tables of positions, for example, do not."""
    reached = {*reads}
    own: list[Op] = []
    for op in ops:
        if not reached.isdisjoint(op.inputs) or any(_find_root(carrier, value) in reached for value in op.inputs):
            reached.update(op.outputs)
            own.append(op)
    return own


def _find_root(carrier: Carrier, value: Value) -> Value:
    """Return the value of which a carried value is a view, a cut or a join."""
    while value.norm is None and value.op is not None and is_move(value.op):
        inputs = list_carried_inputs(carrier, value)
        if len(inputs) != 1:
            break
        value = inputs[0]
    return value


def _follow_constants(value: Value) -> Value:
    """Return the value after the numbers that multiply a sum, which belong to the sublayer as its last step."""
    while True:
        product = match_factor(value.users[0]) if len({*value.users}) == 1 else None
        if product is None or product[1].kind != "constant" or product[0] is not value:
            return value
        value = value.users[0].outputs[0]


def _follow_tokens(carrier: Carrier, value: Value) -> Value:
    """Return the value after the last step of a sublayer: its dropout, or another order of its tokens.

    Experts change the order by indices, a sequence-first attention by a transposition.
    """
    last, is_same = value, True
    while True:
        outs = [
            op.outputs[0]
            for op in dict.fromkeys(value.users)
            if op.outputs and value in list_carried_inputs(carrier, op.outputs[0])
        ]
        if len(outs) != 1 or len(list_carried_inputs(carrier, outs[0])) != 1 or outs[0].op is None:
            return last
        before, value, op = value, outs[0], outs[0].op
        product = match_factor(op)
        is_dropout = product is not None and product[1].kind == "noise"
        is_same &= is_dropout or is_view(op)
        if "cut" in op.traits or (is_same and (is_dropout or _are_transposed(carrier, before, value))):
            last = value


def _are_transposed(carrier: Carrier, before: Value, after: Value) -> bool:
    """Return whether two values have the same tokens with their dimensions in another order."""
    first, second = ([part for part in carrier.list_tokens(value) if part.size > 1] for value in (before, after))
    return first != second and sorted(first) == sorted(second)


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
    """Return the operators that use each relevant value: each one's index, with its carried output if it has a relevant one.

    An operator that computes coefficients from the value has None in place of the output.
    """
    uses: _Uses = {}
    inside: set[Op] = {op for write in spine.writes for op in write.ops}
    coefficients = {*find_coefficient_ops(spine)}
    for out in spine.relevant:
        for value in list_carried_inputs(spine.carrier, out):
            uses.setdefault(value, []).append((out.index, out))
    for value in spine.relevant:
        ops = [op for op in dict.fromkeys(value.users) if op in coefficients and op not in inside]
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
    """Return the parameters and buffers from which `operands` are computed, and the operators between, up to the streams."""

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

    These are values that later operators use, and those with `last`, the last write, from which coefficients are computed.
    """
    carrier = spine.carrier
    since, own = (last.index, carrier.known[last].sources) if last is not None else (-1, -1)
    bits = 0
    for value in available:
        bits |= carrier.known[value].sources
    live: set[Value] = set()
    for value, of_value in uses.items():
        is_available = value.index < now and not carrier.known[value].sources & ~bits
        later = [index for index, out in of_value if index >= now] if not only_coefficients else []
        new = any(out is None and index > since for index, out in of_value) and carrier.known[value].sources & own
        if is_available and (later or new):
            live.add(value)
    return live


def _cut(carrier: Carrier, sources: Sequence[Value], targets: Set[Value], last: Value | None = None) -> list[Value]:
    """Return the fewest values that lie on all paths from sources to targets; of several cuts, the one nearest to the sources.

    `last`, the last write, is in the state only if it must be: a state has the sums with it.
    """
    start = {*sources}
    region = _find_region(carrier, start, targets)
    own = carrier.known[last].sources if last is not None else 0
    # A value is two nodes, and the edge between them has its capacity. Other edges have no limit.
    room: dict[tuple[_Node, _Node], int] = {}
    ends: dict[_Node, list[_Node]] = {}

    def connect(a: _Node, b: _Node, capacity: int) -> None:
        room[a, b], room[b, a] = capacity, 0
        ends.setdefault(a, []).append(b)
        ends.setdefault(b, []).append(a)

    for value, inputs in region.items():
        connect((value, 0), (value, 1), len(region) if carrier.known[value].sources == own else 1)
        for other in inputs:
            connect((other, 1), (value, 0), len(region) ** 2 + 1)
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
        while (before := parents[node]) is not None:
            room[before, node] -= 1
            room[node, before] += 1
            node = before


def _find_region(carrier: Carrier, start: Set[Value], targets: Iterable[Value]) -> dict[Value, list[Value]]:
    """Return the values from which `targets` are computed, back to `start`, each with the inputs that its operator carries."""

    def follow(value: Value) -> list[Value]:
        return [] if value in start else list_carried_inputs(carrier, value)

    return {value: follow(value) for value in walk(targets, follow)}


def _find_sums(
    carrier: Carrier, state: Sequence[Value], last: Value, targets: Iterable[Value], live: Set[Value]
) -> list[Value]:
    """Return the state after a write, `last`: the sums with it from which `targets` are computed, and what is read beside them.

    If coefficients are computed from the write alone, in `live`, it is a stream of its own.
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
    return sorted([*sums, *beside], key=lambda value: value.index)


def _move_forward(spine: Spine, uses: _Uses, value: Value, through_norms: bool, now: int, targets: Set[Value]) -> Value:
    """Return the last value that follows from `value` by views, biases and norms alone, each of which nothing else reads.

    Its tokens are in the order of the state before. Before the first state factors are followed too: they are the embedding's.
    """
    found = value
    while True:
        of_value = uses.get(value, [])
        out = of_value[0][1] if len(of_value) == 1 else None
        if out is None or of_value[0][0] >= now or value in targets or out.op is None:
            return found
        is_shifted = out.op.name == "add" and not any(v.kind & DATA for v in out.op.inputs if v is not value)
        is_factor = not spine.states and len(list_carried_inputs(spine.carrier, out)) == 1
        if not through_norms if out.norm is not None else not (is_shifted or is_factor or "view" in out.op.traits):
            return found
        value = out
        if not spine.states or not _are_transposed(spine.carrier, spine.states[-1][0], value):
            found = value
