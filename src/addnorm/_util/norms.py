"""The kinds of norms, one entry each, from which formulas, defaults, operators, names and ONNX files derive.

    y = (x - mean) / D * weight + bias        D = sqrt(mean((x - mean)^2) + eps)

The mean is 0 in a kind that does not centre, and another kind may have another D.
CONTRIBUTING.md lists what a new kind needs besides its entry.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Norm = Literal["layer", "rms"]


def _square(t: Tensor) -> Tensor:
    return t * t


def _reciprocal_root(mean_square: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(mean_square + eps)


def _x_hat(x_hat: Tensor) -> Tensor:
    return x_hat


class NormKind(NamedTuple):
    """Kind of norm: its formula, its defaults, and its names in torch and ONNX.

    Attributes:
        title: the name that texts show.
        code: the norm's number in the operators' schemas and in the kernels; 2 (`NONE`) stands for a call without a norm.
        is_centred: whether the mean is subtracted.
        has_bias: whether torch's module has a bias, and torch's function takes a bias.
        eps: the default of torch's module; None: the machine epsilon of the arithmetic.
        operators: torch's operators that compute the norm, at least one; a made-up name for a norm that torch does not have.
        function: torch's function; None for a norm that torch does not have.
        onnx: ONNX's operator, the first opset version with this operator, and onnxruntime's operator of add and norm. None for a
            norm that ONNX does not have: files then have the elementary operators of its formula.
        term: function of x, less the mean if the kind centres, whose mean over the features decides D.
        rstd: 1 / D, from this mean and eps.
        slope: the derivative of D by each feature, times d, from the normalized features.
    """

    title: str
    code: int
    is_centred: bool
    has_bias: bool
    eps: float | None
    operators: tuple[str, ...]
    function: Callable[..., Any] | None = None
    onnx: tuple[str, int, str] | None = None
    term: Callable[[Tensor], Tensor] = _square
    rstd: Callable[[Tensor, float], Tensor] = _reciprocal_root
    slope: Callable[[Tensor], Tensor] = _x_hat


KINDS: dict[Norm, NormKind] = {
    "layer": NormKind(
        "LayerNorm", 0, True, True, 1e-5, ("layer_norm", "native_layer_norm"), F.layer_norm,
        ("LayerNormalization", 17, "SkipLayerNormalization"),
    ),
    "rms": NormKind(
        "RMSNorm", 1, False, False, None, ("rms_norm", "_fused_rms_norm"), F.rms_norm,
        ("RMSNormalization", 23, "SkipSimplifiedLayerNormalization"),
    ),
}  # fmt: skip
BY_CODE: dict[int, Norm] = {kind.code: name for name, kind in KINDS.items()}
NONE = 2  # the code of a call without a norm
