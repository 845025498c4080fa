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
from addnorm.stream.program.maps import Matrix, to_streams
from addnorm.stream.program.result import Program, ProgramSite

NOTE = (
    "rms: of each stream before the sublayer. Write share: ⟨B W, s⟩ / |s|² of s = A X + B W in each stream, mean over the "
    "tokens. Forward, backward: largest deviation of a row sum and of a column sum of A from 1. Concentration of C: from 1/n, "
    "all streams alike, to 1, one stream. Spread: standard deviation over the tokens, mean over the entries."
)
HEADINGS = {
    "rms": "rms",
    "write_share": "write share",
    "forward": "A forward",
    "backward": "A backward",
    "concentration": "C concentration",
    "spread_C": "C spread",
    "spread_B": "B spread",
}


@dataclass(frozen=True)
class SiteStatistics:
    """Statistics of one sublayer. Those of a matrix are None if it is not computed from the streams.

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
        names = [name for name in HEADINGS if any(getattr(one, name) is not None for one in self)]
        rows = [[one.site, *(_format(getattr(one, name)) for name in names)] for one in self]
        yield Table(
            [
                Column("site", fold=True),
                *(Column(HEADINGS[name], "right", name in ("rms", "write_share")) for name in names),
            ],
            rows,
        )
        yield Paragraph(NOTE, style="dim")

    def to_dict(self) -> list[dict[str, Any]]:
        """Return one dict for each sublayer, as JSON types."""
        return [{name: [*v] if isinstance(v, tuple) else v for name, v in asdict(one).items()} for one in self]


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
    state = torch.cat([to_streams(program.carrier, value) for value in site.state], 1)
    c, b = (m.values if m.source == "computed" else None for m in (site.collapse, site.inject))
    forward, backward = _measure_mixing(site.mix)
    return SiteStatistics(
        site.id, tuple(state.square().mean((0, 2)).sqrt().tolist()), _measure_write(program, site), forward, backward,
        None if c is None else _measure_concentration(c), *(None if m is None else _measure_spread(m) for m in (c, b)),
    )  # fmt: skip


def _measure_mixing(mix: Matrix) -> tuple[float | None, float | None]:
    if mix.source != "computed" or mix.values.shape[1] != mix.values.shape[2]:
        return None, None
    rows, columns = (float((mix.values.sum(dim) - 1.0).abs().max()) for dim in (2, 1))
    return rows, columns


def _measure_concentration(c: Tensor) -> float:
    p = c.abs() / c.abs().sum(2, keepdim=True).clamp_min(torch.finfo(c.dtype).tiny)
    return float(p.square().sum(2).mean())


def _measure_spread(matrix: Tensor) -> float:
    return float(matrix.std(0, correction=0).mean())


def _measure_write(program: Program, site: ProgramSite) -> tuple[float, ...] | None:
    """Return the share of the write in each new stream, before the norm of the sum."""
    shares: list[float] = []
    for part in site.sums:
        total = to_streams(program.carrier, part.target if part.norm is None else part.norm.x)
        write = torch.zeros_like(total)
        for column in part.columns:
            if column.source is site.write.value:
                operand = to_streams(program.carrier, column.operand)
                if len({len(column.matrix), len(operand), len(total)} - {1}) > 1:
                    return None
                write = write + (column.matrix * operand.unsqueeze(1)).sum(2)
        size = total.square().sum(-1).clamp_min(torch.finfo(total.dtype).tiny)
        shares += ((write * total).sum(-1) / size).mean(0).tolist()
    return tuple(shares)


def _format(value: float | Sequence[float] | None) -> str:
    values = value if isinstance(value, Sequence) else [] if value is None else [value]
    return " ".join(format_number(v, 2) for v in values)
