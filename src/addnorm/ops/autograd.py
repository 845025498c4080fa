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
from addnorm.ops import compile_mode, eager
from addnorm.ops.schema import ADD_NAMES, NORMS, WANTS

_ops = torch.ops.addnorm
# Without OpOverload.__call__'s Python frame; what Dynamo traces is chosen in compiled.py (as in call.py).
_train_eager, _train_backward_eager = _ops.add_norm_train.default._op, _ops.add_norm_train_backward.default._op
_forward_eager, _backward_eager = _ops.add_norm_forward.default._op, _ops.add_norm_backward.default._op
_NONE = NORMS["none"]
# The numbers that stand for dtypes in a schema (c10::ScalarType): a number is parsed in a tenth of the half microsecond that a
# torch.dtype takes. Dynamo wants the dtypes themselves.
_CODES: dict[torch.dtype, Any] = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}
_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_compiling
_tracing = torch.compiler.is_dynamo_compiling  # cheaper to ask

# The differentiable arguments of add_norm_forward, by their places: in the order of WANTS, and of what backward returns.
PLACES = (0, 1, 2, 3, 7, 9, 10, 11)
_RESIDUAL, _BRANCH, _WEIGHT, _BIAS, _RESIDUAL_SCALE, _ROW_SCALE, _LAYER_SCALE, _BRANCH_BIAS = (
    1 << bit for bit in range(len(WANTS))
)
N_ARGUMENTS = 19  # of add_norm_forward, without `outputs`


