"""Deviations of a model's equations from those of a wiring, or of another model: terms, with what was found and expected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from addnorm._util.numbers import format_number
from addnorm.stream.find import naming
from addnorm.stream.find.equation_errors import get_tolerance
from addnorm.stream.find.reasons import scales_tokens
from addnorm.stream.find.sites import NORMS, Site, Stream
from addnorm.stream.inspection import Inspection
from addnorm.stream.program.deviations import PLACES, RULE, Difference, compare_dtypes, compare_norms, describe_places
from addnorm.wirings.factors import FACTORS, Factor, Learned
from addnorm.wirings.spec import Row, Wiring

MULTIPLIED = {"a": "the residual", "b": "the branch", "c": "what the sublayer reads"}
NORM_OPTIONS = {
    "kind": "the kind of the norm", "eps": "eps", "eps_outside": "eps that is added to the root",
    "unbiased": "the division by d - 1",
}  # fmt: skip
SUM_DTYPE = "the dtype of the sum"
POOLED = "that in {}, of what {} and later operators compute from the tokens"
MAX_SITES = 3  # sublayers named in a sentence
Described = dict[str, Any]  # an inspection, or a part of it, as `to_dict` returns it


@dataclass(frozen=True)
class Deviation:
    """A term of the model that is not as the wiring or the reference says.

    Attributes:
        term: what differs, such as "the norm" or "the factor of the branch".
        found: what the model has.
        expected: what the wiring or the reference says.
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


def compare_wirings(
    streams: Sequence[Stream], wiring: Wiring, eps: float | None, norm: str | None, dtype: torch.dtype | None,
    unproven: Set[str],
) -> tuple[Deviation, ...]:  # fmt: skip
    """Return the deviations of streams from a wiring with one stream, and from an eps, kind and dtype unless these are None.

    Nothing is said about the sublayers in `unproven`, whose rows are not what they compute, nor about the ends of their streams.
    """
    wirings = [wiring] * len(streams)
    # Two streams are an encoder and a decoder only if one reads the other: by cross-attention, or perhaps by an "other" sublayer.
    kinds = {site.kind for stream in streams for site in stream.sites if site.role == "branch"}
    if wiring.pair is not None and len(streams) == 2 and {"cross-attention", "other"} & kinds:
        wirings = [*wiring.pair(wiring, streams[0].num_layers, streams[1].num_layers)]
    found: list[Deviation] = []
    for stream, expected in zip(streams, wirings, strict=True):
        differences = [one for one in _compare_sublayers(stream, expected, dtype) if one.place not in unproven]
        found += group_differences(differences, sum(site.role == "branch" for site in stream.sites))
        found += group_differences(() if stream.unknown else _compare_ends(stream, expected), 1)
        norms = [*stream.norms()]
        found += group_differences(compare_norms((("", one) for one in norms), eps, norm), len(norms))
    return tuple(found)


