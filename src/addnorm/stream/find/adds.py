"""The residual adds of a data flow: x + f(x), in all forms in which models write it.

An add is residual if one operand is, up to factors, a value on which the other operand depends. The other operand is the write.
A *state* of a stream is one of its values over depth: x_0, the sum of an add, or the norm of that sum.

    x + f(x)                       regular           (x + f(x)) + g(x)      two parallel sublayers
    (x + bias) + f(x)              shifted           state + something      an injection
    N(x) + f(x)                    beside its norm   state + earlier state  a skip
    x + w (f(x) - x)               (1 - w) x + w f(x)
    x[:, :n] + f(x)                some tokens of x
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from addnorm.stream.dataflow.arithmetic import (
    Factor,
    Term,
    is_ancestor,
    list_joined,
    match_factor,
    match_terms,
    pair_terms,
    strip_norm,
    strip_views,
)
from addnorm.stream.dataflow.graph import Flow, Op, Value, find_ops_between
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.paths import (
    Path,
    join_paths,
    match_interpolation,
    sum_paths,
    trace_multiples,
    trace_origin,
)

REPLACED = "tokens of the stream are replaced by values that were computed from it"
PARTIAL = "an add changes a part of the tokens only, or its sum is joined with an earlier state, which no row expresses"
MULTIPLES = "between two sublayers the stream is replaced by a sum of its multiples"


@dataclass
class Write:
    """One term that is added to the stream.

    Attributes:
        path: the views and factors from the branch's output (`path.source`) to the operand of the add.
        role: "branch"; "injection" if it depends on no state of this stream; "skip" for an earlier state; "bias" for a parameter.
    """

    path: Path
    role: str = "branch"


@dataclass(eq=False)
class Add:
    """Residual add: out = a * x + writes.

    Attributes:
        x: the residual.
        out: the sum.
        residual_path: the views and factors from x to the operand.
        writes: the other operands.
        branch_input: the value that the branches read, if it is not x itself: x is then its norm, or has some of its tokens.
        is_cut: whether x has only some of the tokens of a state.
        previous: the add before this one on the stream; None for the first add.
        norms: the norms between the previous add and x, the last one first.
        early_factors: the factors between the previous add and the first of those norms.
        late_factors: the factors between those norms and x.
        changes_tokens: whether tokens are joined or removed between the previous add and x.
        reasons: reasons why the steps between the previous add and x are not understood.
        is_partial: whether `out` is only a partial sum of another add.
        inner_adds: the residual adds inside the branches.
        other_ops: the operators of those adds of other streams on which the branches of this add depend.
    """

    x: Value
    out: Value
    residual_path: Path
    writes: list[Write]
    branch_input: Value | None = None
    is_cut: bool = False
    previous: Add | None = None
    norms: list[Norm] = field(default_factory=list)
    early_factors: list[Factor] = field(default_factory=list)
    late_factors: list[Factor] = field(default_factory=list)
    changes_tokens: bool = False
    reasons: list[str] = field(default_factory=list)
    is_partial: bool = False
    inner_adds: list[Add] = field(default_factory=list)
    other_ops: set[Op] = field(default_factory=set)

    @property
    def read(self) -> Value:
        """The value from which the branches are computed: `branch_input` if there is one, otherwise x."""
        return self.branch_input or self.x

    @property
    def op(self) -> Op:
        """The operator that computes `out`."""
        assert self.out.op is not None
        return self.out.op

    def lineage(self) -> Iterator[Add]:
        """Yield this add and the adds before it on the stream, the last one first."""
        add: Add | None = self
        while add is not None:
            yield add
            add = add.previous


Adds = dict[Value, Add]  # from the sum of each add to the add


def has_mixing_branch(add: Add) -> bool:
    """Return whether a branch combines tokens or features; an elementwise branch does not, as in x + sin(x)^2."""
    return any("mixing" in op.traits for write in add.writes for op in find_ops_between(add.read, write.path.source))


def find_adds(flow: Flow, norms: list[Norm]) -> list[Add]:
    """Return the residual adds in the order in which they ran, except those inside norms and partial sums of others."""
    inner = {op for norm in norms for op in norm.ops}
    weighted: dict[Op, tuple[Term, Term] | None] = {}
    for op in flow.ops:
        if op not in inner and (interpolation := match_interpolation(op)) is not None:
            weighted[op] = interpolation.terms
            inner.update(interpolation.ops)
    adds: Adds = {}
    for op in flow.ops:
        terms = weighted[op] if op in weighted else None if op in inner or match_factor(op) else match_terms(op)
        if terms is None or len(op.out.shape) < 2 or not op.out.tensor.is_floating_point():
            continue
        pairs = [(p, q) for p, q in (terms, terms[::-1]) if p.value.shape == op.out.shape]
        matches = (match(op, p, q, adds) for match in MATCHERS for p, q in pairs)
        add = next((add for add in matches if add is not None), None)
        if add is not None:
            adds[add.out] = add
            _link_previous(add, adds)
    return [add for add in adds.values() if not add.is_partial]


# One function for each form of a residual add: `p` is the operand that may be the residual, `q` the one that may be the write.


def _match_again(op: Op, p: Term, q: Term, adds: Adds) -> Add | None:
    """Match (x + f(x)) + x as 2 x + f(x), where the inner sum has no other use."""
    state = _find_state(p, adds)
    inner = adds.get(state.source) if state is not None and not state.factors and p.factor == 1.0 else None
    if state is None or inner is None or inner.branch_input or not _is_only_used_by(op, state):
        return None
    first = join_paths(inner.residual_path, state)
    again = next((path for path in trace_multiples(q) if path.source is first.source), None)
    total = sum_paths(op, first, again) if again is not None else None
    if total is None:
        return None
    inner.is_partial = True
    return Add(inner.x, op.out, total, _extend(inner, state))


def _match_regular(op: Op, p: Term, q: Term, adds: Adds) -> Add | None:
    """Match x + f(x). If f(x) is a later state of the same stream, x is a skip that is added to this state."""
    multiples = {path.source for path in trace_multiples(q)}
    residual = _find_residual(p, q)
    if residual is None or residual.source in multiples:
        return None  # x + x has no write
    later = _find_state(q, adds)
    if later is not None and _continues_from(later.source, residual.source, adds):
        return Add(later.source, op.out, later, [Write(trace_origin(p), "skip")])
    return Add(residual.source, op.out, residual, [Write(trace_origin(q))])


def _match_shifted(op: Op, p: Term, q: Term, adds: Adds) -> Add | None:
    """Match (x + bias) + f(x), where the sublayer's bias is added to the stream first."""
    path = trace_origin(p)
    for x, bias in pair_terms(path.source.op):
        residual = _find_residual(x, q) if _is_bias(bias.value, path.source) else None
        if residual is not None:
            writes = [Write(trace_origin(q)), Write(join_paths(trace_origin(bias), path), "bias")]
            return Add(residual.source, op.out, join_paths(residual, path), writes)
    return None


