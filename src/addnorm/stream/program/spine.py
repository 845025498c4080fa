"""Sublayers of a residual program: the spine of carried values, and what each sublayer reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field

from addnorm.stream.dataflow.arithmetic import is_move, is_view, match_factor
from addnorm.stream.dataflow.graph import EDIT, Op, Value, find_ops_between, walk
from addnorm.stream.find.norm import Norm
from addnorm.stream.program.carried import Carrier


@dataclass(eq=False)
class Write:
    """The output of a sublayer.

    Attributes:
        value: the output, one of the sources; for sublayers whose outputs are summed first, the sum.
        reads: the carried values that the sublayer reads.
        ops: the operators of the sublayer, which depend on the reads.
        norm: the norm of the output if `ablate` edits its result; otherwise None.
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
        return [self.carrier.count_streams(*state) for state in self.states]


def list_carried_inputs(carrier: Carrier, value: Value) -> list[Value]:
    """Return the inputs that the operator of a carried value carries; an empty list for a source."""
    return carrier.used.get(value.op, []) if value.op is not None and value not in carrier.sources_set else []


def find_write(carrier: Carrier, source: Value, inside: Set[Value]) -> Write:
    """Return the sublayer whose output `source` is: its operators, back to the carried values that it reads."""
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
    return Write(source, roots, filter_ops(carrier, sorted(ops, key=lambda op: op.index), roots), norm)


def filter_ops(carrier: Carrier, ops: Iterable[Op], reads: Iterable[Value]) -> list[Op]:
    """Return the operators that depend on a sublayer's reads, which excludes, for example, its position tables."""
    reached = {*reads}
    own: list[Op] = []
    for op in ops:
        if not reached.isdisjoint(op.inputs) or any(_find_root(carrier, value) in reached for value in op.inputs):
            reached.update(op.outputs)
            own.append(op)
    return own


def _find_root(carrier: Carrier, value: Value) -> Value:
    """Return the value of which a carried value is a view, a cut or a join."""
    *_, root = trace_single(carrier, value, is_move)
    return root


def trace_single(carrier: Carrier, value: Value, accepts: Callable[[Op], bool]) -> Iterator[Value]:
    """Yield a carried value, the only carried input of its operator, and so on, as long as `accepts` takes the operator.

    The search ends at norms, at sources, and at operators with several carried inputs.
    """
    yield value
    while value.norm is None and value.op is not None and accepts(value.op):
        inputs = list_carried_inputs(carrier, value)
        if len(inputs) != 1:
            return
        (value,) = inputs
        yield value


def join_writes(spine: Spine) -> None:
    """Join the writes that are summed before they reach the stream: those of experts, or of parallel sublayers.

    Writes are not joined if one of them reads a state that contains another one. A write may read another write itself, as a
    convolution of a sublayer's output does.
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


def _follow_constants(value: Value) -> Value:
    """Return a sum after its multiplications by constants, which are the last steps of the sublayer."""
    while True:
        product = match_factor(value.users[0]) if len(value.users) == 1 else None
        if product is None or product.kind != "constant" or product.x is not value:
            return value
        value = value.users[0].outputs[0]


def follow_tokens(carrier: Carrier, value: Value) -> Value:
    """Return the value after the last steps of a sublayer: its dropout, and a change of the order of its tokens.

    Experts change the order by indices, a sequence-first attention by a transposition.
    """
    last, is_same = value, True
    while True:
        outs = [
            op.outputs[0] for op in value.users if op.outputs and value in list_carried_inputs(carrier, op.outputs[0])
        ]
        if len(outs) != 1 or len(list_carried_inputs(carrier, outs[0])) != 1 or outs[0].op is None:
            return last
        before, value, op = value, outs[0], outs[0].op
        product = match_factor(op)
        is_dropout = product is not None and product.kind == "noise"
        is_same &= is_dropout or is_view(op)
        if "cut" in op.traits or (is_same and (is_dropout or are_transposed(carrier, before, value))):
            last = value


def are_transposed(carrier: Carrier, before: Value, after: Value) -> bool:
    """Return whether two values have the same tokens with their dimensions in another order."""
    first, second = ([part for part in carrier.list_tokens(value) if part.size > 1] for value in (before, after))
    return first != second and sorted(first) == sorted(second)
