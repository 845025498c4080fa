"""Gradients: one autograd node around the forward and the backward operator.

Saved for backward: z, or y in `save_outputs`, and the statistics (8 bytes a token); the branch only if an option that scales it
requires a gradient, the residual only if residual_scale does; for dropout, the seed.

The node always returns z as its second output, even where the caller drops it. The saved z is then an output with its place in
the autograd graph, so that a second derivative (through the formulas of `reference.py`, with statistics recomputed from z)
reaches residual and branch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from addnorm import reference
from addnorm.ops import eager, save_outputs
from addnorm.ops.options import ADD_OPTIONS, GRADIENTS, NORMS, norm_number
from addnorm.ops.schema import ADD_ARGUMENTS, ADD_NAMES, ForwardArguments

_ops = torch.ops.addnorm
# Without OpOverload.__call__'s Python frame, as in dispatch.py.
_train_eager, _train_backward_eager = _ops.add_norm_train.kernel._op, _ops.add_norm_train_backward.default._op
_forward_eager, _backward_eager = _ops.add_norm_forward.kernel._op, _ops.add_norm_backward.default._op
_NONE = NORMS["none"]
# The numbers of the dtypes in a schema (c10::ScalarType): a number is parsed in a tenth of the half microsecond that a
# torch.dtype takes.
_CODES: dict[torch.dtype, Any] = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}
_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_compiling

# Indices of the differentiable arguments of add_norm_forward, in the order of GRADIENTS.
PLACES = tuple(ForwardArguments._fields.index(name) for name in GRADIENTS)
_BITS = {name: 1 << bit for bit, name in enumerate(GRADIENTS)}
_RESIDUAL, _BRANCH, _WEIGHT, _BIAS = (_BITS[name] for name in GRADIENTS[:4])
# Options whose gradient is computed from residual, from the branch, or from the branch without being a factor.
_NEEDS_RESIDUAL = sum(_BITS[option.name] for option in ADD_OPTIONS if option.gradient == "residual")
_NEEDS_BRANCH = sum(_BITS[option.name] for option in ADD_OPTIONS if option.gradient == "branch")
_ADDITIVE = sum(_BITS[option.name] for option in ADD_OPTIONS if option.additive)
# Arguments of the options before the norm: indices of the first and of the end. Counted from the first: indices of the tensors,
# of the options that are only added, and of the scales and factors that must have their defaults in a plain add.
_FIRST = ForwardArguments._fields.index(ADD_NAMES[0])
_END = _FIRST + len(ADD_NAMES)
_WEIGHT_OFFSET = ForwardArguments._fields.index("weight_offset")
_TENSORS = tuple(place for place, argument in enumerate(ADD_ARGUMENTS) if argument.type == "Tensor?")
_ADDED = tuple(ADD_NAMES.index(option.name) for option in ADD_OPTIONS if option.additive)
_SCALES = tuple(place for place in _TENSORS if place not in _ADDED and ADD_NAMES[place] != "seed")
_FACTORS = tuple(
    (place, float(argument.default)) for place, argument in enumerate(ADD_ARGUMENTS) if argument.type == "float"
)


def _is_plain_add(add: Any) -> bool:
    """Return whether the options leave the gradients of residual and branch equal to that of z."""
    return not any(add[place] is not None for place in _SCALES) and all(
        add[place] == default for place, default in _FACTORS
    )


class AddNormFunction(torch.autograd.Function):
    """Autograd node of add_norm_forward: `(y, z)` of its arguments without `outputs`.

    y is an empty placeholder where `norm` is "none", z where branch is None.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        y, z, stats = _forward_eager(*arguments)
        residual, branch, weight, bias, eps, norm = arguments[:_FIRST]
        add = list(arguments[_FIRST:_END])
        needs, grad_mask = ctx.needs_input_grad, 0
        for bit, place in enumerate(PLACES):
            if needs[place]:
                grad_mask |= 1 << bit
        # One tensor is the gradient of residual and of branch where the add is a plain one.
        shared = branch is not None and residual.dtype == branch.dtype and _is_plain_add(add)
        if not grad_mask & (_NEEDS_BRANCH | _ADDITIVE):
            for place in _ADDED:  # no gradient depends on it, and the kernels are faster without it
                add[place] = None
        weight_offset = arguments[_WEIGHT_OFFSET]
        z_dtype = None  # of the z that backward computes from y
        if branch is not None and norm != _NONE and save_outputs.is_active():
            save_outputs.check_weight(weight, bias, weight_offset)
            z_dtype = z.dtype
        ctx.save_for_backward(
            residual if branch is None else z if z_dtype is None else y,
            stats if z_dtype is None else save_outputs.mark(stats),
            weight,
            None if z_dtype is None else bias,
            residual if grad_mask & _NEEDS_RESIDUAL else None,
            branch if grad_mask & _NEEDS_BRANCH else None,
            *[add[place] for place in _TENSORS],
        )
        for place in _TENSORS:
            add[place] = None
        dtypes = (
            residual.dtype,
            (residual if branch is None else branch).dtype,
            torch.float32 if bias is None else bias.dtype,
        )
        ctx.call = eps, norm, branch is None, shared, grad_mask, dtypes, add, weight_offset, z_dtype
        ctx.set_materialize_grads(False)
        if not grad_mask & ~(_WEIGHT | _BIAS):
            ctx.mark_non_differentiable(z)  # no summand requires a gradient
        return y, z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, dz = grads
        eps, norm, norm_only, shared, grad_mask, dtypes, add, weight_offset, z_dtype = ctx.call
        # A placeholder has no gradient, but a compiled graph passes zeros for it.
        if norm == _NONE:
            dy = None
        if norm_only:
            dz = None
        results: list[Tensor | None] = [None] * len(ForwardArguments._fields)
        if dy is None:
            if dz is None:
                return tuple(results)
            grad_mask &= ~(_WEIGHT | _BIAS)  # only z was used, not the norm's parameters
        pass_to_both = shared and grad_mask & _RESIDUAL and grad_mask & _BRANCH
        if pass_to_both:
            grad_mask &= ~_BRANCH
        if dy is None and dz is not None and shared and not grad_mask & _ADDITIVE and not _grad_enabled():
            results[0 if grad_mask & _RESIDUAL else 1] = dz.to(dtypes[0])  # the gradient of z, unchanged
            results[1] = results[0] if pass_to_both else results[1]
            return tuple(results)
        z, stats, weight, bias, residual, branch, *tensors = ctx.saved_tensors
        if z_dtype is not None:
            z, stats = save_outputs.rebuild(z, stats, weight, bias, z_dtype, weight_offset)
        add = list(add)
        for place, tensor in zip(_TENSORS, tensors, strict=True):
            add[place] = tensor
        if _grad_enabled() and not _compiling():
            # create_graph: through torch's own operators. A compiled graph has no second derivative.
            input_grads = _differentiable(
                eps, norm, dy, dz, z, weight, dtypes, grad_mask, weight_offset, residual, branch, add
            )
        else:
            codes = [_CODES.get(dtype, dtype) for dtype in dtypes]
            input_grads = _backward_eager(
                dy, dz, z, stats, weight, norm, *codes, grad_mask, weight_offset, residual, branch, *add
            )
        for bit, place in enumerate(PLACES):
            if grad_mask >> bit & 1:
                results[place] = input_grads[bit]
        if pass_to_both:
            results[1] = results[0]
        return tuple(results)


