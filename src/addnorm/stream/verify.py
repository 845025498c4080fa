"""`verify`: compare a model with the wiring that it should have, term by term, and name each term that differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from addnorm._util.arguments import check_float
from addnorm._util.blocks import Block, Paragraph
from addnorm._util.norms import KINDS
from addnorm._util.numbers import format_count, format_number
from addnorm._util.render import Rendered
from addnorm.stream.find import naming
from addnorm.stream.find.inspection import Inspection, Site, Stream, Unknown
from addnorm.stream.find.norm import Norm
from addnorm.stream.inspect import inspect
from addnorm.wirings.factors import FACTORS, Factor, Learned
from addnorm.wirings.spec import Row, Stage, Wiring, as_wiring

PLACES = {"norm_in": "before the sublayer", "norm_branch": "on the sublayer's output", "norm_out": "after the add"}
MULTIPLIED = {"a": "the residual", "b": "the branch", "c": "what the sublayer reads"}
MAX_SITES = 3  # sublayers named in a sentence


class _Difference(NamedTuple):
    """A term of one sublayer, norm or stream, and its name."""

    term: str
    found: str
    expected: str
    place: str


@dataclass(frozen=True)
class Deviation:
    """A term of the model that is not as the wiring says.

    Attributes:
        term: what differs, such as "the norm" or "the factor of the branch".
        found: what the model has.
        expected: what the wiring says.
        sites: ids of the sublayers, or paths of the norms; empty for a whole stream.
        of: number of sublayers or norms that were compared.
    """

    term: str
    found: str
    expected: str
    sites: tuple[str, ...] = ()
    of: int = 0

    def __str__(self) -> str:
        where = f"in all {self.of}" if len(self.sites) == self.of > 1 else ", ".join(self.sites[:MAX_SITES])
        more = (
            f" and {len(self.sites) - MAX_SITES} more"
            if len(self.sites) > MAX_SITES and len(self.sites) < self.of
            else ""
        )
        return f"{self.term} is {self.found}, expected {self.expected}" + f": {where}{more}" * bool(self.sites)


@dataclass(frozen=True, repr=False)
class Verification(Rendered):
    """Result of `verify`. It prints as one sentence for each difference.

    Attributes:
        wiring: the expected wiring.
        inspection: what the model computes.
        deviations: the terms that differ.
    """

    wiring: Wiring
    inspection: Inspection
    deviations: tuple[Deviation, ...]

    @property
    def unproven(self) -> tuple[Unknown, ...]:
        """Parts of the model that `inspect` does not understand, so that nothing is said about them."""
        return self.inspection.unknown

    @property
    def agrees(self) -> bool:
        """Whether every term is as the wiring says, and every equation of the model is proven."""
        return self.inspection.closes and not self.deviations

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        deviations = [{**vars(one), "sites": [*one.sites], "sentence": str(one)} for one in self.deviations]
        return {
            "wiring": self.wiring.name,
            "options": dict(self.wiring.options),
            "agrees": self.agrees,
            "deviations": deviations,
        }

    def __repr__(self) -> str:
        return f"<Verification: {'agrees' if self.agrees else 'differs'}, {self.wiring.name}>"

    def _blocks(self) -> Iterator[Block]:
        sites = format_count(len(self.inspection.sites), "sublayer")
        if self.agrees:
            error = format_number(self.inspection.closure, 2)
            yield Paragraph(("agrees ", "good"), f"with {self.wiring.name}: {sites}, largest error {error}")
        elif not self.deviations:
            what = self.inspection.unknown[0].reason if self.inspection.unknown else "no residual stream was found"
            yield Paragraph(("not proven ", "bad"), f"to be {self.wiring.name}: {what}")
        for deviation in self.deviations:
            yield Paragraph(("differs ", "bad"), f"from {self.wiring.name}: {deviation}")


def verify(
    model: nn.Module | Inspection, *args: Any, wiring: Wiring | Stage | str, eps: float | None = None, norm: str | None = None,
    dtype: torch.dtype | None = None, **kwargs: Any,
) -> Verification:  # fmt: skip
    """Compare a model with the wiring that it should have, and name each term that differs.

    The model runs once, as in `inspect`, which proves the equation of every sublayer; the rows are then compared with those of
    the wiring. A norm of the embedding, or a last norm, that the wiring does not have is no difference: post-LN models often have
    one. Learned factors are compared by their shape, not by their values.

    Args:
        model: the model, or an `Inspection` of it. Then there are no further inputs.
        args: positional arguments of the model.
        wiring: the expected wiring: one of `addnorm.wirings` with one stream, its name, or a `Row`.
        eps: the expected eps of every norm; None to accept any.
        norm: the expected kind of every norm, "layer" or "rms"; None to accept any.
        dtype: the expected dtype of every sum; None to accept any.
        kwargs: keyword arguments of the model.

    Raises:
        ValueError: the wiring has several streams or computed coefficients, or an argument has a wrong value.
        Exception: as `inspect`.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
        >>> print(addnorm.verify(model, torch.randn(2, 5, 16), wiring="pre_ln"))
        differs from pre_ln: the final norm is missing, expected after the last sublayer
    """
    wiring = as_wiring(wiring)
    if not wiring.has_rows:
        raise ValueError(
            f"wiring is {wiring.name!r}, which has several streams or computed coefficients, expected rows."
        )
    if norm is not None and norm not in KINDS:
        raise ValueError(f"norm is {norm!r}, expected {' or '.join(map(repr, KINDS))}, or None.")
    if isinstance(model, Inspection) and (args or kwargs):
        raise TypeError("model is an Inspection, whose run has the inputs already: pass no more of them.")
    eps = None if eps is None else check_float("eps", eps)
    inspection = model if isinstance(model, Inspection) else inspect(model, *args, **kwargs)
    streams, wirings = inspection.streams, [wiring] * len(inspection.streams)
    if wiring.pair is not None and len(streams) == 2:  # an encoder and a decoder
        wirings = [*wiring.pair(wiring, streams[0].num_layers, streams[1].num_layers)]
    found: list[Deviation] = []
    for stream, expected in zip(streams, wirings, strict=True):
        found += _group(
            _compare_sublayers(stream, expected, dtype), sum(site.role == "branch" for site in stream.sites)
        )
        found += _group(_compare_ends(stream, expected), 1)
        norms = [*stream.norms()]
        found += _group(_compare_norms(norms, eps, norm), len(norms))
    return Verification(wiring, inspection, tuple(found))


def _group(differences: Iterable[_Difference], of: int) -> list[Deviation]:
    """Return each difference once, with all places that have it."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for term, found, expected, place in differences:
        places.setdefault((term, found, expected), []).append(place)
    return [Deviation(*difference, tuple(filter(None, at)), of) for difference, at in places.items()]


