"""Imports of optional packages, with errors that name the extra to install."""

import importlib
import sys
from typing import Any

# The extra of pyproject.toml that installs a package.
EXTRAS = {
    "matplotlib": "plot", "jinja2": "plot", "pandas": "data", "pyarrow": "data", "joblib": "lab", "dask": "lab",
    "distributed": "lab", "transformers": "hf", "safetensors": "hf", "triton": "gpu", "starlette": "web", "uvicorn": "web",
    "onnx": "onnx", "onnxruntime": "onnx", "onnxscript": "onnx",
}  # fmt: skip


def install_command(package: str) -> str:
    """Return the command that installs an optional package.

    Example:
        >>> from addnorm._util.optional import install_command
        >>> install_command("pyarrow")
        "pip install 'addnorm[data]'"
    """
    return f"pip install 'addnorm[{EXTRAS[package]}]'"


def require(module: str, purpose: str) -> Any:
    """Import an optional module and return it.

    Args:
        module: name of a package in `EXTRAS`, or of a module in it, such as "matplotlib.figure".
        purpose: what the module is needed for: "draw", "write Parquet".

    Raises:
        ImportError: the package is not installed, or its import fails. The message names the extra.

    Example:
        >>> from addnorm._util.optional import require
        >>> require("jinja2", "write a report").Template("{{ 1 + 1 }}").render()
        '2'
    """
    package = module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = f"{error.name}".split(".")[0] == package and sys.modules.get(package) is None
        state = "is not installed" if missing else f"cannot be imported ({error})"
        command = install_command(package)
        raise ImportError(f"{package} {state}, and is needed to {purpose}: {command}", name=package) from error
