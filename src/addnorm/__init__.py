"""addnorm: the transformer's Add & Norm, fused, exact and fast.

    y = LayerNorm(x + Sublayer(x))        post-LN: y = add_layer_norm(x, branch, weight, bias)
    x + Sublayer(LayerNorm(x))            pre-LN:  read, x = add_layer_norm(x, branch, ..., return_residual=True)

`addnorm.functional` has the functions, `addnorm.nn` the modules, `addnorm.trace` one token step by step; `inspect`, `record`,
`decompose`, `ablate` and `fuse` are for a model you already have.
"""

from addnorm import wirings
from addnorm.boundary import StreamGates, StreamStep, add_norm_streams
from addnorm.functional import add_layer_norm, add_residual, add_rms_norm, layer_norm, rms_norm
from addnorm.fusion.export import export_fused
from addnorm.fusion.fuse import fuse, unfuse
from addnorm.fusion.result import Fusion, VerificationError
from addnorm.inplace import add_layer_norm_, add_residual_, add_rms_norm_
from addnorm.nn import AddNorm, LayerNorm, Learned, ResidualStack, RMSNorm, Row, SublayerConnection, Wiring
from addnorm.ops import Backend, backends
from addnorm.ops.compile_mode import set_compile_mode
from addnorm.ops.cpu import library_path
from addnorm.ops.decompositions import decompositions
from addnorm.stream.ablate import ablate, ablate_each, scale_write
from addnorm.stream.decompose import decompose
from addnorm.stream.find.inspect import inspect
from addnorm.stream.record.recorder import record

__version__ = "0.1.0"

__all__ = [
    "AddNorm",
    "Backend",
    "Fusion",
    "LayerNorm",
    "Learned",
    "RMSNorm",
    "ResidualStack",
    "Row",
    "StreamGates",
    "StreamStep",
    "SublayerConnection",
    "VerificationError",
    "Wiring",
    "ablate",
    "ablate_each",
    "add_layer_norm",
    "add_layer_norm_",
    "add_norm_streams",
    "add_residual",
    "add_residual_",
    "add_rms_norm",
    "add_rms_norm_",
    "backends",
    "decompose",
    "decompositions",
    "export_fused",
    "fuse",
    "inspect",
    "layer_norm",
    "library_path",
    "record",
    "rms_norm",
    "scale_write",
    "set_compile_mode",
    "unfuse",
    "wirings",
]
