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
from wheels.smoke import compare  # noqa: E402


def inspect_model():
    """Return the wiring of a model, or the sentence why there is none."""
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    try:
        return addnorm.inspect(model, torch.randn(2, 5, 32)).wiring
    except RuntimeError as error:
        return str(error)


kernels = next(one.detail for one in addnorm.backends() if one.name == "cpu")
print(json.dumps({"worst": compare("float32"), "kernels": kernels, "inspect": inspect_model()}))
