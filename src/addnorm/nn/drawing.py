"""A wiring to look at: its equation, its description in words, its drawing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from addnorm.nn.wiring import Row, Wiring


def equation(row: Row) -> str:
    """To be written."""
    return repr(row)


def equation_of(wiring: Wiring, n_layers: int | None) -> str:
    """To be written."""
    return wiring.name


def describe(wiring: Wiring) -> str:
    """To be written."""
    return wiring.name


def draw(wiring: Wiring) -> str:
    """To be written."""
    return wiring.name
