"""What a row does not say: notes and remarks on what is in order, reasons where it is not understood."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from addnorm.stream.find import naming
from addnorm.stream.find.adds import Add, mixes
from addnorm.stream.find.chain import Found
from addnorm.stream.find.inspection import Site
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.ops import expectation, factor_of, reaches, up
from addnorm.stream.find.sites import Branch
from addnorm.wirings.spec import Wiring

__all__ = ["notes_of", "reasons_of", "remarks_of"]

ROLES = {
    "skip": "a skip: an earlier state of the stream",
    "injection": "an injection: does not read this stream",
}
TWICE = "the branch contains x + ... itself: the stream is added twice"
SECOND = "the sublayer adds to a second stream and reads it: two streams in turn, as in reversible layers"
BESIDE = "x' = N(x) + f(x): the sublayer reads the stream before the norm that the residual is taken from"
BOTH = "reads the stream both through a norm and as it is"
SCALED = "the stream is multiplied by a factor after its norm, which no row has"
SHIFTED = (
    "layers begin with the norm that the residual is taken from, z = N(x), x' = z + f(z): that norm is on the stream, as in "
    "post-LN, and is counted to the sublayer before it"
)


def notes_of(found: Found, k: int, branch: Branch) -> list[str]:
    """What the row of a sublayer does not say, and is in order."""
    add = found.adds[k]
    factors = (*branch.path.factors, *add.kept.factors)
    kinds = {factor.kind for factor in factors}
    notes = ["dropout"] * ("noise" in kinds) + ["what is added is masked by token"] * ("mask" in kinds)
    if any(
        factor.kind == "noise" and factor.value is not None and expectation(factor.value) is None for factor in factors
    ):
        notes.append("the mean of the noise is not told by the operators, and taken as 1")
    if add.inside:
        notes.append(f"{len(add.inside)} residual add{'s' * (len(add.inside) > 1)} of its own inside")
    if len(branch.reads.norms) > 1 and not branch.reads.direct:
        notes.append(f"reads through {len(branch.reads.norms)} norms")
    if any(up(norm.x) is up(branch.reads.norms[0].y) for op in branch.ops for norm in op.norms if branch.reads.norms):
        notes.append("a norm of its own follows the one through which it reads")
    if branch.role in ROLES:
        notes.append(ROLES[branch.role])
    return notes


def reasons_of(found: Found, k: int, branch: Branch) -> list[str]:
    """What is not understood of a sublayer."""
    add = found.adds[k]
    inside = [inner for inner in add.inside if mixes(inner)]
    norms = len(found.norms_out[k]) if k + 1 < len(found.adds) else 0
    late = found.adds[k + 1].late if k + 1 < len(found.adds) else []
    reasons = {
        TWICE: _twice(add, branch, inside),
        SECOND: _in_turn(add, branch, inside),
        BESIDE: add.source is not None,
        BOTH: branch.reads.norms and branch.reads.direct,
        SCALED: norms and any(factor.kind in ("constant", "learned") for factor in late),
        f"{norms} norms follow the add, one after the other": norms > 1,
    }
    return [reason for reason, is_so in reasons.items() if is_so]


def _twice(add: Add, branch: Branch, inside: Sequence[Add]) -> bool:
    """Whether what is added is, but for norms and factors, a sum of x and something."""
    sums = {inner.out: inner for inner in inside}
    value = up(branch.path.source)
    while value is not add.x:
        passed = factor_of(value.op) if value.op is not None else None
        if value in sums:
            value = sums[value].x
        elif value.norm is not None:
            value = value.norm.x
        elif passed is not None:
            value = passed[0]
        else:
            return False
        value = up(value) if value is not add.x else value
    return True


def _in_turn(add: Add, branch: Branch, inside: Sequence[Add]) -> bool:
    """Whether the sublayer reads the stream only by way of another one, to which it adds first."""
    others = {inner.op for inner in inside if inner.before is not None and not reaches(add.read, inner.x)}
    return bool(others) and not reaches(add.read, branch.raw, without=others)


def remarks_of(found: Found, sites: Sequence[Site], model: nn.Module, wiring: Wiring | None) -> list[str]:
    """What a reader of the model's code would not expect."""
    pairs = zip(found.norms_out, found.adds, found.adds[1:], strict=False)
    remarks = [SHIFTED] * any(
        norms and _inside(norms[0], after) and not _inside(norms[0], add) for norms, add, after in pairs
    )
    shared = {site.path: site.shared for site in sites if site.shared > 1}
    if shared:
        remarks.append(f"shared weights: {', '.join(f'{path} is {n} sublayers' for path, n in shared.items())}")
    modules = dict(model.named_modules()) if wiring is not None else {}
    for path in dict.fromkeys(site.add_path for site in sites):
        if wiring is None or path not in modules:
            continue
        kind = type(modules[path])
        summary = (vars(kind).get("__doc__") or "").partition("\n")[0]
        claim = naming.says_otherwise(f"{kind.__name__} {summary}", wiring)
        if claim:
            remarks.append(f"{kind.__name__} calls itself {claim!r}, and is {wiring.name}")
    return remarks


def _inside(norm: Norm, add: Add) -> bool:
    """Whether a norm ran in the call in which an add ran, or in one made from there."""
    assert norm.y.op is not None
    return bool(add.op.frame.path) and add.op.frame in norm.y.op.frame.chain()
