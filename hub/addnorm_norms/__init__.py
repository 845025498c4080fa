"""LayerNorm and RMSNorm on CPUs: the C++ kernels of addnorm, as functions and as layers for `kernels.kernelize`.

Statistics and the gradients of weight and bias are added up in float32 or wider, so they are exact in bfloat16 and float16 too.
Everything else than CPU tensors of one floating dtype is computed by torch.nn.functional, with the same formula.
"""

from . import layers, shapes  # noqa: F401  # shapes registers what torch.compile needs
from .norms import layer_norm, rms_norm

__all__ = ["layer_norm", "layers", "rms_norm"]
