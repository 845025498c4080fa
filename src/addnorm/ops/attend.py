"""Attention over sources as operators: the reads of attention residuals, for eager calls.

    s_rj = q_r · (γ x_j) f_j      f_j = 1 / rms(x_j)      p_r = softmax_j(s_rj)      read_r = sum over j of p_rj x_j

The sources x_j are the states that a sublayer reads. `weight` is γ; None: ones. With `normed_values` the read is the sum of
p_rj f_j x_j. Each query q_r has a read, in float32 at least. Nothing is saved for backward that is as wide as a source but the
sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from addnorm.ops.dtensor import linear
from addnorm.ops.schema import Kernel, declare, kernels_of, library, register_fakes
from addnorm.reference import compute_dtype

# One list of results: `torch_call_dispatcher`, by which the kernels call the references, mixes up results of several types.
SCHEMAS = {
    "attend_sources": "(Tensor[] sources, Tensor query, Tensor? weight, float eps, bool normed_values) -> Tensor[]",
    "attend_sources_backward": (
        "(Tensor[] sources, Tensor query, Tensor? weight, Tensor scores, Tensor factors, Tensor[] grads, bool normed_values) "
        "-> Tensor[]"
    ),
}
DEFINITIONS = declare(SCHEMAS)


def compute_scores(
    sources: Sequence[Tensor], query: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the scores of the sources, `(*, reads, n)`, and the factors of their norms, `(*, n)`."""
    query = query if weight is None else query * weight
    wide = [x.to(compute_dtype(x)) for x in sources]
    factors = torch.rsqrt(torch.stack([x.square().mean(-1) for x in wide], -1) + eps)
    return torch.stack([linear(x, query) for x in wide], -1) * factors.unsqueeze(-2), factors


def compute_weights(scores: Tensor, factors: Tensor, normed_values: bool) -> Tensor:
    """Return what each source is multiplied with in each read, `(*, reads, n)`."""
    weights = torch.softmax(scores, -1)
    return weights * factors.unsqueeze(-2) if normed_values else weights


def formula(
    sources: Sequence[Tensor], query: Tensor, weight: Tensor | None, eps: float, normed_values: bool
) -> list[Tensor]:
    """Return the results of `attend_sources` in torch's operators: the reads, the scores and the factors."""
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
            outer = product * query if reads == 1 else product @ query  # the product of matrices is slower for one
            total = torch.addcmul(outer, x, shares[..., j, None])
            for r, grad in enumerate(a.grads):
                total.addcmul_(grad, values[..., r, j, None])
            found.append(total.to(a.sources[j].dtype))
    if a.weight is None:
        return [grad_query, *found]
    return [grad_query * a.weight, (grad_query * a.query).sum(0), *found]


_KERNELS: dict[str, Kernel] = {"attend_sources": _attend_sources, "attend_sources_backward": _attend_sources_backward}
for _name, _kernel in _KERNELS.items():
    for _op, _function in kernels_of(_name, _kernel):
        library.impl(_op, _function, "CompositeExplicitAutograd")
register_fakes(_KERNELS)  # compiled autograd traces the backward; the references compute fake tensors too