def _match_beside(op: Op, p: Term, q: Term, adds: Adds) -> Add | None:
    """Match N(x) + f(x), where f reads x before its norm, or x[:, :n] + f(x), where f reads all tokens."""
    residual, write = trace_origin(p), trace_origin(q)
    norm = residual.source.norm
    whole = strip_views(norm.x) if norm is not None else _find_whole(residual.source)
    if residual.source in (whole, write.source) or not is_ancestor(whole, write.source):
        return None
    return Add(residual.source, op.out, residual, [Write(write)], branch_input=whole, is_cut=norm is None)


def _match_continued(op: Op, p: Term, q: Term, adds: Adds) -> Add | None:
    """Match (x + f(x)) + g(x) with parallel sublayers, (x + f(x)) + bias, or a state plus an injection."""
    state, path, out = _find_state(p, adds), trace_origin(q), op.out
    if state is None:
        part = trace_origin(p)
        if "cut" in part.source.traits and _find_moved_state(part.source, adds):
            return Add(part.source, out, part, [Write(path, "injection")], is_cut=True)
        return None
    if (partial := adds.get(state.source)) is not None:
        residual, writes = join_paths(partial.residual_path, state), _extend(partial, state)
        if is_ancestor(partial.x, q.value) and len(state.source.users) == 1:
            partial.is_partial = True
            is_single = [write.role for write in writes] == ["branch"]
            later = _find_state(partial.writes[0].path.terms[0], adds) if is_single else None
            if later is not None and is_ancestor(later.source, q.value):  # (x + the layer's input) + f(x)
                return Add(later.source, out, join_paths(later, state), [Write(path), Write(residual, "skip")])
            return Add(partial.x, out, residual, [*writes, Write(path)])
        if _is_bias(q.value, out) and not partial.is_cut and _is_only_used_by(op, state):  # (x + f(x)) + bias
            partial.is_partial = True
            writes.append(Write(path, "bias"))
            return Add(partial.x, out, residual, writes, branch_input=partial.branch_input)
    return Add(state.source, out, state, [Write(path, "injection")])


MATCHERS = (_match_again, _match_regular, _match_shifted, _match_beside, _match_continued)


def _extend(add: Add, path: Path) -> list[Write]:
    """Return the writes of the partial sum `add`, with each path extended by `path`, which leads to the whole sum."""
    return [Write(join_paths(write.path, path), write.role) for write in add.writes]


def _find_residual(p: Term, q: Term) -> Path | None:
    """Find the residual of the add p + q: the nearest value x such that `p` is a multiple of x and `q` depends on x.

    Return the path from x to `p`, or None.
    """
    return next((path for path in trace_multiples(p) if is_ancestor(path.source, q.value)), None)


