"""Import the package as in a torch that lacks one of its parts, and print what works; tests/util/test_torch_internals.py.

Each argument names a missing part: a copy of this process, which has imported torch, prints one line of JSON about it.
"""

import json
import os
import pkgutil
import sys

import torch
import torch._dynamo  # which each copy would import

resolve = pkgutil.resolve_name


def run_without(missing):
    """Import the package without a part of torch, and print what works."""

    def resolve_name(name):
        if name == missing:
            raise AttributeError(name)
        return resolve(name)

    pkgutil.resolve_name = resolve_name
    import addnorm
    from wheels.smoke import compare

    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    try:
        wiring = addnorm.inspect(model, torch.randn(2, 5, 32)).wiring
    except RuntimeError as error:
        wiring = str(error)
    kernels = next(one.detail for one in addnorm.backends() if one.name == "cpu")
    print(json.dumps({"worst": compare("float32"), "kernels": kernels, "inspect": wiring}), flush=True)


for name in sys.argv[1:]:
    if not os.fork():
        run_without(name)
        sys.exit()
    if os.wait()[1]:
        sys.exit(1)
