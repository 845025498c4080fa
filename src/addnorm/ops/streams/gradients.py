"""The gradients of the boundary of n streams in torch's own operators: the reference of the backward kernels."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from addnorm import reference
from addnorm._util.norms import BY_CODE
from addnorm.ops.options import NORMS
from addnorm.ops.streams import formula
from addnorm.ops.streams.kinds import GATE_KINDS, sizes_of


def gradients(a: Any, wide: torch.dtype) -> dict[str, Tensor | None]:
    """Return the gradients by name for the arguments of the backward operator; A, b and c have one for each token."""
    streams, branch, mix, inject = a.streams, a.branch, a.mix, a.inject
    new = streams
    if branch is not None:
        new = formula.write(streams, branch, mix, inject, a.streams_dtype or streams.dtype, wide)
    x = new.to(wide)
    g = torch.zeros_like(x) if a.dnew is None else a.dnew.to(wide)
    grads: dict[str, Tensor | None] = {}
    dcollapse = a.dcollapse
    if a.dread is not None:
        used = a.computed_collapse if a.collapse is None else a.collapse
        per_feature = used.dim() == streams.dim()
        c = used.to(wide) if per_feature else used.to(wide).unsqueeze(-1)
        du = a.dread.to(wide)
        if a.norm != NORMS["none"]:
            stats = reference.Statistics(a.stats[..., :1], a.stats[..., 1:2])
            total = formula.read(new, used, wide)
            normed = reference.normalize_backward(du, total, a.weight, stats, norm=BY_CODE[a.norm])
            du, grads["weight"], grads["bias"] = normed
        g = g + c * du.unsqueeze(-2)
        product = x * du.unsqueeze(-2)
        found = product if per_feature else product.sum(-1)
        if a.collapse is not None:
            grads["collapse"] = found
        else:
            dcollapse = found if dcollapse is None else dcollapse.to(wide) + found
    if a.kind != GATE_KINDS["given"]:
        pre, dlogits = gates_backward(a, dcollapse, wide)
        grads["scale"], grads["base"] = parameters_backward(a, pre)
        weight = a.project.to(wide)
        saved = a.stats[..., 2:].to(wide)
        if a.kind == GATE_KINDS["hyper"]:
            mean, rstd = saved.unflatten(-1, (-1, 2)).split(1, -1)
            centred = (x - mean) * rstd
            back = dlogits @ weight
            dot = (back * centred).mean(-1, keepdim=True)
            g = g + rstd * (back - back.mean(-1, keepdim=True) - centred * dot)
            grads["project"] = _outer(dlogits, centred)
        else:
            flat, logits = x.flatten(-2), a.logits.to(wide)
            back = (dlogits * saved) @ weight
            back = back - saved.square() * (dlogits * logits).sum(-1, keepdim=True) / flat.shape[-1] * flat
            g = g + back.reshape(x.shape)
            grads["project"] = _outer(dlogits * saved, flat)
    grads["streams"] = g if mix is None else mix.to(wide).mT @ g
    if branch is not None:
        grads |= {
            "branch": (inject.to(wide).unsqueeze(-1) * g).sum(-2),
            "mix": g @ streams.to(wide).mT,
            "inject": (g * branch.to(wide).unsqueeze(-2)).sum(-1),
        }
    return grads


def gates_backward(a: Any, dcollapse: Tensor | None, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the gradients of the gates' arguments α z + β (for kind hyper, of the coefficients), and of the logits z.

    The gradient of the logits has the shape of the logits that `formula.gates` takes.
    """
    kind, logits, scale = a.kind, a.logits.to(wide), a.scale.to(wide)
    *tokens, n = a.streams.shape[:-1]
    sizes = sizes_of(kind, n)
    outer = [(dcollapse, n), *[(a.dinject, n)] * sizes.inject, *[(a.dmix, n * n)] * sizes.mix]
    parts = [
        logits.new_zeros((*tokens, width)) if t is None else t.to(wide).reshape(*tokens, width) for t, width in outer
    ]
    if kind == GATE_KINDS["hyper"]:
        moves = logits.unflatten(-1, (n, n + 2))
        slope = 1.0 - torch.tanh(moves).square()
        factors = [scale[0] * slope[..., 0], scale[1] * slope[..., 1]]
        rest = (parts[2].reshape(*tokens, n, n) * scale[0]).transpose(-1, -2) * slope[..., 2:]
        front = [part * factor for part, factor in zip(parts, factors, strict=False)]
        return torch.cat(parts, -1), torch.cat([torch.stack(front, -1), rest], -1)
    widths = [width for _, width in outer]
    results = []
    arguments = zip(logits.split(widths, -1), scale, a.base.to(wide).split(widths), parts, strict=True)
    for place, (z, alpha, beta, part) in enumerate(arguments):
        pre = z * alpha + beta
        if place < 2:
            gate = torch.sigmoid(pre)
            results.append(part * (1.0, a.magnitude)[place] * gate * (1.0 - gate))
        else:
            # A batch of gradients (`is_grads_batched`) has no rule for unflatten.
            matrix, square = (x.reshape(*tokens, n, n) for x in (pre, part))
            results.append(_sinkhorn_backward(matrix, square, a.iterations, a.gate_eps).reshape(part.shape))
    back = [gradient * alpha for gradient, alpha in zip(results, scale, strict=True)]
    return torch.cat(results, -1), torch.cat(back, -1)


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """Return the sum over all tokens of the outer products of `(*, r)` and `(*, d)`: `(r, d)`."""
    return left.reshape(-1, left.shape[-1]).mT @ right.reshape(-1, right.shape[-1])


