"""Sublayers of a captured run: what each reads, computes and writes, its kind, its layer, and its `Row`.

x' = N_out(a * x + b * N_branch(f(c * N_in(x))))

The kind follows from the operators (kinds.py), never from names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, takewhile

from addnorm.stream.dataflow.arithmetic import (
    Factor,
    get_noise_mean,
    is_ancestor,
    is_move,
    is_view,
    match_factor,
    match_terms,
    strip_views,
)
from addnorm.stream.dataflow.graph import PARAMETER, Frame, Op, Value, find_ops_between, walk
from addnorm.stream.find.adds import Add, Write
from addnorm.stream.find.kinds import classify_sublayer
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.paths import Path, join_paths, trace_origin
from addnorm.wirings import spec


@dataclass
class Reads:
    """How a sublayer reads the stream.

    Attributes:
        norms: the norms through which the sublayer reads.
        direct: whether some operators read the stream itself.
        value: the single value that the sublayer reads; None if it reads several values.
        factors: the factors between the norm (or the stream) and that value.
    """

    norms: list[Norm] = field(default_factory=list)
    direct: bool = False
    value: Value | None = None
    factors: list[Factor] = field(default_factory=list)


@dataclass(eq=False)
class Sublayer:
    """One sublayer: the operators from the stream to its term of the add.

    Attributes:
        add: the add with which it writes.
        place: index of the add in the stream.
        write_path: the views and factors from the output of N_branch, or from `raw`, to the operand of the add.
        role: "branch", "skip", "injection" or "bias".
        raw: the output before N_branch and factors.
        norm: N_branch.
        ops: the operators from the stream to `raw`; empty unless the role is "branch".
        own_ops: `ops` without views of the stream and the norms through which the sublayer reads.
        reads: how the sublayer reads the stream.
        kind: "attention", "cross-attention", "feed-forward" or "other".
        frame: the smallest module call that contains the sublayer.
    """

    add: Add
    place: int
    write_path: Path
    role: str
    raw: Value
    norm: Norm | None
    ops: list[Op]
    own_ops: list[Op]
    reads: Reads
    kind: str
    frame: Frame

    @property
    def module(self) -> str:
        """Path of the module whose call is `frame`."""
        return self.frame.path


# Sublayers of an add.


def find_sublayers(add: Add, place: int) -> list[Sublayer]:
    """Return the sublayers of `add`, which has the index `place` in its stream, in the order in which they ran."""
    writes = [part for write in add.writes for part in _split_write(add, write)]
    return sorted((_build_sublayer(add, place, write) for write in writes), key=lambda sublayer: sublayer.raw.index)


def _build_sublayer(add: Add, place: int, write: Write) -> Sublayer:
    value = write.path.source
    norm = value.norm if write.role == "branch" else None
    if norm is not None and (not is_ancestor(add.read, norm.x) or strip_views(norm.x) is add.read):
        norm = None  # x + N(x): the norm is the whole sublayer
    raw = value if norm is None else norm.x
    ops = _find_branch_ops(add, strip_views(raw)) if write.role == "branch" else []
    reads = _find_reads(add.read, ops) if ops else Reads()
    start = strip_views(add.read)
    shared = {op for op in ops if "view" in op.traits and strip_views(op.out) is start}
    shared |= {op for read_norm in reads.norms for op in read_norm.ops}
    own = [op for op in ops if op not in shared] or ops
    kind = classify_sublayer(add.read, ops, add.other_ops)
    frame = find_common_frame(own, add.op.frame)
    return Sublayer(add, place, write.path, write.role, raw, norm, ops, own, reads, kind, frame)


def _find_branch_ops(add: Add, raw: Value) -> list[Op]:
    """Return the operators from the stream to `raw` on paths without other streams, or else on all paths."""
    return find_ops_between(add.read, raw, add.other_ops) or find_ops_between(add.read, raw)


def list_parameters(sublayer: Sublayer) -> list[str]:
    """Return the names of a sublayer's parameters, without those of the norm of its input."""
    return find_parameters(sublayer.own_ops)


def find_parameters(ops: Iterable[Op]) -> list[str]:
    """Return the names of the parameters that operators read."""
    starts = [v for op in ops for v in op.inputs if v.kind == PARAMETER]
    values = walk(starts, lambda value: [v for v in value.inputs if v.kind == PARAMETER])
    return sorted({value.name for value in values if value.op is None} - {""})


