"""Find the boundaries of n residual streams in a graph: the write X' = A X + b w, and the read N(sum of c_j X'_j).

Both are one call if the coefficients of the read are known before X' is computed. If they are computed from X' itself, the write
is one call and the read with its norm another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from addnorm._util.arguments import FLOAT_DTYPES
from addnorm.fusion.axes import Axes, Operand, Term
from addnorm.fusion.graph import TracedGraph, example_value, shape_of
from addnorm.fusion.match import Boundary, Match, NotFusableError, dtype_name
from addnorm.fusion.pattern import (
    NORM_CHECKS,
    check_formula,
    check_norm_in_place,
    check_numbers,
    collect_inner,
    in_place_writes,
    same_shape,
    sole_cast,
)
from addnorm.stream.dataflow.arithmetic import strip_views
from addnorm.stream.dataflow.graph import Value, walk
from addnorm.stream.find.norm import Norm

MAX_STREAMS = 16
NO_WRITE = "no write of its streams is in its graph"
NO_READ = "no norm of a read follows in its graph"
DEPENDS = "the coefficients of the read are computed from the streams that are written"
LATE = "the streams are also read elsewhere, before the coefficients of the read are computed"
SEVERAL = "another norm of a read is in one call with the write of its streams"
CONTEXTS = "autocast or the grad mode changes inside"
SHAPE = "the read has another number of dimensions than a stream"
OTHER_AXIS = "the read sums over another dimension than that of the streams"
CHANGED = "a tensor that it reads is modified in place later"
TRANSFORMED = "it runs inside a torch.func transform"
UNUSED = "nothing reads the streams and the norm"
READ_ELSEWHERE = "a value between its streams and its norm is also read elsewhere"


@dataclass(eq=False)
class StreamMatch(Match):
    """A boundary of n streams, or a part of it that is one call.

    Attributes:
        operands_of: name of an argument of `add_norm_streams` -> a tensor of the graph, or the number that fills the argument.
        n: axis of the streams; `features` is that of the features, and `rows` are the others in the order of the call.
        source: axis of the streams before a matrix mixes them; `n` if no matrix does.
        written: axes of X' in the graph; None if there is no write.
        sizes: of the axes.
        before: node before which the call is inserted.
        remark: why the write, or the read with its norm, is not part of the call; empty if both are.
    """

    operands_of: dict[str, Operand | float] = field(default_factory=dict)
    n: int = 0
    features: int = 0
    rows: list[int] = field(default_factory=list)
    source: int = 0
    written: list[int] | None = None
    sizes: dict[int, int] = field(default_factory=dict)
    before: fx.Node | None = None
    remark: str = ""

    @property
    def num_streams(self) -> int:
        """Number of streams."""
        return self.sizes[self.n]

    @property
    def is_mixed(self) -> bool:
        """Whether a matrix mixes the streams."""
        return "mix" in self.operands_of

    @property
    def streams_dim(self) -> int:
        """Dimension of the streams in the tensor that holds them."""
        return self.tensor("streams").axes.index(self.source)

    @property
    def returns_residual(self) -> bool:
        """Whether the call writes the streams."""
        return self.written is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the streams in the call for which the graph was captured."""
        return shape_of(self.z[0] if self.z else self.tensor("streams").node)

    @property
    def results(self) -> dict[str, tuple[fx.Node, ...]]:
        """The nodes that return each result."""
        return {name: nodes for name, nodes in (("the read", self.y), ("the streams", self.z)) if nodes}

    def to_boundary(self) -> Boundary:
        """Return the `Boundary` that is reported to the user."""
        own = super().to_boundary()
        dtype = dtype_name(example_value(self.tensor("streams").node).dtype)
        return replace(
            own, kind=own.kind if self.norm.ops else "none", shape=self.shape, dtype=dtype,
            streams=self.num_streams, remark=self.remark,
        )  # fmt: skip

    def tensor(self, name: str) -> Operand:
        """Return an operand that is a tensor."""
        operand = self.operands_of[name]
        assert isinstance(operand, Operand)
        return operand

    @property
    def tensors(self) -> dict[str, fx.Node]:
        """The nodes that the call reads."""
        own = {name: operand.node for name, operand in self.operands_of.items() if isinstance(operand, Operand)}
        return own | self.parameters