def _compare_sublayers(stream: Stream, wiring: Wiring, dtype: torch.dtype | None) -> Iterator[_Difference]:
    """Yield the differences of the sublayers' equations and of the dtypes of their sums."""
    branches = [site for site in stream.sites if site.role == "branch"]
    per_layer = max(Counter(site.layer for site in branches).values(), default=1)
    if stream.wiring is not None and not stream.wiring.has_rows:  # a second stream, or skips
        yield _Difference("the rule of the stream", stream.wiring.name, wiring.name, "")
    for site in stream.sites:
        if site.role == "skip":
            yield _Difference("an earlier state", "added once more", "no skip", site.id)
    if stream.wiring is None or not _are_equal(stream.wiring, wiring, stream.num_layers, per_layer):
        rows = wiring.rows(stream.num_layers, per_layer)
        is_parallel = any(row.shares for row in rows)
        for layer, group in groupby(branches, key=lambda site: site.layer):
            sites = [*group]
            is_shared = len({naming.find_scale_names(site.sublayer) for site in sites}) == 1
            for site, row in zip(sites, rows[layer * per_layer :], strict=False):
                for words in _compare_row(site, row, is_parallel, is_shared and len(sites) > 1):
                    yield _Difference(*words, site.id)
    for site in branches:
        found = site.sublayer.add.out.tensor.dtype
        if dtype not in (None, found):
            yield _Difference(
                "the dtype of the sum", str(found).removeprefix("torch."), str(dtype).removeprefix("torch."), site.id
            )


