"""Program that runs exported programs without the Python package of this library, and prints a JSON object of the results.

python tests/support/run_deployed.py LIBRARY FOLDER ...

For each NAME.pt2 (torch.export.save) and NAME.aoti.pt2 (AOTInductor) in a FOLDER it prints the largest difference from its
expected.pt, or the error. Names that begin with "operator" run after LIBRARY is loaded, and once before.
"""

import json
import logging
import sys
from pathlib import Path

import torch

logging.getLogger("torch").setLevel(logging.ERROR)


def run(path):
    """Return the difference of one program's result, or the message of its error."""
    x, expected = torch.load(path.parent / "expected.pt")
    try:
        if path.name.endswith(".aoti.pt2"):
            actual = torch._inductor.aoti_load_package(str(path))(x)
        else:
            actual = torch.export.load(path).module()(x)
    except RuntimeError as error:
        return str(error)
    return float((actual - expected).abs().max())


def message(*arguments):
    """Return the message of a call that the kernels refuse."""
    try:
        torch.ops.addnorm.add_norm(*arguments, None, None, 1e-5, 0)
    except RuntimeError as error:
        return str(error)
    return ""


def main(library, *folders):
    """Run all programs and print the results."""
    paths = [path for folder in folders for path in sorted(folder.glob("*.pt2"))]
    results = {}
    with torch.no_grad():
        for path in paths:
            results[f"{path.parent.name}/{path.name} alone"] = run(path)
        torch.ops.load_library(library)
        for path in paths:
            if path.name.startswith("operator"):
                results[f"{path.parent.name}/{path.name} with the library"] = run(path)
    x = torch.randn(3, 5, 16)
    results["no rows"] = list(torch.ops.addnorm.add_norm(x[:0], x[:0], None, None, 1e-5, 0).shape)
    results["no features"] = message(x[..., :0], x[..., :0])
    results["other shapes"] = message(x, x[:1])
    results["tags"] = [str(tag) for tag in torch.ops.addnorm.add_norm.default.tags]
    results["modules"] = [name for name in sys.modules if name.startswith("addnorm")]
    results["import afterwards"] = import_package(library)
    print(json.dumps(results))


def import_package(library):
    """Import the package beside the library, and return the name of the autograd node of an operator's result."""
    sys.path.insert(0, str(library.parent.parent))
    import addnorm  # not before the programs have run

    x = torch.ones(2, 4, requires_grad=True)
    assert addnorm.layer_norm(x[:, :0]).shape == (2, 0)  # by the reference
    return type(torch.ops.addnorm.add_norm(x, x, None, None, 1e-5, 0).grad_fn).__name__


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
