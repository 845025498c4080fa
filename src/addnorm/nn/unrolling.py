"""The last streams as the sum of what x_0 and each write contribute, with the coefficients and norms' statistics of one call.

    X_L = Π(L, 0) E x_0 + sum over l of Π(L, l) B_l W_l,      Π(L, l) = A_L ... A_{l+1}

A norm on the streams is part of the product: with constant mean and 1/sqrt(variance + eps) it is linear. The bias of this norm,
like a learned bias of the add, belongs to the write of the same sublayer. Each part passes through the adds of the stack itself
(`step.add_write`), with zero in place of the other writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from addnorm import reference
from addnorm._util.norms import KINDS, Norm
from addnorm.nn.state import NO_OPTIONS, PendingWrite, Site
from addnorm.nn.step import Streams, add_write, begin, collapse, is_plain
from addnorm.wirings.coefficients.base import widen


class StreamTerms(NamedTuple):
    """The last streams of a stack as a sum, x_L = x_0 + the writes, and the stack's output `y`.

    If sublayers normalize, scale or mix the streams, `x_0` and `writes` are the contributions after all of that. With n streams
    at the end each tensor but `y` is `(*, n, d_model)`, otherwise `(*, d_model)`.
    """

    x_0: Tensor
    writes: tuple[Tensor, ...]
    x_L: Tensor
    y: Tensor


@dataclass
class _FrozenNorm:
    """Norm with the constant `rstd` of one call, which makes it linear: weight * (x - centre * mean(x)) * rstd + bias."""

    weight: Tensor | None
    rstd: Tensor
    bias: Tensor | None
    centre: int  # 1, or 0 for a norm that keeps the mean; -1 in a bound

    def __call__(self, x: Tensor) -> Tensor:
        if self.centre:
            x = x - self.centre * x.mean(-1, keepdim=True)
        x = x * self.rstd if self.weight is None else x * self.rstd * self.weight
        return x if self.bias is None else x + self.bias

    def bound(self) -> _FrozenNorm:
        """Return the norm that maps bounds of |x| to bounds of |N(x)|."""
        return _FrozenNorm(_absolute(self.weight), self.rstd, _absolute(self.bias), -self.centre)


def _absolute(value: Any) -> Any:
    """Return the absolute values of coefficients; None stays None."""
    return None if value is None else pytree.tree_map(abs, value)


def expand(start: Streams, sites: Sequence[Site], kind: Norm) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """Return x_0's part of the last streams, the part of each write, and the tolerance of the sum of all parts.

    The tolerance allows for the streams' rounding at every site: each state is a sum of rounded products, and is rounded. Later
    sites carry such an error on. It stays below the bound of the last streams, which includes the bounds of all earlier states.

    Args:
        start: the first streams, a tuple of tensors `(*, d_model)`, or one tensor `(*, n, d_model)`.
        sites: the writes and coefficients of the sublayers.
        kind: the kind of the norms.
    """
    eps = torch.finfo(pytree.tree_leaves(start)[0].dtype).eps
    terms: list[Streams] = [pytree.tree_map(widen, start)]
    size, n = pytree.tree_map(abs, terms[0]), 1
    for recorded in sites:
        site = _freeze_site(recorded, kind)
        bound = Site(
            site.write.abs(), _absolute(site.mix), _absolute(site.inject), _absolute(site.bias),
            norms=site.norms and [norm and norm.bound() for norm in site.norms],
        )  # fmt: skip
        terms = _add_site(site, terms, kind)
        size = _pass(bound, size, kind, own=True)
        n = max(n, size.shape[-2] if isinstance(size, Tensor) else len(size))
    x_0, *writes, largest = map(to_tensor, (*terms, size))
    return x_0, tuple(writes), len(sites) * (2 + n) * eps * largest


def find_gains(
    sites: Sequence[Site], embedding: Sequence[float], row: Any, kind: Norm, *, stacked: bool
) -> list[Tensor]:
    """Return the factor with which x_0 and each write reach the last read, `(*, d_model)`.

    A factor belongs to one feature, so the norms here do not subtract the mean over all features.

    Args:
        sites: the writes and coefficients of the sublayers.
        embedding: the factors of x_0 in the first streams.
        row: C of the last read.
        kind: the kind of the norms.
        stacked: whether one tensor holds all streams.
    """
    ones = torch.ones_like(widen(sites[0].write))
    terms = [begin(ones, embedding, stacked=stacked)]
    for recorded in sites:
        site = _freeze_site(recorded, kind)
        norms = site.norms and [norm and replace(norm, bias=None, centre=0) for norm in site.norms]
        terms = _add_site(site._replace(write=ones, bias=None, norms=norms), terms, kind)
    return [collapse(to_row(row), term) for term in terms]


def to_row(matrix: Any) -> Any:
    """Return the first row of C, which may be a tensor, a row, or a tuple of rows."""
    return matrix[0] if isinstance(matrix, tuple) and isinstance(matrix[0], tuple) else matrix


def to_entries(vector: Any, dim: int) -> list[Any]:
    """Return the coefficients of n streams as entries that broadcast to `(*, d_model)`.

    Args:
        vector: a tuple of entries, a tensor `(*, n)`, or gates `(*, n, d_model)`, a tensor with `dim` dimensions.
        dim: the number of dimensions of the tensor that holds all streams.
    """
    if isinstance(vector, tuple):
        return list(to_row(vector))
    return list(vector.unbind(-2)) if vector.dim() == dim else [entry.unsqueeze(-1) for entry in vector.unbind(-1)]


def to_tensor(streams: Streams) -> Tensor:
    """Return the streams as one new tensor, `(*, n, d_model)`, or `(*, d_model)` for one stream."""
    each = streams if isinstance(streams, tuple) else streams.unbind(-2)
    return each[0].clone() if len(each) == 1 else torch.stack(each, -2)


def _add_site(site: Site, terms: Sequence[Streams], kind: Norm) -> list[Streams]:
    """Return the parts of the streams after a sublayer: those of earlier sources, and that of the sublayer's own write."""
    zeros = pytree.tree_map(torch.zeros_like, terms[0])
    return [*(_pass(site, term, kind) for term in terms), _pass(site, zeros, kind, own=True)]


