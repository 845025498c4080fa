"""The first view: a stack whose LayerNorm moves, computed at every move by `addnorm.lab.init_probe`."""

from __future__ import annotations

from typing import Any

from addnorm.explorer.params import Choice, Field, Flag, Number, read
from addnorm.lab.init_probe import PLACEMENTS, Flip

__all__ = ["FIELDS", "answer", "places"]

OWN = "own"  # as the wiring has it

FIELDS: dict[str, Field] = {
    "placement": Choice("post", tuple(PLACEMENTS)),
    "norm": Choice("layer", ("layer", "rms")),
    "sublayers": Number(24, 2, 96, step=2),
    "d_model": Number(64, 8, 256, step=8),
    "tokens": Number(16, 1, 64, step=1),
    "gain": Number(1.0, 0.1, 3.0),
    "alpha": Number(0.0, 0.0, 8.0),
    "seed": Number(0, 0, 9999, step=1),
    "residual": Flag(True),
    "final": Choice(OWN, (OWN, "on", "off")),
}
"""What the page may choose; alpha 0 is the wiring's own."""

TITLES = {
    "post": "post-LN", "pre": "pre-LN", "sandwich": "sandwich", "reordered": "reordered", "deepnorm": "DeepNorm", "none": "none",
}  # fmt: skip


def flip(given: Any) -> Flip:
    """What a request asks for.

    Raises:
        ValueError: something in it does not fit.
    """
    chosen = read(FIELDS, given)
    final = {"own": None, "on": True, "off": False}[chosen.pop("final")]
    return Flip(**chosen | {"alpha": chosen["alpha"] or None, "final_norm": final})


def answer(asked: Flip) -> dict[str, Any]:
    """The measurements, and the wiring in words: JSON types, with NaN and inf as they are."""
    stack = asked.wiring
    layers = asked.sublayers // 2
    row = stack.row(0, 0, layers)
    return {
        **asked.measure(),
        "equation": stack.equation(layers),
        "final_norm": stack.ends_in_norm(layers),
        "alpha": row.a,
        "wiring": repr(stack),
    }


def places() -> list[dict[str, Any]]:
    """The placements for the page: the equation, its source, which norms stand, what it is for."""
    found = []
    for name, make in PLACEMENTS.items():
        wiring = make()
        row = wiring.row(0, 0, 12)
        found.append(
            {
                "name": name, "title": TITLES[name], "equation": str(row) if name != "deepnorm" else "x' = N(α x + f(x))",
                "norms": [place for place in ("norm_in", "norm_branch", "norm_out") if getattr(row, place)],
                "final": wiring.ends_in_norm(12), "alpha": row.a != 1.0, "source": wiring.source, "use": wiring.use,
            }
        )  # fmt: skip
    return found
