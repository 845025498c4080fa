"""How a comparison is printed: the verdict, then each setting in a table."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from addnorm.wirings.equation import number

if TYPE_CHECKING:
    from rich.console import RenderableType

    from addnorm.lab.comparison import Comparison

__all__ = ["shown"]

WIDEST = 100


def shown(of: Comparison, width: int) -> Iterator[RenderableType]:
    """What is printed, from above."""
    from rich.table import Table
    from rich.text import Text

    for finding in of.verdict:
        yield Text(
            "\n".join(
                textwrap.wrap(
                    finding.sentence, max(20, min(width, WIDEST) - 2), initial_indent="", subsequent_indent="  "
                )
            )
        )
    if of.groups:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("wiring", "layers", "rate", "warm-up", "test loss", "by seed", "diverged"):
            table.add_column(name, justify="left" if name in ("wiring", "by seed") else "right", overflow="fold")
        best = {id(arm.best) for arm in of.arms}
        for group in of.groups:
            losses = " ".join(map(_loss, group.losses()))
            cells = (group.wiring, str(group.num_layers), number(group.lr), str(group.warm_up), _loss(group.loss()),
                     losses if len(group.runs) > 1 else "", str(group.diverged or ""))  # fmt: skip
            table.add_row(*cells, style="bold" if id(group) in best else "")
        yield Text()
        yield table
        yield Text("Nats a character on the test part; in bold what each wiring is judged by.", "dim")
    failed = [check for check in of.checks if check.holds is False]
    for check in failed:
        measured = ", ".join(f"{name} {value:.3g}" for name, value in check.measured.items())
        yield Text(f"Not met: {check.name} ({check.criterion}): {measured}", "bold red")


def _loss(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "-"
