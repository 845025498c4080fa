"""Scripts outside the package, loaded as modules with their own folder first on the path, as Python runs them."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def load(script: str):
    """Return a new module of the script, given its path in the project, so that no other test sees changes to it."""
    path = ROOT / script
    spec = importlib.util.spec_from_file_location(script.removesuffix(".py").replace("/", "_"), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    before = list(sys.path)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module
