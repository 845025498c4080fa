"""The norms in a data flow: torch's, this library's, and those written out by hand (handmade.py), in any order of casts.

    (x - mean) / sqrt(var + eps) * weight + bias      layer       x / sqrt(mean(x^2) + eps) * weight      rms
    x / max(|x|, eps) * weight                        scale

Whatever the operators are called, the formula that was found is computed in float64 and compared with what the model computed.
One that is not that formula is no norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from addnorm.stream.dataflow.graph import Flow, Op, Value
from addnorm.stream.find.decomposed_norms import affine, match
from addnorm.stream.find.norm import Norm

__all__ = ["Norm", "find_norms"]

LOOSE = 64  # roundings of the model's dtype that a norm may be off its formula: cast orders differ


def find_norms(flow: Flow, proven: bool = True) -> list[Norm]:
    """The norms over the last dimension; those of whole tokens are also set as `norm` of the value that they returned.

    `proven` False leaves it to the caller to compare their formulas: a flow without numbers cannot.
    """
    found: list[Norm] = []
    for op in flow.ops:
        make = FUSED.get(op.name)
        norm = make(op) if make else match(op)
        if norm is None or norm.y.norm is not None or norm.x.tensor.is_complex():
            continue
        if not make:
            affine(norm)
        norm.error = _error(norm) if proven else 0.0
        if norm.error <= 1.0:
            found.append(norm)
            if norm.whole:
                norm.y.norm = norm
                for step in norm.ops:
                    step.norms = (*step.norms, norm)
    return found


def _error(norm: Norm) -> float:
    """How far the formula is from what was computed, as a share of what rounding may do."""
    with torch.no_grad():
        x, y = norm.x.tensor.detach().double(), norm.y.tensor.detach().double()
        if not x.numel():
            return 0.0
        formula = norm(x).reshape(y.shape)
        size = (y.square().mean().sqrt() + norm_scale(norm)).clamp_min(1e-30)
        off = (formula - y).square().mean().sqrt() / size
        return float(off / (LOOSE * torch.finfo(norm.dtype).eps)) if torch.isfinite(y).all() else 0.0


def norm_scale(norm: Norm) -> Tensor:
    """The size of what cancels where a row is nearly constant: nothing there is exact to its dtype."""
    x = norm.x.tensor.detach().double()
    if norm.kind != "layer":
        return x.new_zeros(())
    return (x.mean(-1, keepdim=True).abs() / norm.denominator(x)).square().mean().sqrt()


def _layer(op: Op) -> Norm | None:
    x, shape, weight, bias, eps = _filled(op, ("input", "normalized_shape", "weight", "bias", "eps"), eps=1e-5)
    return Norm("layer", float(eps), x, op.outputs[0], weight, bias, ops={op}) if len(shape) == 1 else None


def _rms(op: Op) -> Norm | None:
    x, shape, weight, eps = _filled(op, ("input", "normalized_shape", "weight", "eps"))
    eps = torch.finfo(x.tensor.dtype).eps if eps is None else eps
    return Norm("rms", float(eps), x, op.outputs[0], weight, ops={op}) if len(shape) == 1 else None


def _ours(op: Op) -> Norm:
    tensors = [a for a in op.args if isinstance(a, Value)]
    kind, eps, offset, has_weight, has_bias = op.args[len(tensors) :]
    gains = iter(tensors[1:])
    weight = next(gains) if has_weight else None
    bias = next(gains) if has_bias else None
    eps = torch.finfo(tensors[0].tensor.dtype).eps if eps is None else eps
    return Norm(kind, eps, tensors[0], op.outputs[0], weight, bias, offset, ops={op})


FUSED: dict[str, Callable[[Op], Norm | None]] = {
    "native_layer_norm": _layer, "layer_norm": _layer, "rms_norm": _rms, "_fused_rms_norm": _rms, "addnorm::norm": _ours,
}  # fmt: skip


def _filled(op: Op, names: tuple[str, ...], **defaults: Any) -> list[Any]:
    given = {**dict.fromkeys(names), **defaults, **dict(zip(names, op.args, strict=False)), **op.kwargs}
    return [given[name] for name in names]