def find_stream_matches(traced: TracedGraph, norms: Sequence[Norm]) -> list[StreamMatch]:
    """Return the boundaries of n streams of a graph, in order; those that cannot be fused have a reason."""
    writes = [*_find_writes(traced)]
    written = {write.sum: write for write in writes}
    states = {strip_views(value) for value in written}
    states |= {strip_views(traced.values[write.tensor("streams").node]) for write in writes}
    found = _find_reads(traced, norms, {*written}, states)
    # The parameters of a norm that nothing reads have no gradient; a call would give them zeros.
    reads = [read for read in found if any(node.users for node in read.y)]
    read_states = {strip_views(traced.values[read.tensor("streams").node]) for read in reads}
    matches = [write for write in writes if write.is_mixed or strip_views(write.sum) in read_states]
    matches += reads
    _reject_shared(matches, traced)
    for read in reads:
        write = written.get(traced.values[read.tensor("streams").node])
        if write is None:
            continue
        if write.reason is not None:
            read.remark = f"the write of its streams is not fused: {write.reason}"
            continue
        if read.reason is not None:
            write.remark = f"the read that follows is not fused: {read.reason}"
            continue
        read.remark = _explain_two_calls(write, read, traced) if write in matches else SEVERAL
        if read.remark:
            write.remark = read.remark
        else:
            matches.remove(write)
            _join(write, read)
    return sorted(matches, key=lambda match: match.add)


def _reject_shared(matches: Sequence[StreamMatch], traced: TracedGraph) -> None:
    """Reject boundaries of which a product or a sum would still be computed, since another node reads it.

    It sets their `reason`, and repeats this while a rejected boundary still reads such a node of another one.
    """
    while True:
        fused = [match for match in matches if match.reason is None]
        inside = {node for match in fused for node in match.nodes}
        for match in fused:
            inner = {*match.inner} - {*match.z, *match.y}
            computed = (node for node in inner if any("view" not in op.traits for op in traced.ops_of[node]))
            if any(user not in inside for node in computed for user in node.users):
                match.reason = READ_ELSEWHERE
        if all(match.reason is None for match in fused):
            return


def _explain_two_calls(write: StreamMatch, read: StreamMatch, traced: TracedGraph) -> str:
    """Return why a write and the read of its streams cannot be one call; empty if they can."""
    own = [node for name, node in read.tensors.items() if name != "streams"]
    earlier = walk(own, attrgetter("all_input_nodes"))
    if not {*write.z}.isdisjoint(earlier):
        return DEPENDS
    first = _first_user(write, read)
    if first is None:
        return UNUSED
    if any(node >= first for node in own):
        return LATE
    if traced.contexts[write.add] != traced.contexts[read.add]:
        return CONTEXTS
    if write.written is None or write.written.index(write.n) != read.streams_dim:
        return OTHER_AXIS
    return "" if len(write.rows) == len(read.rows) else SHAPE


def _first_user(write: StreamMatch, read: StreamMatch) -> fx.Node | None:
    """Return the first node that reads a result of the boundary and stays in the graph; None if there is none.

    Nodes outside of the boundary stay, and so do views inside of it that nodes outside read.
    """
    results = {*write.z, *read.y}
    inside = {*write.inner, *read.inner} - results
    outside = (node for node in inside if any(user not in inside and user not in results for user in node.users))
    remaining = {*walk(outside, lambda node: inside & {*node.all_input_nodes})}
    gone = (inside | results) - remaining
    return min((user for node in results for user in node.users if user not in gone), default=None)


