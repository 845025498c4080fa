"""The Triton kernels, registered for CUDA; imported at the first call there: `import addnorm` needs neither Triton nor a GPU."""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from addnorm.ops import eager
from addnorm.ops.schema import SCHEMAS, library

OLDEST = (3, 6)  # what comes with torch 2.10
SWITCHED_OFF = "switched off by ADDNORM_TRITON=0 in the environment"


@functools.cache
def missing() -> str:
    """Why these kernels cannot compute here, in words; empty where they can."""
    try:  # in which ways an installation is broken nobody can list
        if tuple(int(part) for part in _version().split(".")[:2]) < OLDEST:
            return f"Triton {_version()} is too old, expected {'.'.join(map(str, OLDEST))} or newer"
        from addnorm.ops.triton import operators  # noqa: F401  # whether it can be imported is the question
    except Exception as error:
        return f"Triton cannot be used ({type(error).__name__}: {error})"
    return ""


@functools.cache
def computing() -> ModuleType:
    """The operators: these here, or, where Triton does not have what they need, the reference with a warning."""
    if missing():
        warnings.warn(
            f"addnorm runs without its Triton kernels: {missing()}. Install another one with pip install 'addnorm[gpu]'.",
            RuntimeWarning,
            stacklevel=4,
        )
        return eager
    from addnorm.ops.triton import operators

    return operators


def _version() -> str:
    import triton

    return str(triton.__version__)


def _kernel(name: str) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        return getattr(computing(), name)(*args, **options)

    return run


def status() -> tuple[bool, str]:
    """Whether they compute what is on CUDA in this process, and a sentence about it."""
    if not REGISTERED:
        off = os.environ.get("ADDNORM_TRITON") == "0"
        return False, SWITCHED_OFF if off else "Triton is not installed: pip install 'addnorm[gpu]'"
    if not torch.cuda.is_available():
        return False, f"Triton is installed, but torch {torch.__version__} sees no CUDA device"
    if missing():
        return False, f"{missing()}: pip install 'addnorm[gpu]'"
    return True, f"Triton {_version()} kernels for {torch.cuda.get_device_name()}"


def _installed() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # a module that somebody put in its place
        return False


REGISTERED = os.environ.get("ADDNORM_TRITON") != "0" and _installed()
if REGISTERED:
    for _name in SCHEMAS:
        library.impl(_name, _kernel(_name), "CUDA")
