"""A script that is no module of the package, loaded as Python runs it: with its own folder first on the path."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def load(script: str):
    """The script, by its path in the project, as a module of its own: what a test changes in it no other test sees."""
    path = ROOT / script
    spec = importlib.util.spec_from_file_location(script.removesuffix(".py").replace("/", "_"), path)
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module
