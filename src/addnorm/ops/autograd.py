"""Gradients: one autograd node around the forward and the backward operator.

Saved for backward: the stream z and its statistics (8 bytes a token); the branch only if `layer_scale` or `row_scale` wants
a gradient, the residual only if `residual_scale` does; for dropout, the seed.

The node always returns the stream as its second output, even where the caller drops it: what is saved is then an output,
with its place in the graph, so that a second derivative (taken through the written-out formulas of the reference,
statistics recomputed from z) finds its way back to residual and branch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from addnorm import reference
from addnorm.ops import eager
from addnorm.ops.schema import CASTINGS, NORMS, WANTS

_train = torch.ops.addnorm.add_norm_train.default
_train_backward = torch.ops.addnorm.add_norm_train_backward.default
# Without OpOverload.__call__'s Python frame; Dynamo knows only the overload itself (as in call.py).
_train_eager, _train_backward_eager = _train._op, _train_backward._op
_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_compiling
_tracing = torch.compiler.is_dynamo_compiling  # cheaper to ask

# The differentiable arguments, in order.
INPUTS = ("residual", "branch", "weight", "bias", "residual_scale", "row_scale", "layer_scale", "branch_bias")


class AddNormFunction(torch.autograd.Function):
    """`(y, z)`; y has no elements where `norm` is "none", z none where the branch is None."""

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        branch: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        residual_scale: Tensor | None,
        row_scale: Tensor | None,
        layer_scale: Tensor | None,
        branch_bias: Tensor | None,
        seed: Tensor | None,
        eps: float,
        norm: int,
        residual_factor: float,
        branch_factor: float,
        dropout_p: float,
        offset: int,
        weight_offset: float,
        casting: int,
        stream_dtype: torch.dtype | None,
        out_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        y, z, stats = torch.ops.addnorm.add_norm_forward.default(
            residual,
            branch,
            weight,
            bias,
            eps,
            norm,
            residual_factor=residual_factor,
            residual_scale=residual_scale,
            branch_factor=branch_factor,
            row_scale=row_scale,
            layer_scale=layer_scale,
            branch_bias=branch_bias,
            dropout_p=dropout_p,
            seed=seed,
            offset=offset,
            weight_offset=weight_offset,
            casting=casting,
            stream_dtype=stream_dtype,
            out_dtype=out_dtype,
        )
        needs = dict(zip(INPUTS, ctx.needs_input_grad, strict=False))
        scales_branch = needs["layer_scale"] or needs["row_scale"]
        ctx.save_for_backward(
            residual if branch is None else z,
            stats,
            weight,
            residual if needs["residual_scale"] else None,
            branch if scales_branch else None,
            residual_scale,
            row_scale,
            layer_scale,
            branch_bias if dropout_p > 0.0 or scales_branch or needs["branch_bias"] else None,
            seed,
        )
        ctx.needs = needs
        ctx.eps, ctx.norm = eps, norm
        ctx.options = {
            "residual_factor": residual_factor,
            "branch_factor": branch_factor,
            "dropout_p": dropout_p,
            "offset": offset,
            "weight_offset": weight_offset,
        }
        ctx.dtypes = (residual.dtype, None if branch is None else branch.dtype, None if bias is None else bias.dtype)
        # One gradient serves both where the add is nothing but an add.
        ctx.shared = (
            branch is not None
            and residual.dtype == branch.dtype
            and residual_factor == branch_factor == 1.0
            and dropout_p == 0.0
            and residual_scale is row_scale is layer_scale is None
        )
        ctx.set_materialize_grads(False)
        return y, z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, dz = grads
        # What has no elements has no gradient, but a compiled graph sends zeros for it.
        if ctx.norm == NORMS["none"]:
            dy = None
        if ctx.dtypes[1] is None:
            dz = None
        if dy is None and dz is None:
            return (None,) * 19
        z, stats, weight, residual, branch, residual_scale, row_scale, layer_scale, branch_bias, seed = (
            ctx.saved_tensors
        )
        options = {
            **ctx.options,
            "residual": residual,
            "branch": branch,
            "residual_scale": residual_scale,
            "row_scale": row_scale,
            "layer_scale": layer_scale,
            "branch_bias": branch_bias,
            "seed": seed,
        }
        needs = dict(ctx.needs)
        if dy is None:  # only the stream was used: the norm's parameters were not
            needs["weight"] = needs["bias"] = False
        shared = ctx.shared and needs["residual"] and needs["branch"]
        if shared:
            needs["branch"] = False
        # create_graph: through torch's own operators. Compiled graphs have no second derivative to ask for.
        if _grad_enabled() and not _compiling():
            found = _differentiable(ctx, dy, dz, z, weight, options, needs)
        elif dy is None and ctx.shared and dz is not None and not needs["branch_bias"]:
            wanted = dz.to(ctx.dtypes[0]) if needs["residual"] or needs["branch"] else None
            found = dict.fromkeys(("residual", "branch"), wanted)
        else:
            found = _fused(ctx, dy, dz, z, stats, weight, options, needs)
        if shared:
            found["branch"] = found["residual"]
        return (*(found.get(name) for name in INPUTS), *(None,) * 11)


def _fused(
    ctx: Any,
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    options: dict[str, Any],
    needs: dict[str, bool],
) -> dict[str, Tensor | None]:
    residual_dtype, branch_dtype, bias_dtype = ctx.dtypes
    grads = torch.ops.addnorm.add_norm_backward.default(
        dy,
        dz,
        z,
        stats,
        weight,
        ctx.norm,
        **options,
        residual_dtype=residual_dtype,
        branch_dtype=branch_dtype or residual_dtype,
        bias_dtype=bias_dtype or torch.float32,
        wants=sum(1 << bit for bit, name in enumerate(WANTS) if needs[name]),
    )
    return {name: grad for name, grad in zip(WANTS, grads, strict=True) if needs[name]}


def _differentiable(
    ctx: Any,
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor,
    weight: Tensor | None,
    options: dict[str, Any],
    needs: dict[str, bool],
) -> dict[str, Tensor | None]:
    stats = None
    if dy is not None:
        stats = reference.statistics(z.to(reference.compute_dtype(z)), eager.norm_kind(ctx.norm), ctx.eps)
    grads = eager.gradients(dy, dz, z, stats, weight, ctx.norm, **options)
    residual_dtype, branch_dtype, bias_dtype = ctx.dtypes
    dtypes = {"residual": residual_dtype, "branch": branch_dtype, "bias": bias_dtype}
    dtypes["weight"] = None if weight is None else weight.dtype
    dtypes |= {name: options[name].dtype for name in INPUTS[4:] if options[name] is not None}
    found: dict[str, Tensor | None] = {}
    for name in INPUTS:
        grad = grads[name]
        found[name] = grad.to(dtypes[name]) if needs[name] and grad is not None else None
    return found


class PlainFunction(torch.autograd.Function):
    """The same for a call without options, with as little Python as will do: `(y, z)`."""

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        branch: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        rms: bool,
    ) -> tuple[Tensor, Tensor]:
        train = _train if _tracing() else _train_eager
        y, z, stats = train(residual, branch, weight, bias, eps, rms)
        ctx.save_for_backward(residual if branch is None else z, stats, weight)
        ctx.set_materialize_grads(False)
        ctx.call = (
            eps,
            rms,
            residual.dtype,
            residual.dtype if branch is None else branch.dtype,
            torch.float32 if bias is None else bias.dtype,
        )
        return y, z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, dz = grads
        residual, branch, weight, bias, _, _ = ctx.needs_input_grad
        eps, rms, residual_dtype, branch_dtype, bias_dtype = ctx.call
        # The add's two gradients are one tensor where their dtypes agree.
        shared = residual and branch and residual_dtype == branch_dtype
        if dy is None:  # the stream alone was used: its gradient goes straight through
            if dz is None:
                return (None,) * 6
            dresidual = dz.to(residual_dtype) if residual else None
            dbranch = dresidual if shared else dz.to(branch_dtype) if branch else None
            return dresidual, dbranch, None, None, None, None
        z, stats, scale = ctx.saved_tensors
        if not branch and dz is not None and dz.shape != z.shape:
            dz = None  # the norm alone: its stream has no elements, but a compiled graph sends zeros for it
        if _grad_enabled() and not _compiling():
            # create_graph: through torch's own operators. Compiled graphs have no second derivative to ask for.
            fresh = reference.statistics(z.to(reference.compute_dtype(z)), "rms" if rms else "layer", eps)
            found = eager.gradients(dy, dz, z, fresh, scale, NORMS["rms" if rms else "layer"])
            dtypes = (residual_dtype, branch_dtype, None if scale is None else scale.dtype, bias_dtype)
            wanted = zip(INPUTS, ctx.needs_input_grad, dtypes, strict=False)
            return (*(found[name].to(dtype) if need else None for name, need, dtype in wanted), None, None)  # type: ignore[union-attr]  # dy is there, so every gradient is
        wants = residual + 2 * (branch and not shared) + 4 * weight + 8 * bias
        backward = _train_backward if _tracing() else _train_backward_eager
        dresidual, dbranch, dweight, dbias = backward(
            dy, dz, z, stats, scale, rms, residual_dtype, branch_dtype, bias_dtype, wants
        )
        return (
            dresidual if residual else None,
            dresidual if shared else dbranch if branch else None,
            dweight if weight else None,
            dbias if bias else None,
            None,
            None,
        )


# Function.apply without its Python half, which only tells function transforms apart: for callers that have done so.
plain_apply = torch._C._FunctionBase.__dict__["apply"].__get__(None, PlainFunction)


def apply(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: int,
    *,
    residual_factor: float = 1.0,
    residual_scale: Tensor | None = None,
    branch_factor: float = 1.0,
    row_scale: Tensor | None = None,
    layer_scale: Tensor | None = None,
    branch_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
    weight_offset: float = 0.0,
    casting: int = CASTINGS["float32"],
    stream_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`(y, z)` with a gradient for every tensor that wants one."""
    return AddNormFunction.apply(  # type: ignore[no-any-return, no-untyped-call]  # torch does not type apply
        residual, branch, weight, bias, residual_scale, row_scale, layer_scale, branch_bias, seed, eps, norm,
        residual_factor, branch_factor, dropout_p, offset, weight_offset, casting, stream_dtype, out_dtype,
    )  # fmt: skip
