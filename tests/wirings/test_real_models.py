"""Models of transformers again as stacks: outputs and the gradients of all parameters, from the embedding to the head."""

import pytest
import torch

pytest.importorskip("transformers", "5.23")

from support.real_models import FAMILIES, make_model, make_stack, run_model


def load(name, model, values):
    """Return the parameters of the model's stack where the model has these values."""
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)
    return [parameter.detach().clone() for parameter in make_stack(name, model).parameters()]


def compute(name, dtype):
    """Return output and gradients of a model and of its stack, by the names of the stack's parameters.

    These are the model's plus constants, so the gradients of the model, loaded as its parameters, are those of the stack plus them.
    """
    model = make_model(name, dtype)
    stack = make_stack(name, model)
    tokens = torch.randint(4, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    output, x = run_model(name, model, tokens)
    results = []
    for y, owner in ((output, model), (stack(x), stack)):
        cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
        leaves = [x, *owner.parameters()]
        results.append([y.detach(), *torch.autograd.grad(
            (y * cotangent).sum(), leaves, retain_graph=True, allow_unused=True, materialize_grads=True
        )])  # fmt: skip
    names = ["output", "x", *(key for key, _ in stack.named_parameters())]
    (y, dx, *gradients), ours = results
    both = (load(name, model, values) for values in (gradients, map(torch.zeros_like, gradients)))
    theirs = [y, dx, *(loaded - constant for loaded, constant in zip(*both, strict=True))]
    return dict(zip(names, theirs, strict=True)), dict(zip(names, ours, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_stack_equals_the_model(name):
    model, stack = compute(name, torch.float64)
    for key, expected in model.items():
        size = expected.abs().max()
        assert expected.dtype == torch.float64
        assert size > 1e-6 or "indexer" in key, f"the gradient of {key} is zero: the test would not see it"
        error = (stack[key] - expected).abs().max()
        assert error <= 1e-10 * size, f"{key}: {error:.3g} of {size:.3g}"
    single, stack = compute(name, torch.float32)
    for key, exact in model.items():
        own, ours = (float((t[key].double() - exact).norm()) for t in (single, stack))
        assert ours <= 2 * own, f"{key}: {ours / own:.3g} times the model's own error"
