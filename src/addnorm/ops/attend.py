"""Attention over sources as operators: the reads of attention residuals.

    s_rj = q_r · (γ x_j) f_j      f_j = 1 / rms(x_j)      p_r = softmax_j(s_rj)      read_r = sum over j of p_rj x_j

The sources x_j are the states that a sublayer reads. `weight` is γ; None: ones. With `normed_values` the read is the sum of
p_rj f_j x_j. Each query q_r has a read, in float32 or float64. The only tensors as wide as a source that are saved for backward
are the sources themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from addnorm._util.torch_internals import BelowAutograd, exclude_from_capture, in_transform
from addnorm.ops import autograd, compile_mode
from addnorm.ops.dtensor import linear
from addnorm.ops.schema import Kernel, declare, kernels_of, library, register_fakes
from addnorm.reference import compute_dtype

# All results are one list: `torch_call_dispatcher`, by which the kernels call the references, mixes up results of several types.
SCHEMAS = {
    "attend_sources": "(Tensor[] sources, Tensor query, Tensor? weight, float eps, bool normed_values) -> Tensor[]",
    "attend_sources_backward": (
        "(Tensor[] sources, Tensor query, Tensor? weight, Tensor scores, Tensor factors, Tensor[] grads, bool normed_values) "
        "-> Tensor[]"
    ),
}
DEFINITIONS = declare(SCHEMAS)
_ops = torch.ops.addnorm


def compute_scores(
    sources: Sequence[Tensor], query: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the attention scores of the sources, `(*, reads, n)`, and 1 / rms of each source, `(*, n)`."""
    query = query if weight is None else query * weight
    wide = [x.to(compute_dtype(x)) for x in sources]
    factors = torch.rsqrt(torch.stack([x.square().mean(-1) for x in wide], -1) + eps)
    return torch.stack([linear(x, query) for x in wide], -1) * factors.unsqueeze(-2), factors


def compute_weights(scores: Tensor, factors: Tensor, normed_values: bool) -> Tensor:
    """Return the factor of each source in each read, `(*, reads, n)`: p, or with `normed_values` p / rms."""
    weights = torch.softmax(scores, -1)
    return weights * factors.unsqueeze(-2) if normed_values else weights


def formula(
    sources: Sequence[Tensor], query: Tensor, weight: Tensor | None, eps: float, normed_values: bool
) -> list[Tensor]:
    """Return the results of `attend_sources` in torch's operators: the reads, the scores, 1 / rms of the sources."""
    scores, factors = compute_scores(sources, query, weight, eps)
    reads = []
    for row in compute_weights(scores, factors, normed_values).unbind(-2):
        terms = [w.unsqueeze(-1) * x.to(w.dtype) for w, x in zip(row.unbind(-1), sources, strict=True)]
        reads.append(sum(terms[1:], terms[0]))
    return [*reads, scores, factors]


def _attend_sources(a: Any) -> list[Tensor]:
    with torch.autocast(a.query.device.type, enabled=False):
        return formula(*a)


def _attend_sources_backward(a: Any) -> list[Tensor]:
    """Return the gradients of the query, of the weight if there is one, and of the sources; the derivative of f is -f^3 x / d."""
    (reads, d), scores, factors = a.query.shape, a.scores, a.factors
    with torch.autocast(a.query.device.type, enabled=False):
        query = a.query if a.weight is None else a.query * a.weight
        wide = [x.to(scores.dtype) for x in a.sources]
        weights = torch.softmax(scores, -1)
        by_weight = torch.stack([torch.stack([(grad * x).sum(-1) for x in wide], -1) for grad in a.grads], -2)
        values = weights
        if a.normed_values:
            by_weight, values = by_weight * factors.unsqueeze(-2), weights * factors.unsqueeze(-2)
        terms = weights * by_weight
        by_score = terms - weights * terms.sum(-1, keepdim=True)
        shares = by_score * scores
        if a.normed_values:
            shares = shares + terms
        shares = shares.sum(-2) * factors.square() / -d
        products = by_score * factors.unsqueeze(-2)  # the gradient of q · x
        found, grad_query = [], torch.zeros_like(a.query)
        for j, x in enumerate(wide):
            product = products[..., j]
            grad_query.addmm_(product.reshape(-1, reads).mT, x.reshape(-1, d))
            outer = product * query if reads == 1 else product @ query  # a product of matrices is slower for one read
            total = torch.addcmul(outer, x, shares[..., j, None])
            for r, grad in enumerate(a.grads):
                total.addcmul_(grad, values[..., r, j, None])
            found.append(total.to(a.sources[j].dtype))
    if a.weight is None:
        return [grad_query, *found]
    return [grad_query * a.weight, (grad_query * a.query).sum(0), *found]


