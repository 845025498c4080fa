"""The Row of a sublayer: which norms stand where, and which factors the stream, what is added and what is read have."""

from __future__ import annotations

import math
from collections.abc import Sequence

from addnorm.stream.find.adds import Path
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.ops import Factor, Term, expectation
from addnorm.stream.find.sites import Branch
from addnorm.wirings.spec import Factor as RowFactor
from addnorm.wirings.spec import Learned, Row

__all__ = ["row_of", "zero"]


def row_of(branch: Branch, out: Norm | None, scaled: Sequence[Factor] = ()) -> Row:
    """The line of one sublayer; `scaled` are factors of the whole sum, before N_out."""
    kept = Path(
        branch.add.kept.source, branch.add.kept.term, [], [*branch.add.kept.factors, *scaled], branch.add.kept.sums
    )
    path = Path(branch.path.source, branch.path.term, [], [*branch.path.factors, *scaled], branch.path.sums)
    return Row(
        norm_in=bool(branch.reads.norms) and not branch.reads.direct,
        norm_branch=branch.norm is not None,
        norm_out=out is not None,
        a=_factor(kept),
        b=_factor(path) or 1.0,
        c=_factor(Path(branch.add.x, Term(branch.add.x), [], branch.reads.factors)) or 1.0,
    )


def zero(branch: Branch) -> bool:
    """Whether what is added, or what is read, is multiplied by 0, which no row says."""
    read = Path(branch.add.x, Term(branch.add.x), [], branch.reads.factors)
    return _factor(branch.path) == 0.0 or _factor(read) == 0.0


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
    number = number if math.isfinite(number) else 0.0  # the model's weights are not
    return Learned(number, per_feature=any(value.tensor.numel() > 1 for value in learned))