def _join(write: StreamMatch, read: StreamMatch) -> None:
    """Make the write a part of the read's call."""
    assert write.written is not None
    single = (axis for axis in read.rows if read.sizes[axis] == 1)
    axes = zip(write.written, read.tensor("streams").axes, strict=True)
    names = {axis: next(single) if other is None else other for axis, other in axes}
    names.setdefault(write.source, -1)
    own = {k: v.rename(names) if isinstance(v, Operand) else v for k, v in write.operands_of.items()}
    read.before = _first_user(write, read)
    read.operands_of |= own
    read.written, read.z, read.source = [names[axis] for axis in write.written], write.z, names[write.source]
    read.inner = tuple(sorted({*write.inner, *read.inner}))
    read.add, read.sum, read.operands = write.add, write.sum, write.operands


def _check(match: StreamMatch, traced: TracedGraph, results: Sequence[fx.Node]) -> None:
    """Set the nodes inside a boundary, or the reason why it is not one call."""
    reads, match.operands = {*match.tensors.values()}, (match.tensor("streams").node,)
    dtypes = [example_value(node).dtype for node in (*reads, *results)]
    try:
        match.inner = collect_inner(traced, results, reads)
        if not traced.transformed.isdisjoint((*match.inner, *results)):
            raise NotFusableError(TRANSFORMED)
        if any(traced.contexts[node] != traced.contexts[match.add] for node in match.inner):
            raise NotFusableError(CONTEXTS)
        check_norm_in_place(match, traced)
        check_numbers(match.inner, traced)
        is_mixed = torch.float64 in dtypes and len({*dtypes}) > 1
        if is_mixed or not {*dtypes} <= {*FLOAT_DTYPES}:
            raise NotFusableError(f"it has {' and '.join(sorted({*map(dtype_name, dtypes)}))}")
        later = [node for node in traced.ops_of if node > min(match.inner)]
        read = {traced.memory.get(node) for node in reads}
        if any(memory in read for _, memory in in_place_writes(later, traced)):
            raise NotFusableError(CHANGED)
    except NotFusableError as reason:
        match.reason = str(reason)


# The write.


def _find_writes(traced: TracedGraph) -> Iterator[StreamMatch]:
    for op, node in traced.node_of.items():
        total = traced.values.get(node)
        if total is None or strip_views(total) is not op.outputs[0]:
            continue
        match = _match_write(total, traced)
        if match is not None:
            match.add, match.before, match.remark = node, min(match.z), NO_READ
            _check(match, traced, match.z)
            yield match


def _match_write(total: Value, traced: TracedGraph) -> StreamMatch | None:
    if len(total.shape) < 2 or not total.tensor.numel() or not total.tensor.is_floating_point():
        return None
    axes = Axes(traced)
    order, dims = axes.start(total)
    own = {axis for axis in order if axes.sizes[axis] > 1}
    terms = axes.terms(total, dims)
    for mixed, injected in (terms, terms[::-1]) if len(terms) == 2 else ():
        pairs = _orders(injected, axes, expands=True)
        for branch, inject in sorted(pairs, key=lambda pair: order[-1] not in pair[0].held):
            new = own - branch.held
            if len(new) != 1 or not branch.held < own:
                continue
            (n,) = new
            features = next(axis for axis in reversed(order) if axis != n)
            rows = [axis for axis in order if axis not in (n, features)]
            match = StreamMatch(
                Norm("own", None, total, total), total, n=n, features=features, rows=rows, written=order, sizes=axes.sizes,
            )  # fmt: skip
            for streams, mix in _orders(mixed, axes):
                source = match.source = next(iter(streams.held - own), n)
                kinds = {"mix": {n, source}, "inject": {n}}
                match.operands_of = {"branch": branch, "inject": inject, "streams": streams}
                match.operands_of |= {"mix": mix} if isinstance(mix, Operand) else {}
                fits = streams.held == (own - {n}) | {source} and (match.is_mixed if source != n else mix == 1.0)
                fits = fits and axes.sizes[source] == axes.sizes[n] <= MAX_STREAMS and axes.is_static(n)
                fits = fits and features in own and all(_has_axes(match, name, kind) for name, kind in kinds.items())
                if fits and _find_result(match, traced):
                    return match
    return None