class AttendFunction(torch.autograd.Function):
    """Autograd node of `attend_sources`, among whose outputs only the reads have a gradient.

    The only tensors as wide as a source that it saves are the sources themselves.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, weight: Tensor | None, eps: float, normed_values: bool, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the reads, the scores, and 1 / rms of the sources."""
        with BelowAutograd():
            outputs = _ops.attend_sources(sources, query, weight, eps, normed_values)
        ctx.eps, ctx.normed_values = eps, normed_values
        ctx.save_for_backward(query, weight, *outputs[-2:], *sources)
        ctx.mark_non_differentiable(*outputs[-2:])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments of `forward`; None for those that are no tensors."""
        query, weight, scores, factors, *sources = ctx.saved_tensors
        of_reads = [torch.zeros_like(sources[0], dtype=query.dtype) if g is None else g for g in grads[:-2]]
        create_graph = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if create_graph or autograd.is_any_batched(grads):
            arguments = query, weight, ctx.eps, ctx.normed_values, *sources
            return autograd.differentiate(reads_of, arguments, ctx.needs_input_grad, of_reads)
        operator = _ops.attend_sources_backward
        found = operator(sources, query, weight, scores, factors, of_reads, ctx.normed_values)
        grad_weight = None if weight is None else found.pop(1)
        return found[0], grad_weight, None, None, *found[1:]


def reads_of(
    query: Tensor, weight: Tensor | None, eps: float, normed_values: bool, *sources: Tensor
) -> tuple[Tensor, ...]:
    """Return the reads in torch's operators."""
    return tuple(formula(sources, query, weight, eps, normed_values)[:-2])


def read(
    sources: Sequence[Tensor], query: Tensor, weight: Tensor | None, eps: float, normed_values: bool
) -> tuple[Tensor, ...]:
    """Return the reads by one operator, also in a graph that torch.compile traces."""
    if torch.compiler.is_compiling():
        return tuple(_ops.attend_sources(sources, query, weight, eps, normed_values)[:-2])
    return AttendFunction.apply(query, weight, eps, normed_values, *sources)[:-2]  # type: ignore[no-any-return, no-untyped-call]


def is_in_graph(sources: Sequence[Tensor]) -> bool:
    """Return whether torch.compile traces this call and its graph shall contain the operator, not the formula.

    The operator is for tensors on CPU, unless the caller has set the compile mode "formula". On other devices the compiler fuses
    the formula. An exported program has the formula too, which needs no operator of this library.
    """
    if not torch.compiler.is_dynamo_compiling() or any(type(x) is not Tensor for x in sources):
        return False
    return compile_mode.form(sources[0], plain=False) == "op" and sources[0].device.type == "cpu"


def _differentiate(a: Any) -> list[Tensor]:
    if in_transform():
        return _attend_sources(a)
    return [*AttendFunction.apply(a.query, a.weight, a.eps, a.normed_values, *a.sources)]  # type: ignore[no-untyped-call]


_KERNELS: dict[str, Kernel] = {"attend_sources": _attend_sources, "attend_sources_backward": _attend_sources_backward}
for _name, _kernel in _KERNELS.items():
    for _op, _function in kernels_of(_name, _kernel):
        library.impl(_op, _function, "CompositeExplicitAutograd")
register_fakes(_KERNELS)  # the references compute fake tensors too
exclude_from_capture(AttendFunction.backward)
for _name, _kernel in kernels_of("attend_sources", _differentiate, ("",)):
    autograd.register(_name, _kernel)
