"""The data of the stack view: untrained stacks with any placement of the norm, measured by `lab.init_probe`."""

from typing import Any

from addnorm._util.norms import KINDS
from addnorm.explorer.params import Choice, Field, Flag, Number, describe_fields, read_params
from addnorm.lab.init_probe import PLACEMENTS, InitProbe

FINAL_NORMS = {"own": None, "on": True, "off": False}  # own: the choice of the wiring

FIELDS: dict[str, Field] = {
    "placement": Choice("post", tuple(PLACEMENTS)),
    "norm": Choice("layer", tuple(KINDS)),
    "sublayers": Number(24, 2, 96, step=2),
    "d_model": Number(64, 8, 256, step=8),
    "tokens": Number(16, 1, 64, step=1),
    "gain": Number(1.0, 0.1, 3.0),
    "alpha": Number(0.0, 0.0, 8.0),  # 0: the factor of the wiring
    "seed": Number(0, 0, 9999, step=1),
    "residual": Flag(True),
    "final": Choice("own", tuple(FINAL_NORMS)),
}

TITLES = {
    "post": "post-LN", "pre": "pre-LN", "sandwich": "sandwich", "reordered": "reordered", "deepnorm": "DeepNorm", "none": "none",
}  # fmt: skip


def parse(params: Any) -> InitProbe:
    """Return the stack that a request describes.

    Raises:
        ValueError: a parameter is wrong.
    """
    values = read_params(FIELDS, params)
    return InitProbe(**values | {"alpha": values["alpha"] or None, "final_norm": FINAL_NORMS[values.pop("final")]})


def compute(probe: InitProbe) -> dict[str, Any]:
    """Return the measurements and the wiring's description. Numbers may be NaN or infinite."""
    wiring, layers = probe.wiring, probe.sublayers // 2
    return {
        **probe.measure(),
        "equation": wiring.equation(layers),
        "final_norm": wiring.ends_in_norm(layers),
        "alpha": wiring.row(0, 0, layers).a,
        "wiring": repr(wiring),
    }


def describe() -> dict[str, Any]:
    """Return the parameters and the placements with their equation, norms, source and use, for the page."""
    placements = []
    for name, make in PLACEMENTS.items():
        wiring = make()
        row = wiring.row(0, 0, 12)
        placements.append(
            {
                "name": name, "title": TITLES[name], "equation": str(row) if name != "deepnorm" else "x' = N(α x + f(x))",
                "norms": [norm for norm in ("norm_in", "norm_branch", "norm_out") if getattr(row, norm)],
                "final": wiring.ends_in_norm(12), "alpha": row.a != 1.0, "source": wiring.source, "use": wiring.use,
            }
        )  # fmt: skip
    return {"fields": describe_fields(FIELDS), "placements": placements}