def parameters_backward(a: Any, pre: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `scale` (α) and `base` (β) from `pre`, the first result of `gates_backward`."""
    kind, scale, logits, n = a.kind, a.scale, a.logits, a.streams.shape[-2]
    if kind == GATE_KINDS["hyper"]:
        moves = torch.tanh(logits.unflatten(-1, (n, n + 2)))
        tokens = pre.shape[:-1]
        front, rest = (
            pre[..., : 2 * n].reshape(*tokens, 2, n),
            pre[..., 2 * n :].reshape(*tokens, n, n).transpose(-1, -2),
        )
        grads = torch.cat([front.transpose(-1, -2), rest], -1)  # (*, n, n + 2), as the logits
        each = reference.sum_rows(grads * moves)
        dscale = torch.stack([each[0] + each[2:].sum(), each[1]])
        alphas = torch.cat([scale[:2], scale[:1].expand(n)]).to(pre.dtype)
        added = reference.sum_rows(grads * alphas * (1.0 - moves.square()))
        return dscale, torch.cat([reference.sum_rows(pre), added])
    products = reference.sum_rows(pre * logits)
    bounds = [0, n, 2 * n, n * (n + 2)][: scale.shape[0] + 1]
    dscale = torch.stack([products[i:j].sum() for i, j in itertools.pairwise(bounds)])
    return dscale, reference.sum_rows(pre)


def _sinkhorn_backward(logits: Tensor, gradient: Tensor, iterations: int, eps: float) -> Tensor:
    """Return the gradient of the logits of `formula.sinkhorn` from that of its result."""
    matrix, steps = torch.softmax(logits, -2) + eps, []
    first = matrix
    for i in range(2 * iterations - 1):
        axis = -1 if i % 2 == 0 else -2
        total = matrix.sum(axis, keepdim=True) + eps
        matrix = matrix / total
        steps.append((matrix, total, axis))
    for matrix, total, axis in reversed(steps):
        gradient = (gradient - (gradient * matrix).sum(axis, keepdim=True)) / total
    share = first - eps
    return share * (gradient - (gradient * share).sum(-2, keepdim=True))
