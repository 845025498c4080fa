"""Checks of inspections: the differences from the expected streams and rows, each as a sentence."""

from itertools import zip_longest

from support.answers import ANY, Answer
from support.judge import judge, rows_match

CLOSURE = 1e-5  # tolerance in float32
AFAF = ["attention", "feed-forward"] * 2


def find_differences(result, expected, closure=CLOSURE):
    """Return the differences of an inspection from the expected streams; it must say if no row expresses one of them."""
    verdict = judge(result, Answer(expected, has_adds=bool(expected)))
    differences = [*verdict.wrong]
    if expected and all(stream.wiring or any(site.row is not ANY for site in stream.sites) for stream in expected):
        differences += verdict.missing + verdict.reasons
    elif not result.unknown:
        differences.append("unknown is empty, though no row expresses this model")
    if len(result.streams) != len(expected):
        differences.append(f"{len(result.streams)} streams, expected {len(expected)}: {result.streams}")
    if expected and not result.closure <= closure:
        differences.append(f"closure {result.closure}, expected at most {closure}")
    if expected and not (all(s.closes for s in result.sites) and all(s.sum_closes for s in result.streams)):
        differences.append(f"these do not close: {[site.id for site in result.sites if not site.closes]}")
    if result.closes != (bool(result.sites) and not result.unknown and all(site.closes for site in result.sites)):
        differences.append(f"closes is {result.closes}, with {len(result.unknown)} unknown parts")
    return differences


def find_row_differences(stream, rows):
    """Return the differences of a stream's rows from the expected ones."""
    pairs = zip_longest([site.row for site in stream.sites if site.role != "skip"], rows)
    return [
        f"row {k}: {row}, expected {expected}"
        for k, (row, expected) in enumerate(pairs)
        if row is None or expected is None or not rows_match(row, expected)
    ]


def check_tiny(result, wiring="pre_ln", closure=CLOSURE):
    """Check the inspection of a `handwritten_models.tiny` model."""
    assert result.wiring == wiring
    assert [site.kind for site in result.sites if site.role != "skip"] == AFAF
    assert result.unknown == ()
    assert result.closes
    assert result.closure <= closure
