"""The generated parts of several_streams.md: drawings and equations of wirings, and the lists of wirings."""

from __future__ import annotations

from functools import partial
from typing import Any

import page

from addnorm import wirings
from wirings import linked

SHOWN = ("pre_ln", "siamese_norm", "hyper_connections", "mhc", "gated_residual", "attention_residuals", "x0_residual")


def figure(name: str) -> str:
    """Return the equation and the drawing of a wiring."""
    wiring = wirings.get(name)
    return "\n".join(["```", wiring.equation(), "", wiring.draw(), "```"])


def table() -> str:
    """Return the wirings with stages, with the number of their streams at the start and after 12 layers, and their use."""
    rows = []
    for one in wirings.list_all():
        if not one.has_rows:
            stages: list[Any] = one.stages(12)
            numbers = [len(one.embedding), *(stage.n_out for stage in stages)]
            n = str(numbers[0]) if len({*numbers}) == 1 else f"{numbers[0]} to {max(numbers)}"
            rows.append([f"[{one.name}](wirings.md#{one.name})", n, one.use.rstrip("."), linked(one.source)])
    return page.table(["wiring", "streams, 12 layers", "when", "source"], rows)


def starts() -> str:
    """Return how the coefficients of the wirings start, as their modules state it."""
    rows = []
    for one in wirings.list_all():
        stages: list[Any] = [] if one.has_rows else one.stages(12)
        notations = [stage.coefficients.notation for stage in stages if stage.coefficients is not None]
        texts = dict.fromkeys(notation.start for notation in notations)
        rows += [[f"[{one.name}](wirings.md#{one.name})", " ".join(texts)]] * bool(texts)
    return page.table(["wiring", "coefficients before training"], rows)


SECTIONS = {
    **{f"several_streams:{name}": partial(figure, name) for name in SHOWN},
    "several_streams:table": table, "several_streams:starts": starts,
}  # fmt: skip
