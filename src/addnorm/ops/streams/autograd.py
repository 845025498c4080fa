"""The gradient of the boundary of n streams: the autograd node of eager calls, and the same registered on the operator.

Saved for backward: X, w, the coefficients and parameters, the logits and the statistics (n (n + 2) + 3 numbers a token for mHC).
X' is computed again, and so are Sinkhorn's iterates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from addnorm.ops import autograd, capture
from addnorm.ops.schema import library
from addnorm.ops.streams import eager, formula, validation
from addnorm.ops.streams.kinds import sizes_of
from addnorm.ops.streams.schema import GRADIENTS, INPUTS

# Without OpOverload.__call__'s Python frame, as in ops/dispatch.py.
_op = torch.ops.addnorm.add_norm_streams.default
_forward_eager = _op._op
_backward_eager = torch.ops.addnorm.add_norm_streams_backward.default._op
_below_autograd = torch._C._AutoDispatchBelowAutograd
_SHARED = ("mix", "inject", "collapse")


def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    """Save what the backward needs."""
    _, _, collapse, _, _, logits, stats = output
    ctx.save_for_backward(*inputs[:10], logits, stats, collapse)
    ctx.numbers = inputs[10:]
    ctx.has = inputs[1] is not None, inputs[4] is not None or inputs[12] != 0, sizes_of(inputs[12], inputs[0].shape[-2])
    ctx.mark_non_differentiable(logits, stats)
    ctx.set_materialize_grads(False)


def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    """Return the gradients of the operator's arguments."""
    *tensors, logits, stats, computed = ctx.saved_tensors
    a = dict(zip(INPUTS, (*tensors, *ctx.numbers), strict=True))
    writes, reads, sizes = ctx.has
    exists = writes, reads, a["kind"] != 0, sizes.mix, sizes.inject  # a compiled graph passes zeros for placeholders
    outer = [grad if has else None for grad, has in zip(grads, exists, strict=False)]
    if not any(grad is not None for grad in outer):
        return (None,) * len(INPUTS)
    needs = dict(zip(INPUTS, ctx.needs_input_grad, strict=True))
    mask = sum(1 << bit for bit, name in enumerate(GRADIENTS) if needs[name])
    wide = validation.compute_dtype(**a)
    dtypes = a["streams_dtype"] or a["streams"].dtype, a["out_dtype"] or a["streams"].dtype, wide, wide, wide
    outer = [None if grad is None else grad.to(dtype) for grad, dtype in zip(outer, dtypes, strict=True)]
    operator = _backward_eager
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # create_graph: the reference's formulas, which torch differentiates. What the node saved without a graph is
        # computed again from the saved inputs, whose graph is the caller's: no `autograd.grad` here, which would follow it.
        operator = eager.add_norm_streams_backward
        _, _, computed, _, _, logits, stats = eager.add_norm_streams(*a.values())
    found = operator(*a.values(), logits, stats, computed, *outer, mask)
    by_name = {name: found[bit] for bit, name in enumerate(GRADIENTS) if needs[name]}
    for name in _SHARED:
        if needs[name]:
            by_name[name] = _sum_rows_to(by_name[name], a[name])
    return tuple(by_name.get(name) for name in INPUTS)


def _sum_rows_to(grad: Tensor, like: Tensor) -> Tensor:
    """Return the gradient of a coefficient, summed over the tokens if one value serves them all."""
    rows = tuple(range(grad.dim() - like.dim()))
    return (grad.sum(rows) if rows else grad).to(like.dtype)


class StreamsFunction(torch.autograd.Function):
    """Autograd node of an eager call, with the operator's arguments and outputs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        """Return the operator's outputs."""
        output = without_gradient(*inputs)
        setup_context(ctx, inputs, output)
        return output

    backward = staticmethod(backward)


def without_gradient(*arguments: Any) -> Any:
    """Call the operator where no gradient is required."""
    with _below_autograd():
        return _forward_eager(*arguments)


# Function.apply without its Python half, which only detects function transforms; the caller checks for these.
apply = torch._C._FunctionBase.__dict__["apply"].__get__(None, StreamsFunction)
StreamsFunction._backward_cls.apply = backward  # type: ignore[attr-defined]  # the metaclass makes it
autograd.exclude_from_capture(backward)


def _autograd_kernel(keyset: Any, *args: Any) -> Any:
    """Run the operator in a recorded program: with the node of an eager call, or as the formula under a transform."""
    if capture.transforms_active():
        validation.check(**dict(zip(INPUTS, args, strict=True)))
        with torch.autocast(args[0].device.type, enabled=False):
            return formula.boundary(*args)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
        return apply(*args)
    with _below_autograd():
        return _op.redispatch(keyset & torch._C._after_autograd_keyset, *args)


library.impl("add_norm_streams", _autograd_kernel, "Autograd", with_keyset=True)
