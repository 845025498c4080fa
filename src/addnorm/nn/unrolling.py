"""The last streams as the sum of what x_0 and each write contribute, with the coefficients and norms' statistics of one call.

    X_L = Π(L, 0) E x_0 + sum over l of Π(L, l) B_l W_l,      Π(L, l) = A_L ... A_{l+1}

A norm on the streams is part of the product: with constant mean and 1/sqrt(variance + eps) it is linear. The bias of this norm,
like a learned bias of the add, belongs to the write of the same sublayer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from addnorm import reference
from addnorm._util.norms import KINDS, Norm
from addnorm.nn.state import Site
from addnorm.nn.step import has_value, is_plain
from addnorm.wirings.coefficients.base import widen
from addnorm.wirings.stage import identity

Term = tuple[Tensor | None, ...]  # one tensor (*, d_model) for each stream; None is zero
_SparseRow = Sequence[tuple[int, Any]]  # the entries of a row that are not the number 0, with their columns


class StreamTerms(NamedTuple):
    """The last streams of a stack as a sum, x_L = x_0 + the writes, and the stack's output `y`.

    If sublayers normalize, scale or mix the streams, `x_0` and `writes` are the contributions after all of that. With n streams
    at the end each tensor but `y` is `(*, n, d_model)`, otherwise `(*, d_model)`.
    """

    x_0: Tensor
    writes: tuple[Tensor, ...]
    x_L: Tensor
    y: Tensor


class _FrozenNorm(NamedTuple):
    """Norm with the constant `rstd` of one call, which makes it linear: weight * (x - centre * mean(x)) * rstd + bias."""

    weight: Tensor | None
    rstd: Tensor
    bias: Tensor | None
    centre: int  # 1, or 0 for a norm that keeps the mean; -1 in a bound


class _Step(NamedTuple):
    """Effect of one site on the streams, as linear maps."""

    n: int  # streams before the site
    rows: Sequence[_SparseRow]  # of A
    inject: Any
    bias: Any
    norms: Any  # for each new stream a `_FrozenNorm` or None

    def carry(self, term: Term) -> Term:
        """Return `term`, the contribution of an earlier source, after this site's mixing and norms."""
        carried = (_dot(row, term) for row in self.rows)
        if self.norms is None:
            return tuple(carried)
        return tuple(None if x is None else self._through(k, x) for k, x in enumerate(carried))

    def begin(self, write: Tensor) -> Term:
        """Return the contribution of the site's own write to each stream after the site."""
        terms: list[Tensor | None] = []
        for k in range(len(self.rows)):
            if has_value(self.inject[k], 0.0) and self.bias is None and (self.norms is None or self.norms[k] is None):
                terms.append(None)
                continue
            own = write * self.inject[k]
            if self.bias is not None:
                own = own + self.bias[k]
            terms.append(self._through(k, own, own=True))
        return tuple(terms)

    def bound(self) -> _Step:
        """Return maps of bounds: those of absolute values to bounds of the absolute values after the site."""
        rows = [[(j, abs(entry)) for j, entry in row] for row in self.rows]
        bias = None if self.bias is None else [abs(entry) for entry in self.bias]
        norms = self.norms and [
            norm and _FrozenNorm(_abs(norm.weight), norm.rstd, _abs(norm.bias), -norm.centre) for norm in self.norms
        ]
        return _Step(self.n, rows, [abs(entry) for entry in self.inject], bias, norms)

    def _through(self, k: int, x: Tensor, *, own: bool = False) -> Tensor:
        if self.norms is None or self.norms[k] is None:
            return x
        norm: _FrozenNorm = self.norms[k]
        weight, rstd, bias, centre = norm
        if centre:
            x = x - centre * x.mean(-1, keepdim=True)
        x = x * rstd if weight is None else x * rstd * weight
        return x + bias if own and bias is not None else x


