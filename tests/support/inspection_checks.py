"""Checks of inspections: the differences from the expected rows, and those of the tiny model."""

from itertools import zip_longest

from support.judge import rows_match

CLOSURE = 1e-5  # tolerance in float32


def find_row_differences(stream, rows):
    """Return the differences of a stream's rows from the expected ones."""
    pairs = zip_longest([site.row for site in stream.sites if site.role != "skip"], rows)
    return [
        f"row {k}: {row}, expected {expected}"
        for k, (row, expected) in enumerate(pairs)
        if row is None or expected is None or not rows_match(row, expected)
    ]


def check_tiny(result, closure=CLOSURE):
    """Check the inspection of a `handwritten_models.tiny` model."""
    assert result.wiring == "pre_ln"
    assert [site.kind for site in result.sites if site.role != "skip"] == ["attention", "feed-forward"] * 2
    assert result.unknown == ()
    assert result.closes
    assert result.closure <= closure
