"""What differs between what `inspect` found in a model and what its table says: each difference a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from addnorm.stream.find.inspection import Inspection
from addnorm.stream.find.inspection import Stream as Found
from addnorm.wirings.spec import Learned, Row
from support.families import Stream

CLOSURE = 1e-5  # float32; the project's own promise


def differences(found: Inspection, expected: tuple[Stream, ...], closure: float = CLOSURE) -> list[str]:
    """All of them."""
    return [*_differences(found, expected, closure)]


def _differences(found: Inspection, expected: tuple[Stream, ...], closure: float) -> Iterator[str]:
    if len(found.streams) != len(expected):
        yield f"{len(found.streams)} streams, expected {len(expected)}: {found.streams}"
        return
    for one, want in zip(found.streams, expected, strict=True):
        for difference in _of_stream(one, want):
            yield f"{one.name}: {difference}"
    if expected and not found.closure <= closure:
        yield f"closure {found.closure}, expected at most {closure}"
    if expected and not found.closes:
        yield f"these do not close: {[site.id for site in found.sites if not site.closes]}"
    if expected and all(want.wiring or want.rows for want in expected):
        yield from (f"not understood: {unknown}" for unknown in found.unknown)
    elif not found.unknown:
        yield "nothing is called not understood, though no row says what this is"


def _of_stream(found: Found, want: Stream) -> Iterator[str]:
    name = found.wiring.name if found.wiring else None
    if name != want.wiring:
        yield f"wiring {name}, expected {want.wiring}; rows {[str(site.row) for site in found.sites]}, remarks {found.remarks}"
    options = dict(found.wiring.options) if found.wiring else {}
    for option, value in want.options.items():
        if not same(options.get(option), value):
            yield f"option {option} {options.get(option)}, expected {value}"
    sites = [site for site in found.sites if site.role != "skip"]
    kinds = [site.kind for site in sites]
    if kinds != [*want.sublayers]:
        yield f"kinds {kinds}, expected {[*want.sublayers]}"
    facts = (
        ("norm", found.norm, want.norm),
        ("embedding norm", found.embedding_norm is not None, want.embedding_norm),
        ("final norm", found.final_norm is not None, want.final_norm),
        ("width", found.width, want.width),
        ("shared layers", _shared(found), want.shared),
    )
    for fact, is_, should in facts:
        if is_ != should:
            yield f"{fact} {is_}, expected {should}"
    if want.eps is not None and not same(found.eps, want.eps):
        yield f"eps {found.eps}, expected {want.eps}: {[norm.eps for norm in found.norms()]}"
    for k, row in want.rows.items():
        if k < len(sites) and not alike(sites[k].row, row):
            yield f"row {k} {sites[k].row}, expected {row}"


def _shared(found: Found) -> int:
    """The number of different layers, where one serves more than once."""
    paths = [site.path for site in found.sites if site.shared > 1]
    per_layer = sum(site.layer == 0 for site in found.sites)
    return len({*paths}) // per_layer if paths else 0


def same(found: Any, expected: Any) -> bool:
    """Numbers that passed through float32 are the same to its rounding."""
    numbers = isinstance(found, int | float) and isinstance(expected, float)
    return abs(found - expected) <= 1e-4 * abs(expected) if numbers else found == expected


def alike(found: Row, expected: Row) -> bool:
    """The same norms and constants; a learned factor is one whatever it has learned."""
    norms = all(getattr(found, name) == getattr(expected, name) for name in ("norm_in", "norm_branch", "norm_out"))
    return norms and all(_alike(getattr(found, name), getattr(expected, name)) for name in "abc")


def _alike(found: float | Learned, expected: float | Learned) -> bool:
    if isinstance(found, Learned) and isinstance(expected, Learned):
        return found.per_feature == expected.per_feature
    return not isinstance(found, Learned) and not isinstance(expected, Learned) and same(found, float(expected))


def row_differences(found: Found, rows: list[Row]) -> list[str]:
    """Where the rows of a stream are not these."""
    pairs = zip_longest([site.row for site in found.sites if site.role != "skip"], rows)
    return [
        f"row {k}: {one}, expected {want}"
        for k, (one, want) in enumerate(pairs)
        if one is None or want is None or not alike(one, want)
    ]
