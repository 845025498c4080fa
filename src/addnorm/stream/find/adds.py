"""The residual adds of a data flow: x + f(x), in the ways in which it is written.

An add is residual if one operand, but for factors, is a value on which the other one depends. That other one is what was written.

    x + f(x)                       regular           (x + f(x)) + g(x)      two sublayers side by side
    (x + bias) + f(x)              shifted           state + something      an injection
    N(x) + f(x)                    beside its norm   state + earlier state  a skip
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from addnorm.stream.dataflow.graph import DATA, NOISE, Flow, Op, Value
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.ops import Factor, Term, factor_of, mixing, reaches, terms_of, up

__all__ = ["Add", "Path", "Write", "between", "find_adds", "mixes", "walk"]

TOKENWISE = {"cat", "slice", "constant_pad_nd", "index_select", "narrow"}


@dataclass
class Path:
    """The way from a value down to a term of an add: the operators on it, the last one first, and the factors among them."""

    source: Value
    term: Term
    ops: list[Op] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)
    sums: list[Term] = field(default_factory=list)  # the terms of partial sums that the way leads through


@dataclass
class Write:
    """One term that is added to the stream."""

    path: Path  # from what the branch ends in (`path.source`) to the operand
    role: str = (
        "branch"  # or "injection": depends on no state of this stream; "skip": an earlier state; "bias": a parameter
    )


@dataclass(eq=False)
class Add:
    """A residual add: out = a * x + the writes."""

    x: Value
    out: Value
    kept: Path  # from x to the operand
    writes: list[Write]
    before: Add | None = None  # the add with which x was made
    norms: list[Norm] = field(default_factory=list)  # between that and x, the first one last
    early: list[Factor] = field(default_factory=list)  # factors between that and the first of those norms
    late: list[Factor] = field(default_factory=list)  # factors between those norms and x
    source: Value | None = None  # what the branch reads, where that is not x but what x is the norm of
    retokened: bool = False  # tokens joined or left between that and x
    merged: bool = False  # a partial sum of another add
    inside: list[Add] = field(default_factory=list)  # residual adds of the branches' own

    @property
    def read(self) -> Value:
        """Where the branches begin."""
        return self.source or self.x

    @property
    def op(self) -> Op:
        """The operator that adds."""
        assert self.out.op is not None
        return self.out.op

    def states(self) -> Iterator[Add]:
        """This add and those before it on the stream."""
        add: Add | None = self
        while add is not None:
            yield add
            add = add.before


def walk(term: Term) -> Iterator[Path]:
    """The values of which an operand is a multiple, each with the way from it down to the operand; nearest first."""
    value = term.value
    ops: list[Op] = []
    factors: list[Factor] = []
    while True:
        while up(value) is not value:
            assert value.op is not None
            ops.append(value.op)
            value = value.op.inputs[0]
        yield Path(value, term, [*ops], [*factors])
        passed = None if value.op is None or value.norm is not None else factor_of(value.op)
        if passed is None:
            return
        assert value.op is not None
        ops.append(value.op)
        value, factor = passed
        factors.append(factor)


def between(x: Value, raw: Value) -> list[Op]:
    """The operators that lead from x to raw."""
    back: set[Op] = set()
    todo = [raw]
    while todo:
        value = todo.pop()
        if value is x or value.op is None or value.index <= x.index or value.op in back:
            continue
        back.add(value.op)
        todo.extend(value.op.inputs)
    reached, found = {x}, []
    for op in sorted(back, key=lambda op: op.index):
        if any(value in reached for value in op.inputs):
            reached.update(op.outputs)
            found.append(op)
    return found


def mixes(add: Add) -> bool:
    """Whether what is added is more than an elementwise function of the stream, as in x + sin(x)^2."""
    return any(mixing(op) for write in add.writes for op in between(add.read, write.path.source))


def find_adds(flow: Flow, norms: list[Norm]) -> list[Add]:
    """The residual adds in the order in which they ran, each with the one before it; those of a norm's own formula are none."""
    inner = {op for norm in norms for op in norm.ops}
    adds: dict[Value, Add] = {}
    for op in flow.ops:
        terms = None if op in inner else terms_of(op)
        if terms is None or len(op.outputs[0].shape) < 2 or not op.outputs[0].tensor.is_floating_point():
            continue
        add = _regular(op, terms, adds) or _shifted(op, terms) or _beside(op, terms) or _continued(op, terms, adds)
        if add is not None:
            adds[add.out] = add
            _link(add, adds)
    return [add for add in adds.values() if not add.merged]


def _orders(op: Op, terms: tuple[Term, ...]) -> list[tuple[Term, Term]]:
    shape = op.outputs[0].shape
    return [(p, q) for p, q in (terms, terms[::-1]) if p.value.shape == shape]


def _regular(op: Op, terms: tuple[Term, ...], adds: dict[Value, Add]) -> Add | None:
    """x + f(x)."""
    for p, q in _orders(op, terms):
        multiples = {path.source for path in walk(q)}
        kept = next((path for path in walk(p) if reaches(path.source, q.value)), None)
        if kept is None or kept.source in multiples:
            continue  # x + x is no write
        later = _state(q, adds)
        if later is not None and _continues(later.source, kept.source, adds):
            return Add(later.source, op.outputs[0], later, [Write([*walk(p)][-1], "skip")])
        return Add(kept.source, op.outputs[0], kept, [Write([*walk(q)][-1])])
    return None