def _abs(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.abs()


def _add(zero: Tensor, *terms: Term) -> tuple[Tensor, ...]:
    """Return the sum of terms in each stream."""
    return tuple(sum((t for t in parts if t is not None), zero) for parts in zip(*terms, strict=True))


def expand(start: Sequence[Tensor], sites: Sequence[Site], kind: Norm) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """Return x_0's part of the last streams, the part of each write, and the tolerance of the sum of all parts.

    The tolerance allows for the streams' rounding at every site, carried through the sites after it.

    Args:
        start: the first streams, one tensor `(*, d_model)` for each.
        sites: the writes and coefficients of the sublayers.
        kind: the kind of the norms.
    """
    eps = torch.finfo(start[0].dtype).eps
    wide = tuple(widen(x) for x in start)
    terms: list[Term] = [wide]
    size = tuple(x.abs() for x in wide)
    zero = torch.zeros_like(size[0])
    error: Term = (zero,) * len(size)
    for site in sites:
        step = _to_step(site, kind, len(terms[0]))
        write = widen(site.write)
        terms = [*(step.carry(term) for term in terms), step.begin(write)]
        bound = step.bound()
        size = _add(zero, bound.carry(size), bound.begin(write.abs()))
        error = _add(zero, bound.carry(error), tuple((1 + step.n) * eps * s for s in size))
    x_0, *writes = (_to_tensor(term, start[0]) for term in terms)
    return x_0, tuple(writes), _to_tensor(error, start[0]) + eps * _to_tensor(size, start[0])


def find_gains(sites: Sequence[Site], embedding: Sequence[float], collapse: Sequence[Any], kind: Norm) -> list[Tensor]:
    """Return the factor with which x_0 and each write reach the last read, broadcastable to `(*, d_model)`.

    A factor belongs to one feature, so the norms here do not subtract the mean over all features.

    Args:
        sites: the writes and coefficients of the sublayers.
        embedding: the factors of x_0 in the first streams.
        collapse: the entries of C of the last read.
        kind: the kind of the norms.
    """
    ones = torch.ones((), dtype=torch.float32, device=sites[0].write.device if sites else None)
    terms: list[Term] = [tuple(ones * factor for factor in embedding)]
    for site in sites:
        step = _to_step(site, kind, len(terms[0]))
        norms = step.norms and [norm and norm._replace(bias=None, centre=0) for norm in step.norms]
        step = step._replace(bias=None, norms=norms)
        terms = [*(step.carry(term) for term in terms), step.begin(ones)]
    last = _to_sparse(collapse)
    gains = (_dot(last, term) for term in terms)
    return [torch.zeros_like(ones) if gain is None else gain for gain in gains]


def to_entries(vector: Any, dim: int) -> list[Any]:
    """Return the coefficients of n streams as entries that broadcast to `(*, d_model)`.

    Args:
        vector: a tuple of entries, a tensor `(*, n)`, or gates `(*, n, d_model)`, a tensor with `dim` dimensions.
        dim: the number of dimensions of the tensor that holds all streams.
    """
    if isinstance(vector, tuple):
        return list(vector[0] if isinstance(vector[0], tuple) else vector)
    return list(vector.unbind(-2)) if vector.dim() == dim else [entry.unsqueeze(-1) for entry in vector.unbind(-1)]


def _to_sparse(row: Sequence[Any]) -> _SparseRow:
    return [(j, entry) for j, entry in enumerate(row) if not has_value(entry, 0.0)]


def _dot(row: _SparseRow, term: Term) -> Tensor | None:
    total: Tensor | None = None
    for j, entry in row:
        x = term[j]
        if x is not None:
            part = x if has_value(entry, 1.0) else entry * x
            total = part if total is None else total + part
    return total


def _to_step(site: Site, kind: Norm, n: int) -> _Step:
    """Return the linear maps of a site on `n` streams."""
    if site.mix is None:
        rows: Any = identity(n)
    elif isinstance(site.mix, tuple):
        rows = site.mix
    else:
        rows = [[entry.unsqueeze(-1) for entry in row.unbind(-1)] for row in site.mix.unbind(-2)]
    sparse = [_to_sparse(row) for row in rows]
    norms = None
    if site.norms is not None:
        norms = [_freeze(norm, total, kind) for norm, total in zip(site.norms, site.total, strict=True)]
    return _Step(n, sparse, to_entries(site.inject, -1), site.bias, norms)


def _freeze(norm: Any, total: Tensor, kind: Norm) -> _FrozenNorm | None:
    """Return `norm` with its statistics of `total` as constants, or None without a norm."""
    if norm is None:
        return None
    x = widen(total)
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps  # that of the arithmetic
    weight, bias = (None if t is None else t.to(x.dtype) for t in (norm.weight, getattr(norm, "bias", None)))
    frozen = _FrozenNorm(weight, reference.statistics(x, kind, eps).rstd, bias, int(KINDS[kind].is_centred))
    if not is_plain(norm, kind, total):
        _check_formula(norm, frozen, total)
    return frozen


def _check_formula(norm: Any, frozen: _FrozenNorm, total: Tensor) -> None:
    """Check that a norm which the stack calls as a module computes the formula, up to its rounding."""
    y: Tensor = norm(total)
    step = _Step(1, [], [1.0], None, [frozen])
    x = widen(total)
    error = (y - step._through(0, x, own=True)).abs()
    if not bool((error <= 64 * torch.finfo(y.dtype).eps * step.bound()._through(0, x.abs(), own=True)).all()):
        raise ValueError(
            f"norm_out is {type(norm).__name__} with hooks or a forward of its own, which differs from the norm's formula by "
            f"up to {float(error.max()):.3g}, expected the formula, whose statistics alone can be frozen; "
            "measure the stack without it."
        )


def _to_tensor(term: Term, like: Tensor) -> Tensor:
    """Return the streams of a term as one new tensor. `like` has the shape of one stream."""
    zero = torch.zeros((), dtype=widen(like[:0]).dtype, device=like.device)
    each = [(zero if x is None else x).expand(like.shape) for x in term]
    return each[0].clone() if len(each) == 1 else torch.stack(each, -2)
