"""addnorm: the transformer's Add & Norm, fused, exact and fast.

    y = LayerNorm(x + Sublayer(x))        post-LN: add_layer_norm(x, branch, weight, bias)
    x + Sublayer(LayerNorm(x))            pre-LN:  add_layer_norm(..., return_residual=True)
"""

from addnorm.ops import Backend, backends
from addnorm.functional import add_layer_norm, add_residual, add_rms_norm, layer_norm, rms_norm

__version__ = "0.1.0"
