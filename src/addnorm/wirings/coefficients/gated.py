"""Gated residuals: a gate for every feature of every stream, and an autograd function that saves few tensors."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from addnorm._util.arguments import check_bool, check_int, check_not_negative
from addnorm.ops.autocast import disable_autocast
from addnorm.ops.autograd import differentiate, is_any_batched
from addnorm.ops.dtensor import linear
from addnorm.wirings.coefficients.base import (
    CoefficientModule,
    Coefficients,
    Notation,
    rms_scale,
    uses_node,
    widen,
    widen_dtype,
)
from addnorm.wirings.factors import Place


class GatedRead(CoefficientModule):
    """A gate for every feature of every stream, and a gate for the write into each stream.

        X̂_i = R(X_i) ⊙ γ_i      G = σ(W_up silu(W_down vec X̂ / n))      r = mean_i G_i ⊙ X̂_i      b = 2 σ(W_b vec X̂ / n)

    R divides by the root mean square of each stream. At first γ = 1 and the projections are normal with standard deviation 0.02,
    so that G is near 1/2 and b near 1.

    Args:
        rank: rows of W_down.
        injects: whether b is computed; False for the head.
        eps: epsilon of R.

    Source: transformers' Qwen4-Exp; arXiv 2608.30320, equations 30 to 37.
    """

    computes = ("collapse", "inject")
    decays = ("down", "up", "project_inject")
    counterparts: ClassVar = {
        "n": "hc_count", "eps": "hc_norm.eps", "weight": "hc_norm.weight", "down": "input_mix_weight_down.weight",
        "up": "input_mix_weight_up.weight", "project_inject": "block_inject_weight.weight",
    }  # fmt: skip

    def __init__(
        self, d_model: int, n: int, reads: int, place: Place, *, rank: int = 320, injects: bool = True, eps: float = 1e-6,
        **factory: Any,
    ) -> None:  # fmt: skip
        super().__init__(d_model, n, reads, place)
        check_int("rank", rank, 1)
        self.rank, self.eps = rank, check_not_negative("eps", eps)
        check_bool("injects", injects)
        self.weight = self.parameter(n, d_model, **factory)
        self.down, self.up = self.parameter(rank, n * d_model, **factory), self.parameter(n * d_model, rank, **factory)
        self.project_inject = self.parameter(n, n * d_model, **factory) if injects else None
        self.reset_parameters()

    @classmethod
    def find_computed(cls, *, injects: bool = True, **options: Any) -> tuple[str, ...]:
        """Return the names of the coefficients that a module with these options computes; without `injects` there is no b."""
        return cls.computes if injects else ("collapse",)

    def reset_parameters(self) -> None:
        """Set γ to 1 and draw the projections."""
        nn.init.ones_(self.weight)
        for matrix in (self.down, self.up, self.project_inject):
            if matrix is not None:
                nn.init.normal_(matrix, std=0.02)

    def compute(self, streams: Tensor) -> Coefficients:
        """Return C, the gates times the norm's factors, `(*, n, d_model)`, and B `(*, n)`."""
        dtype = widen_dtype(streams.dtype)
        down, up, project = (None if m is None else m.to(dtype) for m in (self.down, self.up, self.project_inject))
        arguments: Any = (streams, self.weight.to(dtype), down, up, project, self.eps)
        compute = _GatesFunction.apply if uses_node(streams) else _compute_gates
        collapse, inject = compute(*arguments)
        return Coefficients(collapse, None, inject)

    @classmethod
    def notate(cls, **options: Any) -> Notation:
        """Return the letters and formulas of the coefficients; with `injects=False` those of the head, without b."""
        injects = options.get("injects", True)
        formulas = ("Y_i = γ_i ⊙ R(X_i)", "G = σ(W_up silu(W_down vec Y / n))", "b = 2 σ(W_b vec Y / n)")
        start = "γ starts at 1, and the matrices are drawn with standard deviation 0.02. So G is nearly 1/2"
        return Notation(
            "G", terms={"collapse": "Σ_i G_i ⊙ Y_i / n"}, formulas=formulas if injects else formulas[:-1],
            learned="γ, W_up, W_down, W_b" * injects, start=f"{start} and b nearly 1." if injects else "",
        )  # fmt: skip

    @torch.no_grad()
    def load_transformers(self, source: Any) -> None:
        """Copy the parameters of a `Qwen4ExpTextGatedResidual`. Its norm's weight is γ - 1, flattened to one row."""
        super().load_transformers(source)
        self.weight.add_(1.0)


