"""A stream and its sublayers as they are told: names, rows, closures, the wiring, and what is not understood."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from addnorm import wirings
from addnorm.stream.find import naming
from addnorm.stream.find.chain import Found
from addnorm.stream.find.closure import closure_of, tolerance, total_of
from addnorm.stream.find.inspection import Site, Stream, Unknown
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.ops import CHANNELS, NORMALIZING, up
from addnorm.stream.find.reasons import notes_of, reasons_of, remarks_of
from addnorm.stream.find.rows import row_of, zero
from addnorm.stream.find.sites import Branch
from addnorm.wirings.spec import Row, Wiring

__all__ = ["Told", "tell"]

TORN = "begins with a function, element by element, of where another stream ends: the sum is not passed on as it is"
RESI_DUAL = "a second stream has the same writes and no norms; the output is the sum of both"


@dataclass
class Told:
    """A stream, and what is not understood of it."""

    stream: Stream
    unknown: list[Unknown] = field(default_factory=list)


def tell(
    found: Found, layers: Sequence[int], name: str, start: int, other_layers: int | None, torn: bool, model: nn.Module
) -> Told:
    """All that is told of a stream.

    Args:
        found: the stream.
        layers: of its sublayers.
        name: of the stream.
        start: the number of its first sublayer.
        other_layers: how many the other stream has, where there are two.
        torn: whether it begins with an elementwise function of where another one ends.
        model: whose it is.
    """
    unknown: list[Unknown] = []
    sites, seen, limits = [], [], []
    pairs = zip(found.adds, found.branches, found.norms_out, strict=True)
    closures = [closure_of(add, parts, _first(norms)) for add, parts, norms in pairs]
    names = _Names(found)
    for at, ((k, branch), layer) in enumerate(zip(found.sublayers(), layers, strict=True)):
        add, norm_out = found.adds[k], _first(found.norms_out[k])
        reasons = reasons_of(found, k, branch)
        if torn and not at:
            reasons.append(TORN)
        if zero(branch):
            reasons.append("what the sublayer reads or returns is multiplied by 0")
        row = row_of(branch, norm_out, found.scaled(k))
        norms = [norm for norm in (norm_out, branch.norm, *branch.reads.norms) if norm is not None]
        way = [op.outputs[0] for op in (*add.kept.ops, *branch.path.ops)]
        limit = tolerance(
            *(v.tensor.dtype for v in (add.x, add.out, branch.raw, *way)), *(norm.dtype for norm in norms)
        )
        limits.append(limit)
        closes = closures[k] <= limit
        norm_in = None if branch.reads.direct else _first(branch.reads.norms)
        site = Site(
            id=names.id_of(branch), path=branch.module, modules=names.modules_of(branch), kind=branch.kind, layer=layer,
            index=start + at, stream=name, row=row, norm_in=norm_in, norm_branch=branch.norm, norm_out=norm_out,
            closure=closures[k], closes=closes, parallel=len(found.branches[k]), shared=names.shared_by(branch),
            call=branch.frame.call, add_path=add.op.frame.path, notes=tuple(notes_of(found, k, branch)), role=branch.role,
            found=(found, k, branch),
        )  # fmt: skip
        sites.append(site)
        seen.append(_seen(found, k, branch, layer, row, bool(reasons)))
        if not closes:
            reasons.insert(0, f"{site.equation} does not close: {_why(closures[k], limit, branch)}")
        unknown += [Unknown(site.id, reason) for reason in reasons]
    first = found.adds[0]
    embedding = first.norms[0] if first.norms and first.source is None else None
    wiring, remarks = _wiring(found, seen, embedding, other_layers)
    total = total_of(found) if all(one.row.is_sum for one in seen) else None
    closed = total is None or total <= max(limits) * len(found.adds) ** 0.5
    if total is not None and not closed and all(site.closes for site in sites):
        unknown.append(Unknown(name, f"x_L = x_0 + all writes does not close: relative error {total:.1e}"))
    axis, width = _axis(found)
    told = [*remarks, *remarks_of(found, sites, model, wiring)]
    return Told(
        Stream(
            name, width, str(first.x.tensor.dtype).removeprefix("torch."), tuple(sites), layers[-1] + 1, wiring, embedding,
            found.final[-1] if found.final else None, total, closed, tuple(dict.fromkeys(told)), found, axis,
        ),
        unknown,
    )  # fmt: skip


def _wiring(
    found: Found, seen: Sequence[naming.Seen], embedding: Norm | None, other_layers: int | None
) -> tuple[Wiring | None, list[str]]:
    wiring, remarks = naming.named(seen, bool(found.final), embedding is not None, other_layers)
    if found.dual is not None and wiring is not None and wiring.name == "post_ln":
        return wirings.resi_dual(), [RESI_DUAL]
    return wiring, remarks


def _why(closure: float, limit: float, branch: Branch) -> str:
    """What is wrong where an equation does not close."""
    values = branch.add.out.tensor
    if not values.numel():
        return "the inputs hold no token, so that nothing is proven"
    if not values.isfinite().any():
        return "no number of the stream is finite"
    return f"relative error {closure:.1e}, allowed {limit:.0e}"


def _first(norms: Sequence[Norm]) -> Norm | None:
    return norms[0] if norms else None


class _Names:
    """What the sublayers of a stream are called."""

    def __init__(self, found: Found) -> None:
        flat = [branch for _, branch in found.sublayers()]
        self._paths = Counter(branch.module for branch in flat)
        calls: dict[str, set[int]] = {}
        for branch in flat:
            calls.setdefault(branch.module, set()).add(branch.frame.call)
        self._calls = {path: len(numbers) for path, numbers in calls.items()}
        self._used: Counter[str] = Counter()

    def distinct(self, branch: Branch) -> bool:
        """Whether each call of the module is one sublayer."""
        return self._paths[branch.module] == self._calls[branch.module]

    def id_of(self, branch: Branch) -> str:
        """Its name, which no other has."""
        path = branch.module
        if self._paths[path] == 1:
            name = path or branch.kind
        elif self.distinct(branch):
            name = f"{path}#{branch.frame.call + 1}"
        else:
            name = f"{path}/{branch.kind}" if path else branch.kind
        self._used[name] += 1
        return f"{name}#{self._used[name]}" if self._used[name] > 1 else name

    def modules_of(self, branch: Branch) -> tuple[str, ...]:
        """Those modules in a call of several sublayers in which this one ran."""
        if self.distinct(branch):
            return ()
        found: dict[str, None] = {}
        for op in branch.ops:
            if any(op in norm.ops for norm in branch.reads.norms):
                continue
            chain = [*op.frame.chain()]
            if branch.frame in chain and op.frame is not branch.frame:
                found[chain[chain.index(branch.frame) - 1].path] = None
        return tuple(found)

    def shared_by(self, branch: Branch) -> int:
        """How many sublayers are that module."""
        return self._paths[branch.module] if self._calls[branch.module] > 1 and self.distinct(branch) else 1


def _seen(found: Found, k: int, branch: Branch, layer: int, row: Row, odd: bool) -> naming.Seen:
    """What is judged by of a sublayer."""
    parts = found.branches[k]
    return naming.Seen(
        layer, row, branch.kind, branch.role, sum(part.role == "branch" for part in parts),
        frozenset(id(norm) for part in parts for norm in part.reads.norms), tuple(_learned(branch)), odd, _back(found, k, branch),
        _normed_inside(branch),
    )  # fmt: skip


def _learned(branch: Branch) -> list[str]:
    """The names of the parameters that scale what it adds."""
    values = [f.value for f in branch.path.factors if f.kind == "learned" and f.value is not None]
    values += [t.scale for t in (branch.path.term, *branch.path.sums) if t.scale is not None]
    names = []
    for value in values:
        made = value
        while made.op is not None and made.op.inputs:
            made = made.op.inputs[0]
        names.append(made.name)
    return names


def _normed_inside(branch: Branch) -> bool:
    """Whether a sublayer has norms besides those of its row."""
    known = {op for norm in (*branch.reads.norms, branch.norm) if norm is not None for op in norm.ops}
    return any(op.name in NORMALIZING or op.norms for op in branch.ops if op not in known)


def _back(found: Found, k: int, branch: Branch) -> int:
    """For a skip: how many sublayers before the end of this add its state entered."""
    if branch.role == "skip":
        for j in range(k, -1, -1):
            if found.adds[j].x is branch.raw:
                return sum(part.role == "branch" for parts in found.branches[j : k + 1] for part in parts)
    return 0


def _axis(found: Found) -> tuple[int, int]:
    """Where the features of a stream stand, counted from the end, and how many they are: as its norms or convolutions have it."""
    out = found.adds[0].out.shape
    flat = [branch for parts in found.branches for branch in parts]
    norms = [norm for branch in flat for norm in (*branch.reads.norms, branch.norm) if norm is not None]
    norms += [norm for after in found.norms_out for norm in after]
    if norms:
        width = norms[0].x.shape[-1]
        at = [k - len(out) for k, n in enumerate(out) if n == width]
        return (at[-1] if at else -1), width
    for branch in flat:
        first = next(
            (
                op.inputs[0]
                for op in branch.ops
                if op.name in CHANNELS and op.inputs and up(op.inputs[0]) is up(branch.add.read)
            ),
            None,
        )
        if first is not None and len(first.shape) == len(out):
            channels = first.shape[1]  # of the stream as the convolution has it; the stream itself may have them last
            return (1 - len(out) if out[1] == channels else -1), channels
    return -1, out[-1]