def group_differences(differences: Iterable[tuple[str, str, str, str]], of: int) -> tuple[Deviation, ...]:
    """Return each difference once, with all places that have it."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for term, found, expected, place in differences:
        places.setdefault((term, found, expected), []).append(place)
    return tuple(Deviation(*difference, tuple(filter(None, at)), of) for difference, at in places.items())


def _compare_sublayers(stream: Stream, wiring: Wiring, dtype: torch.dtype | None) -> Iterator[Difference]:
    """Yield the differences of the sublayers' equations and of the dtypes of their sums."""
    branches = [site for site in stream.sites if site.role == "branch"]
    per_layer = max(Counter(site.layer for site in branches).values(), default=1)
    if stream.wiring is not None and not stream.wiring.has_rows:  # a second stream, or skips
        yield Difference(RULE, stream.wiring.name, wiring.name, "")
    for site in stream.sites:
        if site.role == "skip":
            yield Difference("an earlier state", "added once more", "no skip", site.id)
    named = None if naming.WITHOUT_LAST_NORM in stream.remarks else stream.wiring
    if named is None or not _are_equal(named, wiring, stream.num_layers, per_layer):
        rows = wiring.rows(stream.num_layers, per_layer)
        is_parallel = any(row.shares for row in rows)
        for layer, group in groupby(branches, key=lambda site: site.layer):
            sites = [*group]
            is_shared = len({naming.find_scale_names(site.sublayer) for site in sites}) == 1
            norms, wanted = (
                len({site.norm_in for site in sites} - {None}),
                1 if rows[-1].shares == "read" else len(sites),
            )
            if is_parallel and norms != wanted:
                yield Difference("the number of norms before a layer", str(norms), str(wanted), sites[0].id)
            for site, row in zip(sites, rows[layer * per_layer :], strict=False):
                for words in _compare_row(site, row, is_parallel, is_shared and len(sites) > 1):
                    yield Difference(*words, site.id)
    for site in branches:
        if any(map(scales_tokens, site.sublayer.write_path.factors)):
            yield Difference("the factor of the branch", "a number for each token", "one for all", site.id)
        yield from compare_dtypes(SUM_DTYPE, site.sublayer.add.out.tensor.dtype, dtype, site.id)


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

    `is_parallel` says whether the wiring's sublayers are parallel, `is_shared` whether the model's share one learned factor.
    """
    row = site.row
    if (site.parallel > 1) != is_parallel:
        words = {True: "in parallel", False: "one after the other"}
        yield "the order of a layer's sublayers", words[site.parallel > 1], words[is_parallel]
    if expected.shares:  # each of the parallel sublayers is found with the norm that it reads
        expected = replace(expected, shares="", norm_in=True)
    norms, wanted = describe_places(row), describe_places(expected)
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


def _describe(factor: Factor) -> str:
    if isinstance(factor, Learned):
        return "learned, a number for each feature" if factor.per_feature else "learned, one number"
    return format_number(factor, 4, trim=True)


def _compare_ends(stream: Stream, wiring: Wiring) -> Iterator[Difference]:
    """Yield the norms at both ends that the wiring has and the stream lacks."""
    name = "" if stream.name == "stream" else stream.name
    if wiring.embedding_norm and stream.embedding_norm is None:
        yield Difference("the norm of the embedding", "missing", "before the first sublayer", name)
    if wiring.ends_in_norm(stream.num_layers) and stream.final_norm is None and not stream.sites[-1].row.norm_out:
        pooled = stream.chain.pooled
        found = "missing" if pooled is None else POOLED.format(pooled[0].path or "the model", pooled[1].name)
        yield Difference("the final norm", found, "after the last sublayer", name)


# Another model.


def compare_models(
    inspection: Inspection, theirs: Described, terms: Mapping[str, Tensor]
) -> tuple[tuple[Deviation, ...], bool]:
    """Return the deviations of a model's equations from those of another model, and whether both have the same sublayers.

    Args:
        inspection: what the model computes.
        theirs: the inspection of the other model, as `Inspection.to_dict` returns it.
        terms: the values of the other model's terms, as in `states.collect_states`.
    """
    program, other_program = inspection.program, theirs.get("program")
    if program is not None or other_program is not None:
        return _compare_programs(None if program is None else program.to_dict(), other_program)
    ours = [stream.to_dict() for stream in inspection.streams]
    if sizes := group_differences(_compare_sizes(ours, theirs["streams"]), 1):
        return sizes, False
    found: list[Deviation] = []
    for k, (stream, own, their) in enumerate(zip(inspection.streams, ours, theirs["streams"], strict=True)):
        differences = [*_compare_equations(stream, own, their)]
        # Where the branches have other dtypes, the whole model has another one.
        branches = (
            site.sublayer.raw.tensor.dtype == terms[f"{k}.{j}.branch"].dtype for j, site in enumerate(stream.sites)
        )
        for j, site in enumerate(stream.sites if all(branches) else ()):
            if (total := terms.get(f"{k}.{j}.sum")) is not None:
                differences += compare_dtypes(SUM_DTYPE, site.sublayer.add.out.tensor.dtype, total.dtype, site.id)
        found += group_differences(differences, len(stream.sites))
    return tuple(found), True


def _compare_sizes(ours: Sequence[Described], theirs: Sequence[Described]) -> Iterator[Difference]:
    """Yield the first difference in size of each pair of streams or programs, which prevents a comparison by terms."""
    if len(ours) != len(theirs):
        yield Difference("the number of streams", str(len(ours)), str(len(theirs)), "")
        return
    for pair in zip(ours, theirs, strict=True):
        of = f" of {pair[0]['name']}" if len(ours) > 1 else ""
        for name, key in (("width", "width"), ("number of layers", "layers"), ("number of sublayers", "sites")):
            found, expected = (len(one[key]) if key == "sites" else one[key] for one in pair)
            if found != expected:
                yield Difference(f"the {name}{of}", str(found), str(expected), "")
                break


def _compare_equations(stream: Stream, ours: Described, theirs: Described) -> Iterator[Difference]:
    """Yield the differences of the rows and norms of two streams of the same size."""
    for site, own, their in zip(stream.sites, ours["sites"], theirs["sites"], strict=True):
        yield from _compare_kinds(own, their, {"kind": "the sublayer", "role": "the role"})
        factors: dict[str, Any] = {
            name: Learned(f["mean"], per_feature=f["per_feature"]) if isinstance(f := their["row"][name], dict) else f
            for name in FACTORS
        }
        row = Row(**{name: their["row"][name] for name in NORMS}, **factors)
        for words in _compare_row(site, row, their["parallel"] > 1, False):
            yield Difference(*words, site.id)
        for name in NORMS:  # a norm that is missing is a difference of the row
            yield from _compare_norm_options("", own["norms"].get(name), their["norms"].get(name), site.id)
    for name in ("embedding", "final"):
        yield from _compare_norm_options(f"the {name} norm", ours["norms"].get(name), theirs["norms"].get(name), "")


def _compare_kinds(own: Described, their: Described, terms: Mapping[str, str]) -> Iterator[Difference]:
    """Yield the entries in which two sublayers differ, such as the kind. "other" means unknown, and differs from nothing.

    Args:
        own, their: the sublayers, as `to_dict` returns them.
        terms: the keys to compare, with the names that the report has for them.
    """
    for name, term in terms.items():
        if own[name] != their[name] and "other" not in (own[name], their[name]):
            yield Difference(term, own[name], their[name], own["id"])


def _compare_norm_options(
    term: str, own: Described | None, their: Described | None, place: str
) -> Iterator[Difference]:
    """Yield the differences of two norms, which are dicts of `Norm.to_dict`, or None for a missing norm.

    A norm that only one side has is a difference named `term`; if `term` is empty, it is left to the caller.
    """
    if own is None or their is None:
        if term and own is not their:
            yield Difference(term, _describe_option(own), _describe_option(their), place)
        return
    for key, name in NORM_OPTIONS.items():
        found, expected = own.get(key), their.get(key)
        is_same = naming.factors_match(expected or 0.0, found or 0.0) if key == "eps" else found == expected
        if not is_same:
            yield Difference(name, _describe_option(found), _describe_option(expected), place or own["path"])


def _compare_programs(ours: Described | None, theirs: Described | None) -> tuple[tuple[Deviation, ...], bool]:
    """Return the deviations of two residual programs, as `Program.to_dict` returns them, and whether both have the same sizes."""
    if ours is None or theirs is None:
        few, several = "one stream with rows", "several streams, or computed coefficients"
        words = (few, several) if ours is None else (several, few)
        return (Deviation("the residual state", *words),), False
    if sizes := group_differences(_compare_sizes([ours], [theirs]), 0):
        return sizes, False
    found, expected = ours["streams"], theirs["streams"]
    is_copied = 1 in (found[0], expected[0])  # one value at the start may be that of all streams
    if found[is_copied:] != expected[is_copied:]:
        return (Deviation("the number of streams", _format_sizes(found), _format_sizes(expected)),), False
    tolerance = get_tolerance(*(getattr(torch, of["dtype"]) for of in (ours, theirs)))
    differences = [*_compare_norm_options("the final norm", ours["final_norm"], theirs["final_norm"], "")]
    for own, their in zip(ours["sites"], theirs["sites"], strict=True):
        differences += _compare_kinds(own, their, {"kind": "the sublayer"})
        for name in "CAB":
            pair = own[name], their[name]
            if not _are_alike(*pair, tolerance):
                words = (_describe_matrix(own[name]), _describe_matrix(their[name]))
                differences.append(Difference(f"the matrix {name}", *words, own["id"]))
        for name in ("norm_in", "norm_branch"):
            norms = own["norms"].get(name), their["norms"].get(name)
            differences += _compare_norm_options(f"the norm {PLACES[name]}", *norms, own["id"])
        for norms in zip(own["norms"]["norm_out"], their["norms"]["norm_out"], strict=True):
            differences += _compare_norm_options(f"the norm {PLACES['norm_out']}", *norms, own["id"])
    return group_differences(differences, len(ours["sites"])), True


def _format_sizes(sizes: list[int]) -> str:
    """Return the numbers of streams in words: "4", or "1, 2, 3" where they change."""
    return str(sizes[0]) if len({*sizes}) == 1 else ", ".join(map(str, sizes))


def _are_alike(own: Described, their: Described, tolerance: float) -> bool:
    """Return whether two matrices have the same source, or if constant, equal entries relative to the largest."""
    pair = _read_entries(own), _read_entries(their)
    if None in pair:
        return bool(own["source"] == their["source"])
    found, expected = (torch.tensor(entries, dtype=torch.float64) for entries in pair)
    is_same = found.shape == expected.shape
    return is_same and bool(((found - expected).abs() <= tolerance * expected.abs().max()).all())


def _read_entries(matrix: Described) -> Any:
    """Return the rows of a constant matrix; None if it is not constant, or has more entries than `to_dict` lists."""
    return matrix.get("mean") if matrix["source"] == "constant" else None


def _describe_matrix(matrix: Described) -> str:
    """Return a matrix in words: its entries if these are known constants, otherwise its source."""
    if (rows := _read_entries(matrix)) is None:
        return str(matrix["source"])
    return "; ".join(" ".join(format_number(entry, 4, trim=True) for entry in row) for row in rows)


def _describe_option(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "missing"
    return format_number(value, trim=True) if isinstance(value, float) else "there"