def _compute_gates(
    streams: Tensor, weight: Tensor, down: Tensor, up: Tensor, project: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Return C, the gates times the norm's factors, `(*, n, d_model)`, and B `(*, n)`, in the parameters' dtype."""
    x, n = widen(streams), streams.shape[-2]
    factors = rms_scale(x, eps) * weight
    normed = (x * factors).flatten(-2)
    gates = torch.sigmoid(linear(F.silu(linear(normed, down) / n), up)).unflatten(-1, x.shape[-2:])
    inject = None if project is None else 2.0 * torch.sigmoid(linear(normed, project) / n)
    return gates * factors / n, inject


class _GatesFunction(torch.autograd.Function):
    """Autograd function of `_compute_gates`. It saves the streams; the backward normalizes them again."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor | None]:
        down, up, project, ctx.eps = others
        x, n = widen(streams), streams.shape[-2]
        scale = rms_scale(x, ctx.eps)
        factors = scale * weight
        normed = (x * factors).flatten(-2)
        hidden = F.linear(normed, down).div_(n)
        gates = F.linear(F.silu(hidden), up).sigmoid_().unflatten(-1, x.shape[-2:])
        inject = None if project is None else F.linear(normed, project).div_(n).sigmoid_().mul_(2.0)
        ctx.save_for_backward(streams, weight, down, up, project, scale, hidden, gates, inject)
        return factors.mul_(gates).div_(n), inject

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        with disable_autocast(grads[0]):
            return _GatesFunction._compute_gradients(ctx, *grads)

    @staticmethod
    def _compute_gradients(ctx: Any, grad: Tensor, grad_inject: Tensor | None) -> tuple[Tensor | None, ...]:
        streams, weight, down, up, project, scale, hidden, gates, inject = ctx.saved_tensors
        if torch.is_grad_enabled() or is_any_batched((grad, grad_inject)):
            arguments = streams, weight, down, up, project, ctx.eps
            return differentiate(_compute_gates, arguments, ctx.needs_input_grad, (grad, grad_inject))
        n, d = weight.shape
        x, scale, gates, grad = (t.reshape(-1, n, t.shape[-1]) for t in (widen(streams), scale, gates, grad))
        share = weight / n
        by_gate = grad * gates
        grad_scale = torch.stack([by_gate[:, i] @ share[i] for i in range(n)], 1)
        grad_weight = torch.stack([scale[:, i, 0] @ by_gate[:, i] for i in range(n)]).div_(n)
        grad_logits = torch.ops.aten.sigmoid_backward(torch.mul(grad, share).mul_(scale), gates).flatten(1)
        hidden = hidden.reshape(-1, hidden.shape[-1])
        grad_up = grad_logits.mT @ F.silu(hidden)
        grad_hidden = torch.ops.aten.silu_backward(grad_logits @ up, hidden).div_(n)
        centred = x * scale
        normed = torch.mul(centred, weight).flatten(1)
        grad_normed, grad_project = grad_hidden @ down, None
        if project is not None:
            grad_inject = (grad_inject * inject * (1.0 - inject / 2.0)).reshape(-1, n).div_(n)
            grad_project = grad_inject.mT @ normed
            grad_normed.addmm_(grad_inject, project)
        by_feature = grad_normed.unflatten(1, (n, d))
        grad_weight += centred.mul_(by_feature).sum(0)
        grad_x = by_feature.mul_(weight)
        grad_scale += torch.linalg.vecdot(grad_x, x)
        # scale = (mean x^2 + eps)^(-1/2), whose derivative is -scale^3 x / d.
        grad_x.mul_(scale).sub_(x * (grad_scale.unsqueeze(-1) * scale.pow(3) / d))
        grad_x = grad_x.reshape(streams.shape).to(streams.dtype)
        return grad_x, grad_weight, grad_hidden.mT @ normed, grad_up, grad_project, None
