"""What `fuse` did: the Add & Norms that are one call now, those that are not and why, the proof, and what it brings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from addnorm.fusion.measured import Measured
from addnorm.fusion.pattern import Boundary
from addnorm.fusion.proof import Proof, worst

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["Fusion", "VerificationError"]


@dataclass(frozen=True, repr=False)
class Fusion:
    """What `addnorm.fuse` did.

    Attributes:
        model: its class.
        boundaries: its Add & Norms in the order in which they run, those left with the `reason`.
        graphs: of how many graphs a run consists; more than one where torch.compile's frontend breaks.
        proof: how much outputs and gradients differ from before, beside eager's own errors.
        inductor: whether the graphs went on to Inductor.
        measured: times, memory and share of Add & Norm; None if it was not asked for, or nothing is fused.
    """

    model: str
    boundaries: tuple[Boundary, ...]
    graphs: int
    proof: Proof
    inductor: bool = False
    measured: Measured | None = None

    @property
    def fused(self) -> tuple[Boundary, ...]:
        """Those that are one call now."""
        return tuple(boundary for boundary in self.boundaries if boundary.fused)

    @property
    def left(self) -> tuple[Boundary, ...]:
        """Those that are as they were, each with its reason."""
        return tuple(boundary for boundary in self.boundaries if not boundary.fused)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "schema": "addnorm.fusion", "schema_version": 1, "model": self.model, "graphs": self.graphs,
            "inductor": self.inductor, "fused": len(self.fused), "changed": bool(self.fused) and self.proof.holds,
            "boundaries": [b.to_dict() for b in self.boundaries],
            "proof": self.proof.to_dict(), "measured": self.measured and self.measured.to_dict(),
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"<Fusion of {self.model}: {len(self.fused)} of {len(self.boundaries)} Add & Norms fused>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The report as tables."""
        from addnorm.fusion.format import on_console

        yield from on_console(self)

    def __str__(self) -> str:
        """The same as plain text."""
        from addnorm.fusion.format import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        """The same in a notebook."""
        from addnorm.fusion.format import as_html

        return as_html(self)


class VerificationError(RuntimeError):
    """The fused model differed by more than twice its own rounding errors; `fusion` tells where."""

    def __init__(self, fusion: Fusion) -> None:
        most = worst((*fusion.proof.outputs, *fusion.proof.gradients))
        what = "" if most is None else f"{most.name} differs by {most.off:.1e}, and may by {most.limit:.1e}"
        why = "twice what eager itself is off" if fusion.proof.oracle.startswith("float") else "what a few roundings do"
        super().__init__(f"{fusion.model} is not fused: {what}, {why}. The model is as it was.")
        self.fusion = fusion
