"""The gradient of the boundary of n streams: the autograd node of eager calls, and the operator's autograd kernel.

Saved for backward: X, w, the coefficients and parameters, the logits and the statistics (n (n + 2) + 3 numbers a token for mHC).
X' is computed again, and so are Sinkhorn's iterates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from addnorm._util.torch_internals import BelowAutograd, exclude_from_capture, in_transform
from addnorm.ops import autograd
from addnorm.ops.schema import arguments_of, kernels_of
from addnorm.ops.streams import eager
from addnorm.ops.streams.schema import GRADIENTS, INPUTS, outputs_of

_ops = torch.ops.addnorm
_TENSORS = 10  # number of tensors among the inputs; they come first
_SUMMANDS = frozenset(("streams", "branch", "mix", "inject"))  # of the new streams
_SHARED = ("mix", "inject", "collapse")
Inputs, Backward = arguments_of("add_norm_streams"), arguments_of("add_norm_streams_backward")


class StreamsFunction(torch.autograd.Function):
    """Autograd node of an eager call, with the operator's arguments and outputs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        """Return the operator's outputs."""
        outputs = without_gradient(*inputs)
        _, _, collapse, _, _, logits, stats = outputs
        ctx.save_for_backward(*inputs[:_TENSORS], logits, stats, collapse)
        ctx.numbers = inputs[_TENSORS:]
        needs = (name for name, need in zip(INPUTS, ctx.needs_input_grad, strict=True) if need)
        is_constant = _SUMMANDS.isdisjoint(needs)
        ctx.mark_non_differentiable(logits, stats, *([outputs[0]] if is_constant else []))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Return the gradients of the operator's arguments."""
        *tensors, logits, stats, computed = ctx.saved_tensors
        a = Inputs(*tensors, *ctx.numbers)
        outer = [  # a compiled graph passes zeros for placeholders
            None if grad is None or output is None else grad.to(output[1])
            for grad, output in zip(grads[:5], outputs_of(a), strict=False)
        ]
        if not any(grad is not None for grad in outer):
            return (None,) * len(INPUTS)
        needs = dict(zip(INPUTS, ctx.needs_input_grad, strict=True))
        mask = sum(1 << bit for bit, name in enumerate(GRADIENTS) if needs[name])
        operator = _ops.add_norm_streams_backward
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # create_graph: torch differentiates the reference's formulas. The node saved logits, statistics and c' without a
            # graph, so they are computed again from the saved inputs. These have the graph of the caller, which a call of
            # `autograd.grad` here would follow.
            _, _, computed, _, _, logits, stats = eager.add_norm_streams(a)
            found = eager.add_norm_streams_backward(Backward(*a, logits, stats, computed, *outer, mask))
        else:
            found = operator(*a, logits, stats, computed, *outer, mask)
        by_name = {name: found[bit] for bit, name in enumerate(GRADIENTS) if needs[name]}
        for name in _SHARED:
            if needs[name]:
                by_name[name] = _sum_rows_to(by_name[name], getattr(a, name))
        return tuple(by_name.get(name) for name in INPUTS)


def _sum_rows_to(grad: Tensor, like: Tensor) -> Tensor:
    """Return the gradient of a coefficient, summed over the tokens if all tokens share its value."""
    rows = tuple(range(grad.dim() - like.dim()))
    return (grad.sum(rows) if rows else grad).to(like.dtype)


def without_gradient(*arguments: Any) -> Any:
    """Call the operator below autograd, where nothing is recorded for a backward."""
    with BelowAutograd():
        return _ops.add_norm_streams(*arguments)


apply: Any = StreamsFunction.apply


def _differentiate(a: Any) -> Any:
    return eager.add_norm_streams(a) if in_transform() else apply(*a)


exclude_from_capture(StreamsFunction.backward)
for _name, _kernel in kernels_of("add_norm_streams", _differentiate, ("",)):
    autograd.register(_name, _kernel)
