"""Models of transformers again as stacks: outputs and the gradients of all parameters, from the embedding to the head."""

import pytest
import torch
from torch.func import functional_call

pytest.importorskip("transformers", "5.23")

from support.real_models import FAMILIES, make_model, make_stack, run_model

NO_GRADIENT = ("indexer", "patch_embeddings")  # they choose tokens, or read images


def compute(name, dtype):
    """Return the output and all gradients of a model, and those of its stack."""
    model = make_model(name, dtype)
    stack, named = make_stack(name, model)
    tokens = torch.randint(4, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    output, x = run_model(name, model, tokens)
    own = {key for key, _ in stack.named_parameters() if ".sublayer." not in key and ".module." not in key}
    assert own == {*named}, "a parameter of the stack has no counterpart in the model"
    for key, value in named.items():
        assert torch.equal(stack.get_parameter(key), value), f"{key} was not loaded as the model has it"
    parameters = dict(model.named_parameters())
    results = []
    for y in (output, functional_call(stack, named, (x,))):
        cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
        loss = (y * cotangent).sum()
        gradients = torch.autograd.grad(loss, [*parameters.values()], retain_graph=True, allow_unused=True)
        results.append({"output": y.detach(), **dict(zip(parameters, gradients, strict=True))})
    return results


@pytest.mark.parametrize("name", FAMILIES)
def test_stack_equals_the_model(name):
    model, stack = compute(name, torch.float64)
    for key, expected in model.items():
        if expected is None:
            assert stack[key] is None
            assert any(part in key for part in NO_GRADIENT), key
            continue
        size = expected.abs().max()
        assert expected.dtype == torch.float64
        assert size > 1e-6, f"the gradient of {key} is zero: the test would not see it"
        error = (stack[key] - expected).abs().max()
        assert error <= 1e-10 * size, f"{key}: {error:.3g} of {size:.3g}"
    single, stack = compute(name, torch.float32)
    for key, exact in model.items():
        if exact is not None:
            own, ours = (float((t[key].double() - exact).norm()) for t in (single, stack))
            assert ours <= 2 * own, f"{key}: {ours / own:.3g} times the model's own error"