def _split_write(add: Add, write: Write) -> list[Write]:
    """Return a write for each term of a sum of sublayers, attention(x) + feed_forward(x); otherwise [write]."""
    source = write.path.source
    terms = match_terms(source.op) if write.role == "branch" and source.norm is None else None
    if terms is None or not all(is_ancestor(add.read, term.value) for term in terms):
        return [write]
    paths = [trace_origin(term) for term in terms]
    regions = [_find_branch_ops(add, path.source) for path in paths]
    first, second = map(set, regions)
    if first <= second or second <= first:
        return [write]  # one term is computed from the other: a sublayer with its own residual connection
    assert source.op is not None
    kinds = {classify_sublayer(add.read, region, add.other_ops) for region in regions}
    norms = [{*_find_reads(add.read, region).norms} for region in regions]
    have_own_norms = all(norms) and norms[0].isdisjoint(norms[1])
    if len(kinds) == 1 and source.op.frame is not add.op.frame and not have_own_norms:
        return [write]  # a sum inside one sublayer, over experts for example
    return [part for path in paths for part in _split_write(add, Write(join_paths(path, write.path)))]


def _find_reads(x: Value, ops: Sequence[Op]) -> Reads:
    """Return how a branch with the operators `ops` reads the stream x: through norms or directly, and with which factors."""
    inside = set(ops)
    readers = [*dict.fromkeys(_list_readers(x, inside))]
    norms = [norm for norm in readers if norm is not None]
    reads = Reads(norms, direct=None in readers)
    if len(readers) == 1:
        reads.value = norms[0].y if norms else x
    _follow_factors(reads, inside)
    return reads


def _list_readers(value: Value, inside: set[Op]) -> Iterator[Norm | None]:
    """Yield the norms that read a value or its views, and None for each other operator that reads one."""
    for op in value.users:
        if op not in inside:
            continue
        is_one_view = is_view(op) and len(op.inputs) == 1
        after = [*_list_readers(op.out, inside)] if (is_one_view or is_move(op)) and not op.norms else []
        # A join or a cut is followed to a norm of these tokens and others.
        is_normed = op.out.shape[-1:] == value.shape[-1:] and bool(after) and None not in after
        if op.norms:
            yield op.norms[0]
        elif is_one_view or is_normed:
            yield from after
        else:
            yield None


def _follow_factors(reads: Reads, inside: set[Op]) -> None:
    """Collect the factors that multiply all that a sublayer reads, and set `reads.value` to the last product."""
    value = reads.value
    while value is not None:
        users = [op for op in value.users if op in inside]
        if len(users) != 1:
            return
        out = users[0].out
        product = match_factor(users[0])
        if product is not None and product.x is value and product.kind in ("constant", "learned"):
            reads.factors.append(product)
            reads.value = out
        elif not is_view(users[0]) or sorted(out.shape) != sorted(value.shape):  # features may change their place
            return
        value = out


def find_common_frame(ops: Sequence[Op], default: Frame) -> Frame:
    """Return the smallest module call in which all operators ran; `default` if there are no operators."""
    chains = [[*op.frame.chain()] for op in ops]
    shared = {*chains[0]}.intersection(*chains) if chains else {default}
    return next(frame for frame in (*chains[:1], [default])[0] if frame in shared)


# Rows.


def build_row(sublayer: Sublayer, norm_out: Norm | None, sum_factors: Sequence[Factor] = ()) -> spec.Row:
    """Return the `Row` of a sublayer. The factors in `sum_factors` multiply the whole sum, before N_out."""
    reads = sublayer.reads
    return spec.Row(
        norm_in=bool(reads.norms) and not reads.direct,
        norm_branch=sublayer.norm is not None,
        norm_out=norm_out is not None,
        a=_multiply(sublayer.add.residual_path, sum_factors),
        b=_multiply(sublayer.write_path, sum_factors) or 1.0,
        c=_multiply(Path(sublayer.raw, []), reads.factors) or 1.0,
    )


def has_zero_factor(sublayer: Sublayer) -> bool:
    """Return whether the write or the read is multiplied by 0, which no `Row` expresses."""
    return 0.0 in (_multiply(sublayer.write_path), _multiply(Path(sublayer.raw, []), sublayer.reads.factors))


