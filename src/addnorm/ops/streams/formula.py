"""The boundary of n streams in torch's own operators: the reference of the kernels, differentiable and for every dtype.

    X' = A X + b w                                 X: n streams of one token
    c', b', A' = gates(φ R(vec X'))                R divides by the root mean square of all n d features
    r = N(c X')

The arithmetic is in float32, or in float64 if a tensor is. X' is rounded once and everything after it is computed from the
rounded X'; the sum c X' is not rounded before the norm.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from addnorm import reference
from addnorm._util.norms import BY_CODE
from addnorm.ops.options import NORMS
from addnorm.ops.streams import validation
from addnorm.ops.streams.kinds import GATE_KINDS, sizes_of


def write(
    streams: Tensor, branch: Tensor, mix: Tensor | None, inject: Tensor, dtype: torch.dtype, wide: torch.dtype
) -> Tensor:
    """Return X' = A X + b w, `(*, n, d)`, computed in `wide` and rounded to `dtype`; `mix` None is the identity."""
    x = streams.to(wide)
    mixed = x if mix is None else torch.matmul(mix.to(wide), x)
    return (mixed + inject.to(wide).unsqueeze(-1) * branch.to(wide).unsqueeze(-2)).to(dtype)


def read(streams: Tensor, collapse: Tensor, wide: torch.dtype) -> Tensor:
    """Return the sum of c_j X_j, `(*, d)`; c is `(*, n)`, or `(*, n, d)` with a gate for each feature."""
    gates = collapse if collapse.dim() == streams.dim() else collapse.unsqueeze(-1)
    return (gates.to(wide) * streams.to(wide)).sum(-2)


def project(streams: Tensor, weight: Tensor, eps: float, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the logits and 1 / rms of each token.

    The logits are `weight` times the RMS-normalized concatenation of the streams. The division by the rms is after the product.
    """
    flat = streams.to(wide).flatten(-2)
    scale = torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    return F.linear(flat, weight.to(wide)) * scale, scale


def project_each(
    streams: Tensor, weight: Tensor, added: Tensor, eps: float, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the logits N(X_j) φᵀ + `added` of each stream, `(*, n, n + 2)`, and the mean and rstd of each stream.

    N is a LayerNorm without parameters.
    """
    x = streams.to(wide)
    mean, rstd = reference.statistics(x, "layer", eps)
    return F.linear((x - mean) * rstd, weight.to(wide), added.to(wide)), torch.cat([mean, rstd], -1)  # type: ignore[list-item]  # a LayerNorm has a mean


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Return exp(logits) with columns and rows divided by their sums in turn, rows last, `(*, n, n)`.

    The first division, of the columns, is a softmax, so no exponential overflows. ε is added to its result and to each later sum.
    """
    matrix = torch.softmax(logits, -2) + eps
    matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
    return matrix


def gates(
    kind: int, logits: Tensor, scale: Tensor, base: Tensor, iterations: int, gate_eps: float, magnitude: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return c', A' and b' from the logits and from `base`, `(logits,)`.

        manifold       c = σ(α_1 z + β) + ε     b = m σ(α_2 z + β)        A = Sinkhorn(α_3 Z + β)
        independent    c = σ(α_1 z + β) + ε     b = m σ(α_2 z + β) + ε
        gates          c = σ(α z + β) + ε
        hyper          c = β + α_1 tanh(z)      b = β + α_2 tanh(z)       A = β + α_1 tanh(Z)

    The logits are those of c, of b and of A row by row; of hyper `(*, n, n + 2)`: c_j, b_j and A_1j ... A_nj of each stream j.
    """
    if kind == GATE_KINDS["hyper"]:
        n = logits.shape[-2]
        moves = torch.tanh(logits)
        rest = base[..., 2 * n : n * (n + 2)].unflatten(-1, (n, n))
        return (
            base[..., :n] + scale[0] * moves[..., 0],
            rest + scale[0] * moves[..., 2:].transpose(-1, -2),
            base[..., n : 2 * n] + scale[1] * moves[..., 1],
        )
    if kind == GATE_KINDS["gates"]:
        return torch.sigmoid(logits * scale[0] + base) + gate_eps, None, None
    n = (
        logits.shape[-1] // 2 if kind == GATE_KINDS["independent"] else math.isqrt(logits.shape[-1] + 1) - 1
    )  # of n (n + 2)
    collapse = torch.sigmoid(logits[..., :n] * scale[0] + base[..., :n]) + gate_eps
    inject = magnitude * torch.sigmoid(logits[..., n : 2 * n] * scale[1] + base[..., n : 2 * n])
    if kind == GATE_KINDS["independent"]:
        return collapse, None, inject + gate_eps
    mix = (logits[..., 2 * n :] * scale[2] + base[..., 2 * n :]).unflatten(-1, (n, n))
    return collapse, sinkhorn(mix, iterations, gate_eps), inject


def compute_gates(
    a: Any, streams: Tensor, wide: torch.dtype
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor | None, Tensor | None]]:
    """Return the logits, the statistics of the streams' norm, and c', A' and b' of a call with gates."""
    if a.kind == GATE_KINDS["hyper"]:
        size = sizes_of(a.kind, streams.shape[-2]).logits
        base, each = a.base[:size].to(wide), a.base[size:]
        logits, stats = project_each(streams, a.project, each, a.project_eps, wide)
    else:
        base = a.base.to(wide)
        logits, stats = project(streams, a.project, a.project_eps, wide)
    computed = gates(a.kind, logits, a.scale.to(wide), base, a.iterations, a.gate_eps, a.magnitude)
    if a.kind == GATE_KINDS["hyper"]:
        logits, stats = logits.flatten(-2), stats.flatten(-2)
    return logits, stats, computed


def boundary(a: Any) -> tuple[Tensor | None, ...]:
    """Return the outputs of `add_norm_streams`; None for an output that the call does not have."""
    streams, collapse, wide = a.streams, a.collapse, validation.compute_dtype(a)
    new = y = logits = moments = stats = None
    computed: tuple[Tensor | None, ...] = (None, None, None)
    if a.branch is not None:
        streams = new = write(streams, a.branch, a.mix, a.inject, a.streams_dtype or streams.dtype, wide)
    if a.kind != GATE_KINDS["given"]:
        logits, moments, computed = compute_gates(a, streams, wide)
        collapse = computed[0] if collapse is None else collapse
    if collapse is not None:
        total, out = read(streams, collapse, wide), a.out_dtype or a.streams.dtype
        if a.norm == NORMS["none"]:
            y, stats = total.to(out), total.new_zeros((*total.shape[:-1], 2))
        else:
            y = reference.normalize(total, a.weight, a.bias, norm=BY_CODE[a.norm], eps=a.eps, dtype=out)
            mean, rstd = reference.statistics(total, BY_CODE[a.norm], a.eps)
            stats = torch.cat([mean if isinstance(mean, Tensor) else torch.zeros_like(rstd), rstd], -1)
        stats = stats if moments is None else torch.cat([stats, moments], -1)
    return new, y, *computed, logits, stats