def _shifted(op: Op, terms: tuple[Term, ...]) -> Add | None:
    """(x + bias) + f(x), where the sublayer's bias was added to the stream first."""
    for p, q in _orders(op, terms):
        path = [*walk(p)][-1]
        inner = terms_of(path.source.op) if path.source.op is not None else None
        for x, bias in (inner, inner[::-1]) if inner is not None else ():
            if bias.value.kind & (DATA | NOISE) or bias.value.tensor.numel() > path.source.shape[-1]:
                continue
            kept = next((way for way in walk(x) if reaches(way.source, q.value)), None)
            if kept is not None:
                shift = Write(_joined([*walk(bias)][-1], path), "bias")
                return Add(kept.source, op.outputs[0], _joined(kept, path), [Write([*walk(q)][-1]), shift])
    return None


def _beside(op: Op, terms: tuple[Term, ...]) -> Add | None:
    """N(x) + f(x), where f reads what is not normalized."""
    for p, q in _orders(op, terms):
        kept = [*walk(p)][-1]
        norm = kept.source.norm
        write = [*walk(q)][-1]
        if norm is not None and write.source is not kept.source and reaches(norm.x, write.source):
            return Add(kept.source, op.outputs[0], kept, [Write(write)], source=up(norm.x))
    return None


def _continued(op: Op, terms: tuple[Term, ...], adds: dict[Value, Add]) -> Add | None:
    """(x + f(x)) + g(x), whose sublayers stand side by side; or a state to which something else is added."""
    for p, q in _orders(op, terms):
        state = _state(p, adds)
        if state is None:
            continue
        partial = adds.get(state.source)
        if partial is not None and reaches(partial.x, q.value) and len(set(state.source.users)) == 1:
            partial.merged = True
            later = (
                _state(partial.writes[0].path.term, adds) if [w.role for w in partial.writes] == ["branch"] else None
            )
            if later is not None and reaches(later.source, q.value):  # (x + the layer's input) + f(x)
                skip = Write(_joined(partial.kept, state), "skip")
                return Add(later.source, op.outputs[0], _joined(later, state), [Write([*walk(q)][-1]), skip])
            writes = [Write(_joined(write.path, state), write.role) for write in partial.writes]
            return Add(partial.x, op.outputs[0], _joined(partial.kept, state), [*writes, Write([*walk(q)][-1])])
        return Add(state.source, op.outputs[0], state, [Write([*walk(q)][-1], "injection")])
    return None


def _state(term: Term, adds: dict[Value, Add]) -> Path | None:
    """The way from a state of a stream, if an operand is a multiple of one."""
    for path in walk(term):
        if path.source in adds or (path.source.norm is not None and up(path.source.norm.x) in adds):
            return path
    return None


def _continues(state: Value, earlier: Value, adds: dict[Value, Add]) -> bool:
    """Whether a state is the end of adds the first of which began with just that earlier value."""
    add = adds.get(state) or (adds.get(up(state.norm.x)) if state.norm is not None else None)
    if add is None:
        return False
    steps = [*add.states()]
    at = next((k for k, step in enumerate(steps) if step.x is earlier or _root(step.x) is _root(earlier)), None)
    return at is not None and (state.norm is None or at > 0)  # x + N(x + f(x)) adds what one sublayer made of x


def _root(value: Value) -> Value:
    """That of which a value is a multiple, or the sum of multiples of one value."""
    while True:
        value = up(value)
        op = value.op
        if op is None or value.norm is not None:
            return value
        passed, terms = factor_of(op), terms_of(op)
        if passed is not None:
            value = passed[0]
        elif terms is not None and len({[*walk(term)][-1].source for term in terms}) == 1:
            value = [*walk(terms[0])][-1].source
        else:
            return value


def _joined(first: Path, then: Path) -> Path:
    """The way to a partial sum, and on to the operand that it is."""
    return Path(
        first.source,
        then.term,
        [*then.ops, *first.ops],
        [*then.factors, *first.factors],
        [*then.sums, first.term, *first.sums],
    )


def _link(add: Add, adds: dict[Value, Add]) -> None:
    """Finds the add with which x was made."""
    value = add.x
    while True:
        source = up(value)
        if source in adds and not adds[source].merged:
            add.before = adds[source]
            return
        if source.norm is not None:
            add.late += add.early
            add.early = []
            add.norms.append(source.norm)
            value = source.norm.x
        elif (part := _same_tokens(source, adds)) is not None:
            add.retokened, value = True, part
        elif source.op is not None and (passed := factor_of(source.op)) is not None:
            value, factor = passed
            (add.early if add.norms else add.late).append(factor)
        elif source is not (root := _root(source)):
            value = root
        else:
            return


def _same_tokens(value: Value, adds: dict[Value, Add]) -> Value | None:
    """The part of a value that continues a stream, where tokens were joined to it or left out."""
    if value.op is None or value.op.name not in TOKENWISE:
        return None
    parts = [v for v in value.op.inputs if v.shape[-1:] == value.shape[-1:] and len(v.shape) == len(value.shape)]
    states = [v for v in parts if up(v) in adds or (up(v).norm is not None and up(up(v).norm.x) in adds)]
    return states[0] if len(states) == 1 else None
