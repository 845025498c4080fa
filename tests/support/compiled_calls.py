"""Helper that returns outputs and gradients of compiled functions."""

import torch

from support.cases import cotangents

# A branch that does not fit a residual of shape (3, 8) and dtype float32.
WRONG_BRANCHES = {"features": ((3, 7), torch.float32), "rows": ((1, 8), torch.float32), "dtype": ((3, 8), torch.int64)}


def compute_results(function, tensors, seed=0):
    """Return outputs and gradients of a function of tensors."""
    torch.manual_seed(seed)
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    outputs = function(*tensors)
    given = cotangents({str(i): t for i, t in enumerate(outputs)})
    torch.autograd.backward(list(outputs), list(given.values()))
    return [t.detach() for t in outputs], [t.grad for t in tensors]
