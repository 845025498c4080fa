"""Residual wirings as data.

`stage.py` has one sublayer's norms, factors and matrices, `spec.py` the `Wiring`: a named rule for stages. The files named
`catalog` have the published wirings, and `init.py` their initialization. `stage_text.py` writes a stage in symbols; from that
`equation.py`, `description.py` and `drawing.py` make the texts of a wiring.
"""

from addnorm.wirings.catalog import (
    EXAMPLES,
    NOT_OFFERED,
    Growth,
    Kind,
    admin,
    completep,
    deepnorm,
    deepnorm_constants,
    depth_mup,
    layer_scale,
    list_all,
    peri_ln,
    post_ln,
    pre_ln,
    reordered,
    residual_multiplier,
    rezero,
    sandwich,
    skipinit,
)  # fmt: skip
from addnorm.wirings.catalog_layers import layernorm_scaling, mix_ln, no_norm, no_residual, parallel
from addnorm.wirings.catalog_streams import (
    b2t,
    depth_scaled,
    gated_mix,
    gated_residual,
    hyper_connections,
    independent_hc,
    keel,
    mhc,
    ngpt,
    resi_dual,
    residual_scaling,
    reversible,
    siamese_norm,
)
from addnorm.wirings.catalog_streams_memory import attention_residuals, denseformer, muddformer, x0_residual
from addnorm.wirings.spec import CONSTRUCTORS, Learned, Place, Wiring, as_wiring, get
from addnorm.wirings.stage import Computed, Head, Row, Stage, append_zero, identity, unit

__all__ = [
    "CONSTRUCTORS", "EXAMPLES", "NOT_OFFERED", "Computed", "Growth", "Head", "Kind", "Learned", "Place", "Row", "Stage",
    "Wiring", "admin", "append_zero", "as_wiring", "attention_residuals", "b2t", "completep", "deepnorm", "deepnorm_constants",
    "denseformer", "depth_mup", "depth_scaled", "gated_mix", "gated_residual", "get", "hyper_connections", "identity",
    "independent_hc", "keel", "layer_scale", "layernorm_scaling", "list_all", "mhc", "mix_ln", "muddformer", "ngpt", "no_norm",
    "no_residual", "parallel", "peri_ln", "post_ln", "pre_ln", "reordered", "resi_dual", "residual_multiplier",
    "residual_scaling", "reversible", "rezero", "sandwich", "siamese_norm", "skipinit", "unit", "x0_residual",
]  # fmt: skip
