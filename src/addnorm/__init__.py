"""addnorm: the transformer's Add & Norm, fused, exact and fast.

    y = LayerNorm(x + Sublayer(x))        post-LN: y = add_layer_norm(x, branch, weight, bias)
    x + Sublayer(LayerNorm(x))            pre-LN:  read, x = add_layer_norm(x, branch, ..., return_residual=True)

`addnorm.functional` has the functions, `addnorm.nn` the modules, `addnorm.trace` one token step by step; `inspect`, `verify`,
`locate`, `record`, `decompose`, `ablate` and `fuse` are for a model you already have.
"""

import importlib
from typing import TYPE_CHECKING, Any

from addnorm import wirings
from addnorm.boundary import StreamGates, StreamStep, add_norm_streams
from addnorm.functional import add_layer_norm, add_residual, add_rms_norm, layer_norm, rms_norm
from addnorm.inplace import add_layer_norm_, add_residual_, add_rms_norm_
from addnorm.nn import AddNorm, LayerNorm, Learned, ResidualStack, RMSNorm, Row, SublayerConnection, Wiring
from addnorm.ops import Backend, backends
from addnorm.ops.compile_mode import set_compile_mode
from addnorm.ops.cpu import library_path
from addnorm.ops.decompositions import decompositions
from addnorm.ops.save_outputs import save_outputs

if TYPE_CHECKING:  # imported at their first use: these imports take several times as long as all others
    from addnorm.fusion.export import export_fused
    from addnorm.fusion.fuse import fuse, unfuse
    from addnorm.fusion.result import Fusion, VerificationError
    from addnorm.stream.ablate import ablate, ablate_each, scale_write
    from addnorm.stream.decompose import decompose
    from addnorm.stream.inspect import inspect
    from addnorm.stream.locate import locate
    from addnorm.stream.record.recorder import record
    from addnorm.stream.states import save_states
    from addnorm.stream.verify import verify

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
    "locate",
    "record",
    "rms_norm",
    "save_outputs",
    "save_states",
    "scale_write",
    "set_compile_mode",
    "unfuse",
    "verify",
    "wirings",
]

_MODULES = ("distributed", "fusion", "lab", "onnx", "report", "stream", "trace")
_LATER = {
    "export_fused": "fusion.export",
    "fuse": "fusion.fuse",
    "unfuse": "fusion.fuse",
    "Fusion": "fusion.result",
    "VerificationError": "fusion.result",
    "ablate": "stream.ablate",
    "ablate_each": "stream.ablate",
    "scale_write": "stream.ablate",
    "decompose": "stream.decompose",
    "inspect": "stream.inspect",
    "locate": "stream.locate",
    "record": "stream.record.recorder",
    "save_states": "stream.states",
    "verify": "stream.verify",
}


def __getattr__(name: str) -> Any:
    """Return a module of `_MODULES`, or a tool for existing models, which is imported at its first use."""
    if name in _MODULES:
        return importlib.import_module(f"addnorm.{name}")
    if name not in _LATER:
        raise AttributeError(f"module 'addnorm' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"addnorm.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
