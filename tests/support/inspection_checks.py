"""Checks of inspections: the differences from the expected streams and rows, each as a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from addnorm.stream.find import inspection
from addnorm.stream.find.inspection import Inspection
from addnorm.wirings.spec import Learned, Row
from support.families import Stream

CLOSURE = 1e-5  # tolerance in float32
AFAF = ["attention", "feed-forward"] * 2


def find_differences(result: Inspection, expected: tuple[Stream, ...], closure: float = CLOSURE) -> list[str]:
    """Return the differences of an inspection from the expected streams."""
    return [*_compare_inspection(result, expected, closure)]


def _compare_inspection(result: Inspection, expected: tuple[Stream, ...], closure: float) -> Iterator[str]:
    if len(result.streams) != len(expected):
        yield f"{len(result.streams)} streams, expected {len(expected)}: {result.streams}"
        return
    for stream, reference in zip(result.streams, expected, strict=True):
        for difference in _compare_stream(stream, reference):
            yield f"{stream.name}: {difference}"
    if expected and not result.closure <= closure:
        yield f"closure {result.closure}, expected at most {closure}"
    if expected and not (all(s.closes for s in result.sites) and all(s.sum_closes for s in result.streams)):
        yield f"these do not close: {[site.id for site in result.sites if not site.closes]}"
    if result.closes != (bool(result.sites) and not result.unknown and all(site.closes for site in result.sites)):
        yield f"closes is {result.closes}, with {len(result.unknown)} unknown parts"
    if expected and all(stream.wiring or stream.rows for stream in expected):
        yield from (f"not understood: {unknown}" for unknown in result.unknown)
    elif not result.unknown:
        yield "unknown is empty, though no row expresses this model"


def _compare_stream(stream: inspection.Stream, reference: Stream) -> Iterator[str]:
    name = stream.wiring.name if stream.wiring else None
    if name != reference.wiring:
        yield f"wiring {name}, expected {reference.wiring}; rows {[str(s.row) for s in stream.sites]}, remarks {stream.remarks}"
    options = dict(stream.wiring.options) if stream.wiring else {}
    for option, value in reference.options.items():
        if not are_equal(options.get(option), value):
            yield f"option {option} {options.get(option)}, expected {value}"
    sites = [site for site in stream.sites if site.role != "skip"]
    facts = (
        ("kinds", [site.kind for site in sites], [*reference.sublayers]),
        ("norm", stream.norm, reference.norm),
        ("embedding norm", stream.embedding_norm is not None, reference.embedding_norm),
        ("final norm", stream.final_norm is not None, reference.final_norm),
        ("width", stream.width, reference.width),
        ("shared layers", _count_shared_layers(stream), reference.shared),
    )
    for fact, actual, expected in facts:
        if actual != expected:
            yield f"{fact} {actual}, expected {expected}"
    if reference.eps is not None and not are_equal(stream.eps, reference.eps):
        yield f"eps {stream.eps}, expected {reference.eps}: {[norm.eps for norm in stream.norms()]}"
    for k, row in reference.rows.items():
        if k < len(sites) and not rows_match(sites[k].row, row):
            yield f"row {k} {sites[k].row}, expected {row}"


def _count_shared_layers(stream: inspection.Stream) -> int:
    """Return the number of different layers if one is used more than once, otherwise 0."""
    paths = [site.path for site in stream.sites if site.shared > 1]
    per_layer = sum(site.layer == 0 for site in stream.sites)
    return len({*paths}) // per_layer if paths else 0


def are_equal(actual: Any, expected: Any) -> bool:
    """Compare values; numbers to the round-off of float32."""
    numbers = isinstance(actual, int | float) and isinstance(expected, float)
    return abs(actual - expected) <= 1e-4 * abs(expected) if numbers else actual == expected


def rows_match(actual: Row, expected: Row) -> bool:
    """Return whether rows have the same norms and constants, and learned factors at the same places, of any value."""
    norms = all(getattr(actual, name) == getattr(expected, name) for name in ("norm_in", "norm_branch", "norm_out"))
    return norms and all(_factors_match(getattr(actual, name), getattr(expected, name)) for name in "abc")


def _factors_match(actual: float | Learned, expected: float | Learned) -> bool:
    if isinstance(actual, Learned) and isinstance(expected, Learned):
        return actual.per_feature == expected.per_feature
    return not isinstance(actual, Learned) and not isinstance(expected, Learned) and are_equal(actual, float(expected))


def find_row_differences(stream: inspection.Stream, rows: list[Row]) -> list[str]:
    """Return the differences of a stream's rows from the expected ones."""
    pairs = zip_longest([site.row for site in stream.sites if site.role != "skip"], rows)
    return [
        f"row {k}: {row}, expected {expected}"
        for k, (row, expected) in enumerate(pairs)
        if row is None or expected is None or not rows_match(row, expected)
    ]


def check_tiny(result: Inspection, wiring: str = "pre_ln", closure: float = CLOSURE) -> None:
    """Check the inspection of a `handwritten_models.tiny` model."""
    assert result.wiring == wiring
    assert [site.kind for site in result.sites if site.role != "skip"] == AFAF
    assert result.unknown == ()
    assert result.closes
    assert result.closure <= closure
