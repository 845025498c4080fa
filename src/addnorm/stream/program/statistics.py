"""Statistics of a residual program: size and write share of each stream, and what its matrices do to the streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from addnorm._util.blocks import Block, Column, Paragraph, Table
from addnorm._util.numbers import format_number
from addnorm._util.render import Rendered
from addnorm.stream.program.maps import Matrix, join_streams, to_streams
from addnorm.stream.program.result import Program, ProgramSite
from addnorm.stream.shares import source_shares

NOTE = (
    "rms: of each stream before the sublayer. Write share: ⟨B W, s⟩ / |s|² of s = A X + B W in each stream, mean over the "
    "tokens. Forward, backward: largest deviation of a row sum and of a column sum of A from 1. Concentration of C: from 1/n, "
    "all streams alike, to 1, one stream. Spread: standard deviation over the tokens, mean over the entries."
)
MATRICES = ("forward", "backward", "concentration", "spread_C", "spread_B")
HEADINGS = {
    "rms": "rms",
    "write_share": "write\nshare",
    "forward": "A\nforward",
    "backward": "A\nbackward",
    "concentration": "C con-\ncentration",
    "spread_C": "C\nspread",
    "spread_B": "B\nspread",
}


@dataclass(frozen=True)
class SiteStatistics:
    """Statistics of one sublayer. The statistics of a matrix are None if the matrix is not computed from the streams.

    Attributes:
        site: the id of the sublayer.
        rms: the root mean square of each stream before the sublayer.
        write_share: by stream after the sublayer, <B W, s> / |s|^2 of the sum s = A X + B W before its norm, mean over the
            tokens. None if the sublayer has other tokens than the stream.
        forward: largest deviation of a row sum of A from 1 over all tokens: what a stream receives.
        backward: the same of column sums: what a stream passes on, and the gradient receives. Both are None unless A is square.
        concentration: sum of p_j^2 for p_j = |c_j| / sum |c|, mean over the tokens: from 1/n (all streams alike) to 1 (one).
        spread_C, spread_B: standard deviation over the tokens of an entry, mean over the entries.
    """

    site: str
    rms: tuple[float, ...]
    write_share: tuple[float, ...] | None
    forward: float | None
    backward: float | None
    concentration: float | None
    spread_C: float | None  # the matrix C
    spread_B: float | None


class ProgramStatistics(Rendered, tuple[SiteStatistics, ...]):
    """Statistics of each sublayer, in order of depth, from `measure_streams`. They print as a table."""

    __slots__ = ()

    def _blocks(self) -> Iterator[Block]:
        yield from build_statistics(self)

    def to_dict(self) -> list[dict[str, Any]]:
        """Return one dict for each sublayer, as JSON types."""
        return [{name: [*v] if isinstance(v, tuple) else v for name, v in asdict(one).items()} for one in self]


def build_statistics(rows: Sequence[SiteStatistics]) -> Iterator[Block]:
    """Yield a table of the statistics of each sublayer, and a paragraph that explains its columns."""
    names = [name for name in HEADINGS if any(getattr(row, name) is not None for row in rows)]
    headings = [Column(HEADINGS[name], "right", fold=name in ("rms", "write_share")) for name in names]
    yield Table(
        [Column("site", fold=True), *headings],
        [[row.site, *(_format(getattr(row, name)) for name in names)] for row in rows],
    )
    yield Paragraph(NOTE, style="dim")


def measure_streams(program: Program) -> ProgramStatistics:
    """Measure the streams and the computed matrices of each sublayer of `addnorm.inspect(model, ...).program`.

    Args:
        program: the program of an inspection. All numbers are those of the inspected run, in float64.

    Returns:
        One `SiteStatistics` for each sublayer. It prints as a table; `to_dict()` returns JSON types.

    Example:
        >>> model = addnorm.nn.Encoder(2, 16, nhead=2, wiring="mhc").eval()
        >>> rows = addnorm.stream.measure_streams(addnorm.inspect(model, torch.randn(2, 5, 16)).program)
        >>> len(rows), len(rows[0].rms), rows[0].forward < 1e-3
        (4, 4, True)
    """
    if not isinstance(program, Program):
        raise TypeError(
            f"program is {type(program).__name__}, expected the program of an inspection: models with one stream and constant "
            "or learned factors have none, addnorm.record measures those."
        )
    return ProgramStatistics(_measure_site(program, site) for site in program.sites)


def _measure_site(program: Program, site: ProgramSite) -> SiteStatistics:
    state = join_streams(program.carrier, site.state)
    sums = split_sums(program, site)
    shares = None if sums is None else tuple(source_shares({"write": sums[1]}, sums[0])["write"].mean(0).tolist())
    matrices = measure_matrices(site, None)
    rms = tuple(state.square().mean((0, 2)).sqrt().tolist())
    return SiteStatistics(site.id, rms, shares, **{name: matrices.get(name) for name in MATRICES})


def measure_matrices(site: ProgramSite, mask: Tensor | None) -> dict[str, float]:
    """Return the statistics of a sublayer's computed matrices by their names in `SiteStatistics`.

    Args:
        site: the sublayer.
        mask: mask of the tokens to measure, `(tokens,)`; None for all.
    """
    c, a, b = (_count(matrix, mask) for matrix in (site.collapse, site.mix, site.inject))
    found: dict[str, float] = {}
    if a is not None and a.shape[1] == a.shape[2]:
        for name, dim in (("forward", 2), ("backward", 1)):
            found[name] = float((a.sum(dim) - 1.0).abs().max())
    if c is not None:
        p = c.abs() / c.abs().sum(2, keepdim=True).clamp_min(torch.finfo(c.dtype).tiny)
        found["concentration"] = float(p.square().sum(2).mean())
    for name, matrix in (("spread_C", c), ("spread_B", b)):
        if matrix is not None:
            found[name] = float(matrix.std(0, correction=0).mean())
    return found


def _count(matrix: Matrix, mask: Tensor | None) -> Tensor | None:
    """Return the entries of a computed matrix for the tokens that the mask selects.

    None for a constant or learned matrix, or if the mask selects no token.
    """
    if matrix.source != "computed":
        return None
    values = matrix.values if mask is None or len(matrix.values) != len(mask) else matrix.values[mask.cpu()]
    return values if len(values) else None


def split_sums(program: Program, site: ProgramSite) -> tuple[Tensor, Tensor] | None:
    """Return A X + B W before its norm, and B W, both `(tokens, n, d)`; None if W has other tokens than X."""
    totals: list[Tensor] = []
    writes: list[Tensor] = []
    for part in site.sums:
        total = to_streams(program.carrier, part.target if part.norm is None else part.norm.x)
        write = torch.zeros_like(total)
        for column in part.columns:
            if column.source is site.write.value:
                operand = to_streams(program.carrier, column.operand)
                if len({len(column.matrix), len(operand), len(total)} - {1}) > 1:
                    return None
                write = write + (column.matrix * operand.unsqueeze(1)).sum(2)
        totals.append(total)
        writes.append(write)
    return torch.cat(totals, 1), torch.cat(writes, 1)


def _format(value: float | Sequence[float] | None) -> str:
    values = value if isinstance(value, Sequence) else [] if value is None else [value]
    return " ".join(format_number(v, 2) for v in values)
