"""Residual wirings as data.

`row.py` has one sublayer's norms and factors, `spec.py` the `Wiring`: a named rule for rows. `catalog.py` has the published
wirings and `init.py` their initialization. `equation.py`, `description.py` and `drawing.py` turn any wiring into text.
"""

from addnorm.wirings.catalog import (
    EXAMPLES,
    NOT_OFFERED,
    Growth,
    Kind,
    admin,
    b2t,
    completep,
    deepnorm,
    deepnorm_constants,
    depth_mup,
    layer_scale,
    layernorm_scaling,
    list_all,
    mix_ln,
    no_norm,
    no_residual,
    parallel,
    peri_ln,
    post_ln,
    pre_ln,
    reordered,
    resi_dual,
    residual_multiplier,
    rezero,
    sandwich,
    skipinit,
)  # fmt: skip
from addnorm.wirings.spec import CONSTRUCTORS, Learned, Place, Row, Wiring, as_wiring, get

__all__ = [
    "CONSTRUCTORS", "EXAMPLES", "NOT_OFFERED", "Growth", "Kind", "Learned", "Place", "Row", "Wiring", "admin",
    "as_wiring", "b2t", "completep", "deepnorm", "deepnorm_constants", "depth_mup", "get", "layer_scale",
    "layernorm_scaling", "list_all", "mix_ln", "no_norm", "no_residual", "parallel", "peri_ln", "post_ln", "pre_ln",
    "reordered", "resi_dual", "residual_multiplier", "rezero", "sandwich", "skipinit",
]  # fmt: skip
