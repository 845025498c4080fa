"""Numbers of the claims that one computation decides, without seeds or training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import addnorm
from addnorm import ResidualStack

EPS = 1e-5


def measure(d: int) -> dict[str, Any]:
    """Return the numbers by name, at this width."""
    results: dict[str, Any] = {}
    torch.manual_seed(0)
    x = torch.randn(4, 32, d)
    linears = [nn.Sequential(nn.Linear(d, d), nn.GELU()) for _ in range(24)]

    detached: list[Any] = [lambda read, f=f: f(read).detach() for f in linears]
    start, cotangent = x.clone().requires_grad_(), torch.randn_like(x)
    (gradient,) = torch.autograd.grad(ResidualStack(detached, d, "pre_ln", final_norm=False)(start), start, cotangent)
    results["bits changed along pre-LN's residual"] = changed(gradient, cotangent)

    with torch.no_grad():
        x_0, writes, x_L, _ = ResidualStack(linears, d, "pre_ln").unroll(x)
        total = x_0.double() + sum(write.double() for write in writes)
        results["closure of pre-LN"] = float((x_L - total).norm() / total.norm())
        for name, wiring in (("pre-LN", "pre_ln"), ("post-LN", "post_ln")):
            after = ResidualStack([torch.zeros_like] * 24, d, wiring, final_norm=False)(3 * x + 1)
            results[f"change by zeros, {name}"] = float((after - (3 * x + 1)).norm() / (3 * x + 1).norm())

    token = F.layer_norm(torch.randn(d, dtype=torch.float64), (d,), eps=0.0)
    results["mean after the norm"] = float(addnorm.layer_norm(token + 3).mean())
    results["variance after the norm"] = {
        f"1e-{k}": float(addnorm.layer_norm(10 ** (-k / 2) * token).var(correction=0)) for k in range(8)
    }
    for name, scale, in_gamma in (
        ("sqrt(var + eps)", 1e-5, EPS), ("sqrt(var), variance 1", 1.0, 0.0), ("sqrt(var), variance 1e-5", 1e-5, 0.0),
    ):  # fmt: skip
        one = 2 + scale**0.5 * token
        results[f"undone, {name}"] = undone(one, one, in_gamma)
    results["undone, two tokens"] = undone(2 + token, 3 * token - 1, EPS)

    rows, norm = torch.randn(256, d), nn.BatchNorm1d(d)
    with torch.no_grad():  # and in training mode: that is when BatchNorm takes its statistics from the batch
        alone = torch.cat([addnorm.layer_norm(row[None]) for row in rows])
        results["tokens changed by their batch, LayerNorm"] = changed(alone, addnorm.layer_norm(rows), rows=True)
        halves = torch.cat([norm(half) for half in rows.chunk(2)])  # BatchNorm refuses a single row
        results["tokens changed by their batch, BatchNorm"] = changed(halves, norm(rows), rows=True)
    results["tokens"] = len(rows)

    constant = torch.full((1, d), 3.0)
    results["numbers not finite with eps"] = int((~addnorm.layer_norm(constant).isfinite()).sum())
    results["numbers not finite without eps"] = int((~F.layer_norm(constant, (d,), eps=0.0).isfinite()).sum())

    wrong = [x[..., :-1], x[:, :-1], x[:-1], x[None], x[:, :1], x[..., :1]]
    results["wrong shapes"], results["wrong shapes refused"] = len(wrong), sum(refused(x, branch) for branch in wrong)
    return results


def changed(one: Tensor, other: Tensor, *, rows: bool = False) -> int:
    """Return how many numbers (or rows) differ in a bit."""
    differ = one.view(torch.int32) != other.view(torch.int32)
    return int((differ.any(-1) if rows else differ).sum())


def undone(known: Tensor, token: Tensor, eps: float) -> float:
    """Return the error of the norm of `token` with gamma and beta that undo the norm of `known`, over the token's spread."""
    gamma, beta = (known.var(correction=0) + eps).sqrt().expand_as(token), known.mean().expand_as(token)
    back = addnorm.layer_norm(token, gamma.contiguous(), beta.contiguous(), EPS)
    return float((back - token).norm() / (token - token.mean()).norm())


def refused(x: Tensor, branch: Tensor) -> bool:
    """Return whether the operation refuses the shapes."""
    try:
        addnorm.add_layer_norm(x, branch)
    except ValueError:
        return True
    return False
