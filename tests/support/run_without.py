"""Import the package as in a torch that lacks one of its parts, and print what works; tests/util/test_torch_internals.py."""

import json
import pkgutil
import sys

import torch

missing, resolve = sys.argv[1], pkgutil.resolve_name


def resolve_name(name):
    """Return a part of torch, but not the missing one."""
    if name == missing:
        raise AttributeError(name)
    return resolve(name)


pkgutil.resolve_name = resolve_name
import addnorm  # noqa: E402


def worst_error():
    """Return the largest error of a call's outputs and gradients, in roundings of float32 of the largest value."""
    torch.manual_seed(0)
    inputs = [torch.randn(5, 40), torch.randn(5, 40), torch.randn(40), torch.randn(40)]
    results = []
    for dtype in (torch.float32, torch.float64):
        x, branch, weight, bias = (t.to(dtype).requires_grad_() for t in inputs)
        z = x + branch
        z = z if dtype == torch.float32 else z + (z.float().double() - z).detach()
        exact = torch.nn.functional.layer_norm(z, (40,), weight, bias), z
        y, z = (
            exact if dtype == torch.float64 else addnorm.add_layer_norm(x, branch, weight, bias, return_residual=True)
        )
        loss = (y * torch.linspace(-1, 2, 40)).sum() + z.sin().sum()
        results.append([t.detach().double() for t in (y, z, *torch.autograd.grad(loss, [x, branch, weight, bias]))])
    with torch.no_grad():
        out = addnorm.add_layer_norm(*inputs, out=torch.empty(5, 40))
        results[0].append(out.double())
        results[1].append(results[1][0])
    return max(float((a - b).abs().max() / b.abs().max() * 2**24) for a, b in zip(*results, strict=True))


def inspect_model():
    """Return the wiring of a model, or the sentence why there is none."""
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    try:
        return addnorm.inspect(model, torch.randn(2, 5, 32)).wiring
    except RuntimeError as error:
        return str(error)


kernels = next(one.detail for one in addnorm.backends() if one.name == "cpu")
print(json.dumps({"worst": worst_error(), "kernels": kernels, "inspect": inspect_model()}))
