"""Helper that returns outputs and gradients of compiled functions."""

import torch

from support.cases import cotangents


def compute_results(function, tensors, seed=0):
    """Return outputs and gradients of a function of tensors."""
    torch.manual_seed(seed)
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    outputs = function(*tensors)
    grad_outputs = cotangents({str(i): t for i, t in enumerate(outputs)})
    torch.autograd.backward(list(outputs), list(grad_outputs.values()))
    return [t.detach() for t in outputs], [t.grad for t in tensors]
