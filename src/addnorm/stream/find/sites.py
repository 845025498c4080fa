"""What a sublayer is to its stream: what it reads, what it returned, what was added.

x' = N_out( a * x  +  b * N_branch( f( c * N_in(x) ) ) )
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from addnorm.stream.dataflow.graph import Frame, Op, Value
from addnorm.stream.find.adds import Add, Path, Write, between, walk
from addnorm.stream.find.kinds import kind_of
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.ops import TRANSPARENT, Factor, factor_of, reaches, terms_of, up

__all__ = ["Branch", "Reads", "branches", "common"]


@dataclass
class Reads:
    """How a sublayer reads the stream."""

    norms: list[Norm] = field(default_factory=list)
    direct: bool = False
    value: Value | None = None  # what it reads, where that is one value
    factors: list[Factor] = field(default_factory=list)  # between the norm (or the stream) and what is read
    ops: list[Op] = field(default_factory=list)  # of those factors


@dataclass(eq=False)
class Branch:
    """One sublayer's way from the stream to what it adds."""

    add: Add
    path: Path  # from N_branch's y, or from raw, down to the operand
    role: str
    raw: Value
    norm: Norm | None  # N_branch
    ops: list[Op]
    reads: Reads
    kind: str
    frame: Frame  # the smallest call that contains the sublayer

    @property
    def module(self) -> str:
        """Its path."""
        return self.frame.path


def branches(add: Add) -> list[Branch]:
    """The sublayers of an add, in the order in which they ran."""
    writes = [part for write in add.writes for part in _split(add, write)]
    found = [_branch(add, write) for write in writes]
    return sorted(found, key=lambda branch: branch.raw.index)


def _branch(add: Add, write: Write) -> Branch:
    value = write.path.source
    norm = value.norm if write.role == "branch" else None
    if norm is not None and (not reaches(add.read, norm.x) or up(norm.x) is add.read):
        norm = None  # x + N(x): the norm is all that the sublayer is
    raw = value if norm is None else norm.x
    ops = between(add.read, up(raw)) if write.role == "branch" else []
    reads = _reads(add.read, ops) if ops else Reads()
    passed = {
        op for op in ops if op.name in TRANSPARENT and up(op.outputs[0]) is up(add.read)
    }  # no computation of its own
    passed |= {op for n in reads.norms for op in n.ops}
    own = [op for op in ops if op not in passed] or ops
    return Branch(add, write.path, write.role, raw, norm, ops, reads, kind_of(add.read, ops), common(own, add.op.frame))


def _split(add: Add, write: Write) -> list[Write]:
    """The sublayers whose sum was added: attention(x) + feed_forward(x)."""
    source = write.path.source
    terms = terms_of(source.op) if write.role == "branch" and source.op is not None and source.norm is None else None
    if terms is None or not all(reaches(add.read, term.value) for term in terms):
        return [write]
    parts = [[*walk(term)][-1] for term in terms]
    regions = [set(between(add.read, path.source)) for path in parts]
    if not all(regions) or regions[0] <= regions[1] or regions[1] <= regions[0]:
        return [write]  # one is made from the other: a sublayer with a residual connection of its own
    assert source.op is not None
    kinds = {kind_of(add.read, [*region]) for region in regions}
    if len(kinds) == 1 and source.op.frame is not add.op.frame:
        return [write]  # one sublayer's own sum: of experts, say
    out = write.path
    joined = [
        Write(
            Path(
                path.source,
                out.term,
                [*out.ops, *path.ops],
                [*out.factors, *path.factors],
                [*out.sums, path.term, *path.sums],
            )
        )
        for path in parts
    ]
    return [part for one in joined for part in _split(add, one)]


def _reads(x: Value, ops: Sequence[Op]) -> Reads:
    """Follows the stream from x into the branch, as far as the first norm or the first computation."""
    found = Reads()
    inside = set(ops)
    _enter(x, inside, found)
    if len(found.norms) == 1 and not found.direct:
        found.value = found.norms[0].y
        _scaled(found, inside)
    elif not found.norms and found.direct:
        found.value = x
        _scaled(found, inside)
    return found


def _enter(value: Value, inside: set[Op], found: Reads) -> None:
    for op in dict.fromkeys(value.users):
        if op not in inside:
            continue
        out = op.outputs[0]
        norm = min(op.norms, key=lambda norm: norm.y.index, default=None)
        if norm is not None:
            if norm not in found.norms:
                found.norms.append(norm)
        elif up(out) is not out and len(op.inputs) == 1:
            _enter(out, inside, found)
        else:
            found.direct = True


def _scaled(found: Reads, inside: set[Op]) -> None:
    """The factors that everything passes that is read."""
    value = found.value
    casts: list[Op] = []
    while value is not None:
        users = [op for op in dict.fromkeys(value.users) if op in inside]
        if len(users) != 1:
            return
        out = users[0].outputs[0]
        passed = factor_of(users[0])
        if passed is not None and passed[0] is value and passed[1].kind in ("constant", "learned"):
            found.factors.append(passed[1])
            found.ops += [*casts, users[0]]
            found.value, casts = out, []
        elif up(out) is not out and out.shape == value.shape:
            casts.append(users[0])
        else:
            return
        value = out


def common(ops: Sequence[Op], fallback: Frame) -> Frame:
    """The smallest call in which all of them ran."""
    if not ops:
        return fallback
    shared = [*ops[0].frame.chain()]
    for op in ops[1:]:
        chain = {*op.frame.chain()}
        shared = [frame for frame in shared if frame in chain]
    return shared[0]
