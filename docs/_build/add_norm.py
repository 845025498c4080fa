"""Write the measured sentences of add_norm.md from the results in benchmarks/results/claims.json."""

from __future__ import annotations

import re
from typing import Any

import page

Measured = dict[str, Any]


def entry(claim: str) -> Measured:
    """Return the entry of a claim: its numbers and its verdict."""
    entries: dict[str, Measured] = {one["claim"]: one for one in page.document("claims")["claims"]}
    if claim not in entries:
        raise SystemExit(
            f"claims.json has no claim {claim!r}: docs/_build/add_norm.py must follow benchmarks/claims.py."
        )
    return entries[claim]


def n(value: float) -> str:
    """Return a number with three digits; with two if it has an exponent."""
    text = f"{value:.3g}"
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.1e}") if "e" in text else text


def count(value: int) -> str:
    """Return a count, "none" for zero."""
    return str(value) if value else "none"


# ------------------------------------------------------------------------------------------------------ the sections


def stream() -> str:
    """Return measurements of the residual stream."""
    closed = entry("Pre-LN unrolls: x_L = x_0 + the sum of the sublayers' outputs.")["measured"]["closure of pre-LN"]
    bits = entry("Pre-LN has a clean +1 path: the gradient of x_L arrives at x_0 untouched.")["measured"]
    loss = entry("Removing one sublayer rarely breaks the model.")["measured"]["pre_ln"]
    return (
        f"Measured: after 24 sublayers x_L and the sum differ by {n(closed)} of the stream's length, which is rounding. On the "
        f"way back along the residual, {count(bits[next(iter(bits))])} of a gradient's numbers is changed. Of the {loss['of']} "
        f"sublayers of two small trained pre-LN models, {count(loss['broken after training'])} breaks the model by its absence; "
        f"the loss rises by {loss['median rise']:.2f} in the median, and by {loss['largest rise']:.2f} at most "
        "([claims](claims.md#the-claims))."
    )


def zeros() -> str:
    """Return the effect of sublayers that return zeros."""
    m = entry("A sublayer that has learned nothing useful leaves the output as good as the input.")["measured"]
    return (
        f"Measured: 24 sublayers that return zeros change the stream of pre-LN by {n(m['change by zeros, pre-LN'])}, and that of "
        f"post-LN by {n(m['change by zeros, post-LN'])} of its length: its norms still act ([claims](claims.md#the-claims))."
    )


def batch() -> str:
    """Return how many tokens depend on their batch, under LayerNorm and BatchNorm."""
    m = entry("A token's LayerNorm does not depend on the other examples of its batch, unlike BatchNorm.")["measured"]
    return (
        f"Measured: {m['tokens']} tokens, each in one batch with the others and then alone. Under LayerNorm "
        f"{count(m['tokens changed by their batch, LayerNorm'])} of them differs by as much as a bit, under BatchNorm "
        f"{count(m['tokens changed by their batch, BatchNorm'])} ([claims](claims.md#the-claims))."
    )


SECTIONS = {"add_norm:zeros": zeros, "add_norm:stream": stream, "add_norm:batch": batch}
