"""The kinds of norms, one entry each, from which formulas, defaults, operators, names and ONNX files derive.

    y = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias        the mean is 0 in a kind that does not centre

CONTRIBUTING.md lists what a new kind needs besides its entry.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

Norm = Literal["layer", "rms"]


class NormKind(NamedTuple):
    """Kind of norm, with its defaults and its names in torch and ONNX.

    Attributes:
        title: the name that texts show.
        code: the norm's number in the operators' schemas and in the kernels; 2 (`NONE`) stands for a call without a norm.
        is_centred: whether the mean is subtracted.
        has_bias: whether torch's module has a bias, and torch's function takes a bias.
        eps: the default of torch's module; None: the machine epsilon of the arithmetic.
        function: torch's function.
        operators: torch's operators that compute the norm, at least one; a made-up name for a norm that torch does not have.
        onnx: ONNX's operator, the first opset version with this operator, and onnxruntime's operator of add and norm.
    """

    title: str
    code: int
    is_centred: bool
    has_bias: bool
    eps: float | None
    function: Callable[..., Any]
    operators: tuple[str, ...]
    onnx: tuple[str, int, str]


KINDS: dict[Norm, NormKind] = {
    "layer": NormKind(
        "LayerNorm", 0, True, True, 1e-5, F.layer_norm, ("layer_norm", "native_layer_norm"),
        ("LayerNormalization", 17, "SkipLayerNormalization"),
    ),
    "rms": NormKind(
        "RMSNorm", 1, False, False, None, F.rms_norm, ("rms_norm", "_fused_rms_norm"),
        ("RMSNormalization", 23, "SkipSimplifiedLayerNormalization"),
    ),
}  # fmt: skip
BY_CODE: dict[int, Norm] = {kind.code: name for name, kind in KINDS.items()}
NONE = 2  # the code of a call without a norm


def torch_norm(
    norm: Norm, z: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Return torch's own norm of z over the last dimension."""
    kind = KINDS[norm]
    if kind.has_bias:
        return kind.function(z, z.shape[-1:], weight, bias, eps)  # type: ignore[no-any-return]
    y: torch.Tensor = kind.function(z, z.shape[-1:], weight, eps)
    return y if bias is None else y + bias