def _multiply(path: Path, others: Sequence[Factor] = ()) -> spec.Factor:
    """Return the product of all factors. A dropout mask counts as its mean; token masks and guards are left out."""
    path = replace(path, factors=[*path.factors, *others])
    product, learned = path.number, path.scales
    for factor in path.factors:
        if factor.kind == "noise" and factor.value is not None:
            product *= get_noise_mean(factor.value) or 1.0
    if not learned:
        short = float(f"{product:.12g}")
        return short if math.isclose(short, product, rel_tol=1e-15) else product  # 0.9 * (1 / 0.9) is 1
    for value in learned:
        product *= float(value.exact.mean())
    product = product if math.isfinite(product) else 0.0  # the weights may have nan
    return spec.Learned(product, per_feature=any(value.tensor.numel() > 1 for value in learned))


# Layers.


def assign_layers(sublayers: Sequence[Sublayer]) -> list[int]:
    """Return the layer index of each sublayer, by numbers in module paths, a period of kinds, or the adding modules.

    A skip that starts in the layer of the sublayer before it belongs to this layer. Other skips and injections belong to the
    layer of the next sublayer.
    """
    usual = [sublayer for sublayer in sublayers if sublayer.role == "branch"] or sublayers
    known = dict(zip(usual, _number_layers(usual), strict=True))
    own: list[int | None] = [known.get(sublayer) for sublayer in sublayers]
    for k in reversed(range(len(sublayers) - 1)):
        own[k] = own[k + 1] if own[k] is None else own[k]
    starts = {sublayer.add.x: known[sublayer] for sublayer in reversed(sublayers) if sublayer in known}
    layers: list[int] = []
    for sublayer, layer in zip(sublayers, own, strict=True):
        before = layers[-1] if layers else None
        is_within = sublayer.role == "skip" and before is not None and starts.get(sublayer.raw) == before
        layers.append((before if is_within or layer is None else layer) or 0)
    return layers


def _number_layers(sublayers: Sequence[Sublayer]) -> list[int]:
    numbers = [_find_numbers(sublayer) for sublayer in sublayers]
    modules = [sublayer.add.op.frame.path or k for k, sublayer in enumerate(sublayers)]  # "" is the model
    for depth in range(max(map(len, numbers), default=0)):
        keys = [tuple(of_one[depth : depth + 1]) for of_one in numbers]
        if len({key for key in keys if key}) > 1:
            layers = _number_runs([key or module for key, module in zip(keys, modules, strict=True)])
            if len({*layers}) < len(sublayers):
                return layers
            break
    # Each sublayer has another number, or no sublayer has a number.
    by_kind = number_periods([sublayer.kind for sublayer in sublayers])
    return by_kind or (_number_runs(modules) if len({*modules}) > 1 else [*range(len(sublayers))])


def number_periods(kinds: Sequence[str]) -> list[int] | None:
    """Return the layer of each sublayer if `kinds` repeats a group of three or two different kinds; None if not."""
    for period in (3, 2):
        repeats = len(kinds) % period == 0 and [*kinds] == [*kinds[:period]] * (len(kinds) // period)
        if repeats and len({*kinds[:period]}) == period:
            return [k // period for k in range(len(kinds))]
    return None


def _find_numbers(sublayer: Sublayer) -> list[tuple[str, str]]:
    """Return the numbers in a sublayer's path, each after the path that precedes the number: ("layers", "3")."""
    own, adding = sublayer.frame.path.split("."), sublayer.add.op.frame.path.split(".")
    is_left = any(part.isdigit() for part in own) and adding[: len(own)] != own  # another module adds
    parts = own if is_left else max(own, adding, key=len)
    if not any(part.isdigit() for part in parts):  # the common start of the paths of its modules, without norms
        frames = {op.frame.path for op in sublayer.own_ops if op.frame is not sublayer.frame}
        columns = zip(*(path.split(".") for path in frames), strict=False)
        parts = [column[0] for column in takewhile(lambda column: len({*column}) == 1, columns)]
    return [(".".join(parts[:k]), part) for k, part in enumerate(parts) if part.isdigit()]


def _number_runs(keys: Sequence[object]) -> list[int]:
    """Return for each key the index of its group of equal adjacent keys: a, a, b, a -> 0, 0, 1, 2."""
    return [k for k, (_, group) in enumerate(groupby(keys)) for _ in group]