def _differentiable(
    eps: float,
    norm: int,
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor,
    weight: Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    grad_mask: int,
    weight_offset: float,
    residual: Tensor | None,
    branch: Tensor | None,
    add: list[Any],
) -> list[Tensor | None]:
    """Compute the backward operator's results in the reference's formulas, in the order of GRADIENTS."""
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
    requested = (grads[name] if grad_mask >> bit & 1 else None for bit, name in enumerate(GRADIENTS))
    return [None if grad is None else grad.to(dtype[name]) for name, grad in zip(GRADIENTS, requested, strict=True)]


class FastFunction(torch.autograd.Function):
    """Autograd node of a call without options, with outputs `(y, z)` and as little Python as possible."""

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
        y, z, stats = _train_eager(residual, branch, weight, bias, eps, rms)
        z_dtype = None  # of the z that backward computes from y
        if branch is None:
            ctx.save_for_backward(residual, stats, weight)
        elif not save_outputs.is_active():
            ctx.save_for_backward(z, stats, weight)
        else:
            save_outputs.check_weight(weight, bias)
            ctx.save_for_backward(y, save_outputs.mark(stats), weight, bias)
            z_dtype = z.dtype
        ctx.set_materialize_grads(False)
        ctx.call = (
            z_dtype,
            eps,
            rms,
            residual.dtype,
            residual.dtype if branch is None else branch.dtype,
            torch.float32 if bias is None else bias.dtype,
        )
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
            ctx.mark_non_differentiable(z)  # no summand requires a gradient
        return y, z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, dz = grads
        needs_residual, needs_branch, needs_weight, needs_bias, _, _ = ctx.needs_input_grad
        z_dtype, eps, rms, dresidual_dtype, branch_dtype, bias_dtype = ctx.call
        # One tensor is the gradient of residual and of branch where their dtypes agree.
        shared = needs_residual and needs_branch and dresidual_dtype == branch_dtype
        if dy is None:  # only z was used: its gradient is passed on unchanged
            if dz is None:
                return (None,) * 6
            dresidual = dz.to(dresidual_dtype) if needs_residual else None
            dbranch = dresidual if shared else dz.to(branch_dtype) if needs_branch else None
            return dresidual, dbranch, None, None, None, None
        z, stats, weight, *bias = ctx.saved_tensors
        if z_dtype is not None:
            z, stats = save_outputs.rebuild(z, stats, weight, bias[0] if bias else None, z_dtype)
        if not needs_branch and dz is not None and dz.shape != z.shape:
            dz = None  # the norm alone: z is a placeholder, but a compiled graph passes zeros for it
        if _grad_enabled() and not _compiling():
            # create_graph: through torch's own operators. A compiled graph has no second derivative.
            recomputed = reference.statistics(z.to(reference.compute_dtype(z)), "rms" if rms else "layer", eps)
            input_grads = eager.gradients(dy, dz, z, recomputed, weight, norm_number(rms))
            dtypes = (dresidual_dtype, branch_dtype, None if weight is None else weight.dtype, bias_dtype)
            requested = zip(GRADIENTS, ctx.needs_input_grad, dtypes, strict=False)
            return (*(input_grads[name].to(dtype) if need else None for name, need, dtype in requested), None, None)  # type: ignore[union-attr]  # every gradient exists, since dy does
        grad_mask = needs_residual + 2 * (needs_branch and not shared) + 4 * needs_weight + 8 * needs_bias
        codes = _CODES[dresidual_dtype], _CODES[branch_dtype], _CODES[bias_dtype]
        dresidual, dbranch, dweight, dbias = _train_backward_eager(dy, dz, z, stats, weight, rms, *codes, grad_mask)
        return (
            dresidual if needs_residual else None,
            dresidual if shared else dbranch if needs_branch else None,
            dweight if needs_weight else None,
            dbias if needs_bias else None,
            None,
            None,
        )


# Function.apply without its Python half, which only detects function transforms; the callers check for these.
fast_apply = torch._C._FunctionBase.__dict__["apply"].__get__(None, FastFunction)
full_apply = torch._C._FunctionBase.__dict__["apply"].__get__(None, AddNormFunction)
# The engine calls `backward` directly, without the two Python frames that look it up at every call.
for _function in (FastFunction, AddNormFunction):
    _function._backward_cls.apply = _function.backward  # type: ignore[attr-defined]  # the metaclass makes it


def exclude_from_capture(*functions: Any) -> None:
    """Exclude functions, and what they call, from capture by torch.compile's frontend.

    A backward that runs between two graphs of a compiled model, as where a model returns gradients, would be captured as if it
    were compiled, and a compiled backward has no second derivative.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:  # a torch without it
        return
    for function in functions:
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


exclude_from_capture(FastFunction.backward, AddNormFunction.backward)
