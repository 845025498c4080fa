"""What an `Inspection` has of a residual program, which the folder `program` finds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from addnorm._util.blocks import Block
from addnorm.wirings import spec


class ResidualProgram(Protocol):
    """What an `Inspection` has of a `stream.program.result.Program`."""

    wiring: spec.Wiring | None
    sites: list[Any]

    @property
    def closure(self) -> float:
        """The largest relative error of an equation."""

    @property
    def closes(self) -> bool:
        """Whether every equation is within the tolerance."""

    def to_dict(self) -> dict[str, Any]:
        """Return the program as JSON types."""

    def build_blocks(self) -> Iterator[Block]:
        """Yield the paragraphs and the table of the program."""
