"""Packages that only some of this room needs: imported where they are used, missed with the extra that has them."""

from __future__ import annotations

import importlib
from typing import Any

EXTRAS = {
    "matplotlib": "plot", "jinja2": "plot", "pandas": "data", "pyarrow": "data", "joblib": "lab", "distributed": "lab",
    "starlette": "web", "uvicorn": "web",
}  # fmt: skip


def need(module: str, to: str) -> Any:
    """The module, or an ImportError that says what it is for and how to get it.

    Args:
        module: its name, perhaps with dots.
        to: what it is needed for: "draw".
    """
    package = module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        command = f"pip install 'addnorm[{EXTRAS[package]}]'"
        raise ImportError(f"{package} is not installed, and is needed to {to}: {command}", name=package) from error
