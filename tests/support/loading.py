"""Helper that loads scripts outside the package as modules."""

import importlib.util
import sys

from support import ROOT


def load(script):
    """Return a new module of the script at this path in the project; no other test sees changes to it.

    The script's folder is first on the import path, as when Python runs the script.
    """
    path = ROOT / script
    spec = importlib.util.spec_from_file_location(script.removesuffix(".py").replace("/", "_"), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    before = list(sys.path)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module
