"""The norms of a data flow: torch's, this library's, and those decomposed into primitive operators.

    (x - mean) / sqrt(var + eps) * weight + bias      layer       x / sqrt(mean(x^2) + eps) * weight      rms
    x / max(|x|, eps) * weight                        scale     x / D(x) * weight, D another function of a token     own

The formula of every candidate is computed in float64 and compared with the model's output. A candidate that differs is rejected.

Fused norms are the operators listed in `KINDS`. The norms of this library are captured as these operators too (fused_ops.py).
Norms in primitive operators are found in decomposed_norms.py by what they compute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from addnorm._util.norms import KINDS
from addnorm.reference import compute_dtype
from addnorm.stream.dataflow.graph import Flow, Op
from addnorm.stream.find.decomposed_norms import NormFinder, match_affine
from addnorm.stream.find.norm import Norm
from addnorm.stream.layout.dimensions import covers_features

MAX_ROUNDINGS = 64  # tolerance in round-offs of the model's dtype: the order of casts differs
FUSED = {name: kind for kind in KINDS for name in KINDS[kind].operators}


def find_norms(flow: Flow, proven: bool = True) -> list[Norm]:
    """Find the norms over the last dimension. If a norm covers all features of a token, set `Value.norm` of its output.

    Args:
        flow: the captured run.
        proven: whether to compare each norm with its formula. Pass False for a flow without numbers.
    """
    norms: list[Norm] = []
    finder = NormFinder()
    for op in flow.ops:
        fused = match_fused(op)
        norm = finder.match(op, fused)
        if norm is None or norm.y.norm is not None or norm.x.tensor.is_complex():
            continue
        if fused is None or (norm.weight is None and norm.bias is None):
            match_affine(norm, vectors_only=fused is not None)
        _add(norm, norms, proven)
    for norm in finder.list_own(norms) if proven else ():
        match_affine(norm)
        _add(norm, norms, proven)
    # A norm over several joined dimensions covers all features if another norm over all features, or a product, has its width.
    widths = {norm.x.shape[-1] for norm in norms if norm.is_whole or norm.is_projected}
    for norm in norms:
        if norm.y.norm is None and norm.x.shape[-1] in widths and covers_features(norm.x, joined=True):
            _set_norm(norm)
    return sorted(norms, key=lambda norm: norm.y.index)


def _add(norm: Norm, norms: list[Norm], proven: bool) -> None:
    """Append `norm` to `norms` if its formula gives the model's values, and set `Op.norms` and `Value.norm`."""
    norm.error = _measure_error(norm) if proven else 0.0
    if norm.error > 1.0:
        return
    norms.append(norm)
    if covers_features(norm.x):
        _set_norm(norm)


def _set_norm(norm: Norm) -> None:
    """Record a norm over all features of a token, in `Value.norm` of its output and `Op.norms` of its operators."""
    norm.y.norm = norm
    for step in norm.ops:
        step.norms = tuple(sorted((*step.norms, norm), key=lambda one: one.y.index))


def _measure_error(norm: Norm) -> float:
    """Return the error of the norm's formula divided by the tolerance."""
    with torch.no_grad():
        x, y = norm.x.exact, norm.y.exact
        if not x.numel():
            return 0.0
        formula = norm(x).reshape(y.shape)
        size = (y.square().mean().sqrt() + _measure_cancellation(norm)).clamp_min(1e-30)
        error = (formula - y).square().mean().sqrt() / size
        return float(error / (MAX_ROUNDINGS * torch.finfo(norm.dtype).eps)) if torch.isfinite(y).all() else 0.0


def _measure_cancellation(norm: Norm) -> Tensor:
    """Return the size of the terms that cancel when the mean of a nearly constant token is subtracted."""
    x = norm.x.exact
    if not norm.is_centred:
        return x.new_zeros(())
    return (x.mean(-1, keepdim=True).abs() / norm.denominator(x)).square().mean().sqrt()


def match_fused(op: Op) -> Norm | None:
    """Return the norm that an operator of torch computes alone; None for other operators, and norms over several axes."""
    if op.name not in FUSED or len(op.get("normalized_shape", (1,))) > 1:
        return None
    x, weight, bias, eps = op.inputs[0], *(op.get(name) for name in ("weight", "bias", "eps"))
    eps = torch.finfo(compute_dtype(x.tensor)).eps if eps is None else eps
    return Norm(FUSED[op.name], float(eps), x, op.out, weight, bias, ops={op})