def _pass(site: Site, streams: Streams, kind: Norm, *, own: bool = False) -> Streams:
    """Pass one part of the streams through the add and the norms of a sublayer, N_out(A X + B W + bias).

    With `own` this is the part of the sublayer itself: W and the biases are added. For the parts of other sources both are zero.
    """
    if not own:
        norms = site.norms and [norm and replace(norm, bias=None) for norm in site.norms]
        site = site._replace(write=torch.zeros_like(site.write), bias=None, norms=norms)
    write = PendingWrite(site.write, NO_OPTIONS, site.mix, site.inject, site.bias)
    return add_write(streams, write, site.norms or (), kind)


def _freeze_site(site: Site, kind: Norm) -> Site:
    """Return a site with its write in float32 at least, and with the statistics of its norms as constants."""
    norms = site.norms and [_freeze(norm, total, kind) for norm, total in zip(site.norms, site.total, strict=True)]
    return site._replace(write=widen(site.write), norms=norms)


def _freeze(norm: Any, total: Tensor, kind: Norm) -> _FrozenNorm | None:
    """Return `norm` with its statistics of `total` as constants, or None without a norm."""
    if norm is None:
        return None
    x = widen(total)
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps  # None: that of the arithmetic's dtype
    weight, bias = (None if t is None else t.to(x.dtype) for t in (norm.weight, getattr(norm, "bias", None)))
    frozen = _FrozenNorm(weight, reference.statistics(x, kind, eps).rstd, bias, int(KINDS[kind].is_centred))
    if not is_plain(norm, kind, total):
        _check_formula(norm, frozen, total)
    return frozen


def _check_formula(norm: Any, frozen: _FrozenNorm, total: Tensor) -> None:
    """Check that a norm which the stack calls as a module computes the formula, up to its rounding."""
    y: Tensor = norm(total)
    x = widen(total)
    error = (y - frozen(x)).abs()
    if not bool((error <= 64 * torch.finfo(y.dtype).eps * frozen.bound()(x.abs())).all()):
        raise ValueError(
            f"norm_out is {type(norm).__name__} with hooks or a forward of its own, which differs from the norm's formula by "
            f"up to {float(error.max()):.3g}, expected the formula, whose statistics alone can be frozen; "
            "measure the stack without it."
        )