def _orders(term: Term, axes: Axes, **options: Any) -> Iterator[tuple[Operand, Operand | float]]:
    """Yield a term's two factors in both orders, the second multiplied by the term's number.

    For a term of one factor, yield the factor and the number. Yield nothing if a factor is not the tensor of a node.
    """
    first, *rest = [axes.operand(*factor, **options) for factor in term.factors]
    if first is None or None in rest:
        return
    if not rest:
        yield first, term.number
    for other in filter(None, rest):
        yield first, other._replace(number=term.number)
        yield other, first._replace(number=term.number)


def _has_axes(match: StreamMatch, name: str, own: set[int], *, per_feature: bool = False) -> bool:
    """Return whether a coefficient varies along the axes `own`, and along all axes of rows or none of them.

    True if the match has no coefficient `name`, or a number. A coefficient that varies along the rows has a value for each token.
    With `per_feature` it may also vary along the rows and the features.
    """
    operand = match.operands_of.get(name)
    if not isinstance(operand, Operand):
        return True
    rows = {axis for axis in match.rows if match.sizes[axis] > 1}
    choices = [own, own | rows, *([own | rows | {match.features}] if per_feature else [])]
    return operand.held in choices


def _find_result(match: StreamMatch, traced: TracedGraph) -> bool:
    """Set `z`, the nodes that return the streams after the write, cast or not; return whether there are any."""
    value = match.sum
    while (cast := sole_cast(value)) is not None and cast in traced.nodes:
        value = cast
    match.z = tuple(node for node, other in traced.values.items() if other is value)
    match.sum = value
    return bool(match.z)


# The read.


def _find_reads(
    traced: TracedGraph, norms: Sequence[Norm], written: set[Value], states: set[Value]
) -> Iterator[StreamMatch]:
    for norm in norms:
        match = _match_read(norm, traced, written, states)
        if match is None:
            continue
        try:
            check_formula(match)
            for find in NORM_CHECKS:
                find(match, traced)
            is_same = same_shape(example_value(match.y[0]), example_value(match.z[0]))
            if not is_same or match.sum.shape != norm.y.shape or norm.y.shape[-1:] != norm.x.shape[-1:]:
                raise NotFusableError("its norm has another shape than its read")
        except NotFusableError as reason:
            match.reason = str(reason)
        match.z = ()
        if match.reason is None:
            match.before = min(match.y)
            _check(match, traced, match.y)
        yield match


def _match_read(norm: Norm, traced: TracedGraph, written: set[Value], states: set[Value]) -> StreamMatch | None:
    axes, value = Axes(traced), norm.x
    while value not in traced.nodes and value.op is not None and "copy" in value.op.traits:
        value = value.op.inputs[0]  # a cast inside the norm's node
    if value not in traced.nodes:  # a product of matrices, of which the norm reads a view
        inputs = (other for op in norm.ops for other in op.inputs if strip_views(other) is strip_views(value))
        value = min(traced.nodes.keys() & inputs, key=attrgetter("index"), default=value)
    if value not in traced.nodes or not value.shape or not value.tensor.numel():
        return None
    order, dims = axes.start(value)
    *rows, features = order
    own = {axis for axis in order if axes.sizes[axis] > 1}
    for streams, collapse in _orders(axes.product(value, dims), axes, stop=written):
        extra = streams.held - own
        if len(extra) != 1 or streams.held - extra != own or features not in own:
            continue
        (n,) = extra
        match = StreamMatch(norm, value, n=n, source=n, features=features, rows=rows, sizes=axes.sizes)
        match.operands_of = {"streams": streams, "collapse": collapse}
        is_read = strip_views(traced.values[streams.node]) in states and axes.is_static(n)
        if is_read and axes.sizes[n] <= MAX_STREAMS and _has_axes(match, "collapse", {n}, per_feature=True):
            match.z = tuple(node for node, other in traced.values.items() if other is value)
            match.add, match.remark = match.z[0], NO_WRITE
            return match
    return None