def _is_bias(value: Value, like: Value) -> bool:
    """Return whether `value` is a parameter or a constant with at most one number for each feature of `like`."""
    return value.is_fixed and value.tensor.numel() <= like.shape[-1]


def _is_only_used_by(op: Op, path: Path) -> bool:
    """Return whether the values on `path` have no other use than to compute an operand of `op`."""
    values = [*(step.out for step in path.ops), path.source]
    return all(len(value.users) == 1 for value in values) and values[0].users == [op]


# States of a stream.


def _find_state(term: Term, adds: Adds) -> Path | None:
    """Return the path to operand `term` from the nearest state of which the operand is a multiple; None if there is none."""
    return next((path for path in trace_multiples(term) if _find_add(path.source, adds) is not None), None)


def _find_add(value: Value, adds: Mapping[Value, Add]) -> Add | None:
    """Return the add whose sum is `value`, or whose normalized sum is `value`; None if there is none."""
    return adds.get(value) or adds.get(strip_norm(value))


def _continues_from(state: Value, earlier: Value, adds: Adds) -> bool:
    """Return whether a chain of adds leads from the value `earlier` to `state`."""
    add = _find_add(state, adds)
    steps = enumerate(add.lineage()) if add is not None else ()
    at = next((k for k, step in steps if step.x is earlier or _find_root(step.x) is _find_root(earlier)), None)
    return at is not None and (state.norm is None or at > 0)  # x + N(x + f(x)) adds the output of one sublayer


def _find_root(value: Value) -> Value:
    """Return the earliest value of which `value` is a multiple, or a sum of multiples."""
    while True:
        value = strip_views(value)
        product, terms = match_factor(value.op), match_terms(value.op)
        if value.norm is not None:
            return value
        if product is not None:
            value = product.x
        elif terms is not None and len({trace_origin(term).source for term in terms}) == 1:
            value = trace_origin(terms[0]).source
        else:
            return value


def _trace_wholes(value: Value) -> Iterator[Value]:
    """Yield `value` and the earlier values from which its tokens were cut."""
    while True:
        value = strip_views(value)
        yield value
        if "cut" not in value.traits or value.inputs[0].shape[-1:] != value.shape[-1:]:
            return
        value = value.inputs[0]


def _find_whole(value: Value) -> Value:
    """Return the earliest value from which the tokens of `value` were cut."""
    return [*_trace_wholes(value)][-1]


def _find_moved_state(value: Value, adds: Adds) -> Value | None:
    """Return the state of a stream from which the tokens of `value` were cut; None if there is none."""
    return next((whole for whole in _trace_wholes(value) if _find_add(whole, adds) is not None), None)


def _link_previous(add: Add, adds: Adds) -> None:
    """Set `add.previous` to the add before this one on the stream, and collect the norms and factors in between."""
    value = add.x
    reasons: list[str] = []
    while True:
        source = strip_views(value)
        if source in adds and not adds[source].is_partial:
            add.previous, add.reasons = adds[source], reasons
            return
        if source.norm is not None:
            add.late_factors += add.early_factors
            add.early_factors = []
            add.norms.append(source.norm)
            value = source.norm.x
        elif (part := _find_token_source(source, adds, reasons)) is not None:
            add.changes_tokens, value = True, part
        elif (factor := match_factor(source.op)) is not None:
            value = factor.x
            (add.early_factors if add.norms else add.late_factors).append(factor)
        elif source is not (root := _find_root(source)):
            reasons.append(MULTIPLES)
            value = root
        else:
            return


def _find_token_source(value: Value, adds: Adds, reasons: list[str]) -> Value | None:
    """Return the input through which a stream continues if `value` is a cut or a join of its tokens; None otherwise.

    A join of two streams continues none of them. For each step that no `Row` expresses, append a text to `reasons`.
    """
    moved = value.inputs[:1] if "cut" in value.traits else list_joined(value.op) if value.op is not None else []
    parts = [v for v in moved if v.shape[-1:] == value.shape[-1:]]
    states = {part: state for part in parts if (state := _find_moved_state(part, adds)) is not None}
    ends = {part: end for part, state in states.items() if (end := _find_add(state, adds)) is not None}
    last = max(ends, key=lambda part: states[part].index, default=None)
    if last is None:
        return None
    lineage = {*ends[last].lineage()}
    if not lineage.issuperset(ends.values()):
        return None  # two streams are joined
    if any(part not in states and is_ancestor(states[last], part) for part in parts):
        reasons.append(REPLACED)
    starts = {_find_whole(add.x) for add in lineage}
    if len({*ends.values()}) > 1 or any(_find_whole(part) in starts for part in parts if part not in states):
        reasons.append(PARTIAL)
    return last
