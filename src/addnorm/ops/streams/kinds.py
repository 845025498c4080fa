"""The kinds of gates, each with its number in the schema, and the sizes of the parameters and results of each kind."""

from __future__ import annotations

from typing import NamedTuple

GATE_KINDS = {"given": 0, "manifold": 1, "independent": 2, "gates": 3, "hyper": 4}


class Sizes(NamedTuple):
    """Sizes of one kind of gates.

    Attributes:
        logits: logits of a token: one for each row of `project`, for "hyper" one for each row and stream.
        scales: elements of `scale`.
        base: elements of `base`.
        mix, inject: whether A and b are computed.
        stats: saved statistics of the streams' norm, for each token.
    """

    logits: int
    scales: int
    base: int
    mix: bool
    inject: bool
    stats: int


def sizes_of(kind: int, n: int) -> Sizes:
    """Return the sizes of a kind for n streams."""
    both = n * (n + 2)
    return {
        GATE_KINDS["given"]: Sizes(0, 0, 0, False, False, 0),
        GATE_KINDS["manifold"]: Sizes(both, 3, both, True, True, 1),
        GATE_KINDS["independent"]: Sizes(2 * n, 2, 2 * n, False, True, 1),
        GATE_KINDS["gates"]: Sizes(n, 1, n, False, False, 1),
        GATE_KINDS["hyper"]: Sizes(both, 2, both + n + 2, True, True, 2 * n),
    }[kind]
