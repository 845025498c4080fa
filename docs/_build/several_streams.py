"""The generated parts of several_streams.md: drawings and equations of wirings, and the lists of wirings."""

from __future__ import annotations

from functools import partial
from typing import Any

import page

from addnorm import wirings

SHOWN = ("pre_ln", "siamese_norm", "hyper_connections", "mhc", "gated_residual", "attention_residuals", "x0_residual")


def figure(name: str) -> str:
    """Return the equation and the drawing of a wiring."""
    wiring = wirings.get(name)
    return "\n".join(["```", wiring.equation(), "", wiring.draw(), "```"])


def table() -> str:
    """Return the wirings with stages: the numbers of their streams over 12 layers, and how their coefficients start."""
    rows = []
    for one in wirings.list_all():
        if not one.has_rows:
            stages: list[Any] = one.stages(12)
            numbers = [len(one.embedding), *(stage.n_out for stage in stages)]
            n = str(numbers[0]) if len({*numbers}) == 1 else f"{numbers[0]} to {max(numbers)}"
            notations = [stage.coefficients.notation for stage in stages if stage.coefficients is not None]
            starts = dict.fromkeys(notation.start for notation in notations)
            rows.append([f"[{one.name}](wirings.md#{one.name})", n, " ".join(starts)])
    return page.table(["wiring", "streams, 12 layers", "coefficients before training"], rows)


SECTIONS = {
    **{f"several_streams:{name}": partial(figure, name) for name in SHOWN},
    "several_streams:table": table,
}