def _are_equal(found: Wiring, expected: Wiring, num_layers: int, per_layer: int) -> bool:
    """Return whether two wirings have the same rows in a stack of this depth."""
    if not found.has_rows:
        return False
    pairs = zip(found.rows(num_layers, per_layer), expected.rows(num_layers, per_layer), strict=True)
    return all(naming.rows_match(b, a) and a.shares == b.shares and _is_shared(a) == _is_shared(b) for a, b in pairs)


def _is_shared(row: Row) -> bool:
    """Return whether all sublayers of a layer share the learned factor of the branch."""
    return isinstance(row.b, Learned) and row.b.shared


def _compare_row(site: Site, expected: Row, is_parallel: bool, is_shared: bool) -> Iterator[tuple[str, str, str]]:
    """Yield each difference of a sublayer's row as the term, what was found and what was expected.

    `is_parallel` says what the wiring has, `is_shared` whether the sublayers of this layer have one learned factor.
    """
    row = site.row
    if (site.parallel > 1) != is_parallel:
        words = {True: "in parallel", False: "one after the other"}
        yield "the order of a layer's sublayers", words[site.parallel > 1], words[is_parallel]
    if expected.shares:  # each of the parallel sublayers is found with the norm that it reads
        expected = replace(expected, shares="", norm_in=True)
    norms, wanted = _norm_places(row), _norm_places(expected)
    if norms != wanted:
        yield "the norm", norms or "missing", wanted or "none"
    different = [name for name in FACTORS if not naming.factors_match(getattr(expected, name), getattr(row, name))]
    if different == ["a", "b"] and naming.factors_match(expected.a, row.b) and naming.factors_match(expected.b, row.a):
        moved = expected.a if expected.a != 1.0 else expected.b
        places = ("on the branch", "on the residual")
        yield f"the factor {_describe(moved)}", *(places if moved is expected.a else places[::-1])
        return
    if "b" not in different and isinstance(row.b, Learned) and is_shared != _is_shared(expected):
        words = {True: "one for each layer", False: "one for each sublayer"}
        yield "the learned factor of the branch", words[is_shared], words[not is_shared]
    for name in different:
        yield f"the factor of {MULTIPLIED[name]}", _describe(getattr(row, name)), _describe(getattr(expected, name))


def _norm_places(row: Row) -> str:
    return " and ".join(words for name, words in PLACES.items() if getattr(row, name))


def _describe(factor: Factor) -> str:
    if isinstance(factor, Learned):
        return "learned, a number for each feature" if factor.per_feature else "learned, one number"
    return format_number(factor, 4, trim=True)


def _compare_ends(stream: Stream, wiring: Wiring) -> Iterator[_Difference]:
    """Yield the norms at both ends that the wiring has and the stream lacks."""
    name = "" if stream.name == "stream" else stream.name
    if wiring.embedding_norm and stream.embedding_norm is None:
        yield _Difference("the norm of the embedding", "missing", "before the first sublayer", name)
    if wiring.ends_in_norm(stream.num_layers) and stream.final_norm is None and not stream.sites[-1].row.norm_out:
        yield _Difference("the final norm", "missing", "after the last sublayer", name)


def _compare_norms(norms: Iterable[Norm], eps: float | None, kind: str | None) -> Iterator[_Difference]:
    """Yield the norms with another eps or kind."""
    for norm in norms:
        if eps is not None and not naming.factors_match(eps, norm.eps or 0.0):
            found = "missing" if norm.eps is None else format_number(norm.eps, trim=True)
            yield _Difference("eps", found, format_number(eps, trim=True), norm.path)
        if kind not in (None, norm.kind):
            yield _Difference("the kind of the norm", norm.kind, str(kind), norm.path)
