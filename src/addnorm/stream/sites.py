"""What a sublayer is to its stream: what it reads, what it returned, what was added, and the Row that says it.

    x' = N_out( a * x  +  b * N_branch( f( c * N_in(x) ) ) )
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from addnorm.nn.wiring import Factor as RowFactor
from addnorm.nn.wiring import Learned, Row
from addnorm.stream.adds import Add, Path, Write, between, walk
from addnorm.stream.graph import DATA, PARAMETER, Frame, Op, Value
from addnorm.stream.norms import Norm
from addnorm.stream.ops import (
    ATTENTION,
    LOCAL,
    MIXING,
    PRODUCTS,
    SOFTMAX,
    TRANSPARENT,
    Factor,
    Term,
    expectation,
    factor_of,
    opaque,
    reaches,
    terms_of,
    up,
)

__all__ = ["Branch", "Reads", "branches", "layers_of", "row_of"]


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
    passed = {op for op in ops if op.name in TRANSPARENT and up(op.outputs[0]) is up(add.read)}  # no computation of its own
    passed |= {op for n in reads.norms for op in n.ops}
    own = [op for op in ops if op not in passed] or ops
    return Branch(add, write.path, write.role, raw, norm, ops, reads, _kind(add.read, ops), _common(own, add.op.frame))


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
    kinds = {_kind(add.read, [*region]) for region in regions}
    if len(kinds) == 1 and source.op.frame is not add.op.frame:
        return [write]  # one sublayer's own sum: of experts, say
    out = write.path
    joined = [
        Write(Path(path.source, out.term, [*out.ops, *path.ops], [*out.factors, *path.factors], [*out.sums, path.term, *path.sums]))
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
        norm = next((n for n in (v.norm for v in _near(op)) if n is not None and op in n.ops), None)
        if norm is not None:
            if norm not in found.norms:
                found.norms.append(norm)
        elif up(out) is not out and len(op.inputs) == 1:
            _enter(out, inside, found)
        else:
            found.direct = True


def _near(op: Op) -> list[Value]:
    """The values made after an operator on the way of a norm written by hand: where its norm is noted."""
    seen, todo, found = set(), [op], []
    while todo and len(seen) < 40:
        here = todo.pop()
        if here in seen:
            continue
        seen.add(here)
        for out in here.outputs:
            if out.norm is not None:
                found.append(out)
            else:
                todo.extend(out.users)
    return found


def _scaled(found: Reads, inside: set[Op]) -> None:
    """The factors that everything passes that is read."""
    value, casts = found.value, []
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


def _kind(x: Value, ops: Sequence[Op]) -> str:
    """What a sublayer computes, by its operators."""
    attends = [op for op in ops if op.name in ATTENTION]
    if not attends:
        attends = [op for op in ops if op.name in PRODUCTS and _weighs(op)]
    if attends:
        read = [reaches(x, op.args[at]) for op in attends for at in (1, 2) if _given(op, at) and op.name in ATTENTION]
        read += [reaches(x, _values_of(op)) for op in attends if op.name not in ATTENTION]
        return "attention" if any(read) else "cross-attention"
    products = [op for op in ops if op.name in PRODUCTS and all(_activation(v) for v in op.inputs) and not _with_itself(op)]
    if products and any(op.name in SOFTMAX for op in ops):  # a softmax in windows, say, whose way to the product is long
        return "attention" if all(reaches(x, v) for op in products for v in op.inputs) else "cross-attention"
    local = any(op.name in LOCAL and not _counts(op) and _wide(op) for op in ops)
    if products and not local:
        return "attention"
    if not local and any(op.name in MIXING or (opaque(op) and "linear" in op.name) for op in ops):
        return "feed-forward"
    return "other"


def _with_itself(op: Op) -> bool:
    """Whether a product is one of a value with itself: a length."""
    return len({up(value) for value in op.inputs}) == 1


def _given(op: Op, at: int) -> bool:
    return len(op.args) > at and isinstance(op.args[at], Value)


def _activation(value: Value) -> bool:
    return value.kind & (PARAMETER | DATA) == PARAMETER | DATA


def _weighs(op: Op) -> bool:
    """Whether one factor of a product is a softmax."""
    return any(_from_softmax(value) for value in op.inputs)


def _from_softmax(value: Value) -> bool:
    for _ in range(8):
        value = up(value)
        if value.op is None:
            return False
        if value.op.name in SOFTMAX:
            return True
        passed = factor_of(value.op)
        if passed is None and value.op.name not in ("slice", "narrow", "split", "nan_to_num"):
            return False
        value = passed[0] if passed is not None else value.op.inputs[0]
    return False


def _values_of(op: Op) -> Value:
    """The factor of a product with a softmax that is not the softmax."""
    return next((value for value in op.inputs if not _from_softmax(value)), op.inputs[-1])


def _counts(op: Op) -> bool:
    """Whether an operator works on whole numbers: where to send tokens, say."""
    tensor = op.outputs[0].tensor
    return not (tensor.is_floating_point() or tensor.is_complex())


def _wide(op: Op) -> bool:
    """Whether an operator mixes neighbours: a convolution with a kernel of one does not."""
    if "convolution" not in op.name:
        return True
    kernel = op.inputs[1].shape[2:] if len(op.inputs) > 1 else ()
    return any(size > 1 for size in kernel)


def _common(ops: Sequence[Op], fallback: Frame) -> Frame:
    """The smallest call in which all of them ran."""
    if not ops:
        return fallback
    shared = [*ops[0].frame.chain()]
    for op in ops[1:]:
        chain = {*op.frame.chain()}
        shared = [frame for frame in shared if frame in chain]
    return shared[0]


def row_of(branch: Branch, out: Norm | None, scaled: Sequence[Factor] = ()) -> Row:
    """The line of one sublayer; `scaled` are factors of the whole sum, before N_out."""
    kept = Path(branch.add.kept.source, branch.add.kept.term, [], [*branch.add.kept.factors, *scaled], branch.add.kept.sums)
    path = Path(branch.path.source, branch.path.term, [], [*branch.path.factors, *scaled], branch.path.sums)
    return Row(
        norm_in=bool(branch.reads.norms) and not branch.reads.direct,
        norm_branch=branch.norm is not None,
        norm_out=out is not None,
        a=_factor(kept),
        b=_factor(path),
        c=_factor(Path(branch.add.x, Term(branch.add.x), [], branch.reads.factors)),
    )


def _factor(path: Path) -> RowFactor:
    """The product of the factors on a way, as a Row has it; dropout, masks and guards are no part of it."""
    number, learned = 1.0, []
    for factor in path.factors:
        if factor.kind == "noise" and factor.value is not None:
            number *= expectation(factor.value) or 1.0
        elif factor.kind == "constant":
            number *= factor.number
        elif factor.kind == "learned" and factor.value is not None:
            learned.append(factor.value)
    for term in (path.term, *path.sums):
        number *= term.factor
        if term.scale is not None:
            learned.append(term.scale)
    if not learned:
        short = float(f"{number:.12g}")
        return short if math.isclose(short, number, rel_tol=1e-15) else number  # 0.9 * (1 / 0.9) is 1
    for value in learned:
        number *= float(value.tensor.detach().double().mean())
    return Learned(number, per_feature=any(value.tensor.numel() > 1 for value in learned))


def layers_of(found: Sequence[Branch]) -> list[int]:
    """The layer of each sublayer, counted from 0: told by the numbers in the modules' paths, else by what repeats."""
    for depth in range(_deepest(found)):
        keys = [tuple(_numbers(branch)[depth : depth + 1]) for branch in found]
        if len({key for key in keys if key}) > 1:
            layers = _in_order([key or k for k, key in enumerate(keys)])
            if len({*layers}) < len(found):
                return layers
            break
    kinds = [branch.kind for branch in found]  # each sublayer has its number, or none has: told by what repeats
    for period in (3, 2):
        if len(kinds) % period == 0 and kinds == kinds[:period] * (len(kinds) // period) and len({*kinds[:period]}) == period:
            return [k // period for k in range(len(kinds))]
    return [*range(len(found))]


def _numbers(branch: Branch) -> list[tuple[str, str]]:
    """The numbered components of a path, each with what stands before it."""
    parts = branch.add.op.frame.path.split(".")
    mine = branch.frame.path.split(".")
    parts = mine if len(mine) >= len(parts) else parts
    return [(".".join(parts[:k]), part) for k, part in enumerate(parts) if part.isdigit()]


def _deepest(found: Sequence[Branch]) -> int:
    return max((len(_numbers(branch)) for branch in found), default=0)


def _in_order(keys: Sequence[object]) -> list[int]:
    """The number of each run of equal keys."""
    layers: list[int] = []
    for k, key in enumerate(keys):
        layers.append(0 if not k else layers[-1] + (key != keys[k - 1]))
    return layers