class AddNormFunction(torch.autograd.Function):
    """`(y, z)` of the arguments of add_norm_forward; y has no elements where `norm` is "none", z none where branch is None."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        forward = compile_mode.kernel("add_norm_forward", arguments[0]) if _tracing() else _forward_eager
        y, z, stats = forward(*arguments)
        (
            residual, branch, weight, bias, eps, norm, residual_factor, residual_scale, branch_factor, row_scale, layer_scale,
            branch_bias, dropout_p, seed, offset, weight_offset, _, _, _,
        ) = arguments  # fmt: skip
        needs, wants = ctx.needs_input_grad, 0
        for bit, place in enumerate(PLACES):
            if needs[place]:
                wants |= 1 << bit
        scales_branch = wants & (_ROW_SCALE | _LAYER_SCALE)
        ctx.save_for_backward(
            residual if branch is None else z,
            stats,
            weight,
            residual if wants & _RESIDUAL_SCALE else None,
            branch if scales_branch else None,
            residual_scale,
            row_scale,
            layer_scale,
            branch_bias if scales_branch or wants & _BRANCH_BIAS else None,
            seed,
        )
        dtypes = (
            residual.dtype,
            (residual if branch is None else branch).dtype,
            torch.float32 if bias is None else bias.dtype,
        )
        # One gradient serves both where the add is nothing but an add.
        same = (
            branch is not None
            and residual.dtype == branch.dtype
            and residual_factor == branch_factor == 1.0
            and dropout_p == 0.0
            and residual_scale is row_scale is layer_scale is None
        )
        ctx.call = (
            eps, norm, branch is None, same, wants, dtypes, (residual_factor, branch_factor, dropout_p, offset, weight_offset),
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        if not wants & ~(_WEIGHT | _BIAS):
            ctx.mark_non_differentiable(z)  # nothing that was added wants a gradient
        return y, z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, dz = grads
        eps, norm, alone, same, wants, dtypes, numbers = ctx.call
        # What has no elements has no gradient, but a compiled graph sends zeros for it.
        if norm == _NONE:
            dy = None
        if alone:
            dz = None
        found: list[Tensor | None] = [None] * N_ARGUMENTS
        if dy is None:
            if dz is None:
                return tuple(found)
            wants &= ~(_WEIGHT | _BIAS)  # only the stream was used: the norm's parameters were not
        shared = same and wants & _RESIDUAL and wants & _BRANCH
        if shared:
            wants &= ~_BRANCH
        if dy is None and dz is not None and same and not wants & _BRANCH_BIAS and not _grad_enabled():
            found[0 if wants & _RESIDUAL else 1] = dz.to(dtypes[0])  # straight through
            found[1] = found[0] if shared else found[1]
            return tuple(found)
        z, stats, weight, residual, branch, residual_scale, row_scale, layer_scale, branch_bias, seed = (
            ctx.saved_tensors
        )
        residual_factor, branch_factor, dropout_p, offset, weight_offset = numbers
        add = (
            residual_factor, residual_scale, branch_factor, row_scale, layer_scale, branch_bias, dropout_p, seed, offset,
        )  # fmt: skip
        if _grad_enabled() and not _compiling():
            # create_graph: through torch's own operators. Compiled graphs have no second derivative to ask for.
            results = _differentiable(eps, norm, dy, dz, z, weight, dtypes, wants, weight_offset, residual, branch, add)
        else:
            backward = compile_mode.kernel("add_norm_backward", z) if _tracing() else _backward_eager
            told = dtypes if _tracing() else [_CODES.get(dtype, dtype) for dtype in dtypes]
            results = backward(dy, dz, z, stats, weight, norm, *told, wants, weight_offset, residual, branch, *add)
        for bit, place in enumerate(PLACES):
            if wants >> bit & 1:
                found[place] = results[bit]
        if shared:
            found[1] = found[0]
        return tuple(found)


def _differentiable(
    eps: float,
    norm: int,
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor,
    weight: Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    wants: int,
    weight_offset: float,
    residual: Tensor | None,
    branch: Tensor | None,
    add: tuple[Any, ...],
) -> list[Tensor | None]:
    """What the operator computes, in the reference's formulas; in the order of WANTS."""
    stats = None
    if dy is not None:
        stats = reference.statistics(z.to(reference.compute_dtype(z)), eager.norm_kind(norm), eps)
    options = dict(zip(ADD_NAMES, add, strict=True))
    grads = eager.gradients(
        dy, dz, z, stats, weight, norm, weight_offset=weight_offset, residual=residual, branch=branch, **options
    )
    dtype: dict[str, Any] = dict(zip(("residual", "branch", "bias"), dtypes, strict=True))
    dtype |= {name: t.dtype for name, t in options.items() if isinstance(t, Tensor)}
    dtype["weight"] = None if weight is None else weight.dtype
    wanted = (grads[name] if wants >> bit & 1 else None for bit, name in enumerate(WANTS))
    return [None if grad is None else grad.to(dtype[name]) for name, grad in zip(WANTS, wanted, strict=True)]


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
        train = compile_mode.kernel("add_norm_train", residual) if _tracing() else _train_eager
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
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
            ctx.mark_non_differentiable(z)  # nothing that was added wants a gradient
        return y, z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, dz = grads
        residual, branch, weight, bias, _, _ = ctx.needs_input_grad
        eps, rms, dresidual_dtype, branch_dtype, bias_dtype = ctx.call
        # The add's two gradients are one tensor where their dtypes agree.
        shared = residual and branch and dresidual_dtype == branch_dtype
        if dy is None:  # the stream alone was used: its gradient goes straight through
            if dz is None:
                return (None,) * 6
            dresidual = dz.to(dresidual_dtype) if residual else None
            dbranch = dresidual if shared else dz.to(branch_dtype) if branch else None
            return dresidual, dbranch, None, None, None, None
        z, stats, scale = ctx.saved_tensors
        if not branch and dz is not None and dz.shape != z.shape:
            dz = None  # the norm alone: its stream has no elements, but a compiled graph sends zeros for it
        if _grad_enabled() and not _compiling():
            # create_graph: through torch's own operators. Compiled graphs have no second derivative to ask for.
            fresh = reference.statistics(z.to(reference.compute_dtype(z)), "rms" if rms else "layer", eps)
            found = eager.gradients(dy, dz, z, fresh, scale, NORMS["rms" if rms else "layer"])
            dtypes = (dresidual_dtype, branch_dtype, None if scale is None else scale.dtype, bias_dtype)
            wanted = zip(WANTS, ctx.needs_input_grad, dtypes, strict=False)
            return (*(found[name].to(dtype) if need else None for name, need, dtype in wanted), None, None)  # type: ignore[union-attr]  # dy is there, so every gradient is
        wants = residual + 2 * (branch and not shared) + 4 * weight + 8 * bias
        if _tracing():
            backward = compile_mode.kernel("add_norm_train_backward", z)
            found = backward(dy, dz, z, stats, scale, rms, dresidual_dtype, branch_dtype, bias_dtype, wants)
        else:
            codes = _CODES[dresidual_dtype], _CODES[branch_dtype], _CODES[bias_dtype]
            found = _train_backward_eager(dy, dz, z, stats, scale, rms, *codes, wants)
        dresidual, dbranch, dweight, dbias = found
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
full_apply = torch._C._FunctionBase.__dict__["apply"].__get__(None, AddNormFunction)
# And the engine calls `backward` itself, without the two Python frames that find out at every call what is to be called.
for _function in (PlainFunction, AddNormFunction):
    _function._backward_cls.apply = _function.backward  # type: ignore[attr-defined]  # made by the metaclass
