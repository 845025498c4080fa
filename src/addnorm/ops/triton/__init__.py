"""The Triton kernels, registered for CUDA.

They are imported at the first call on CUDA: `import addnorm` needs neither Triton nor a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings

import torch

from addnorm.ops import cpu, eager
from addnorm.ops.schema import OVERLOADS, Kernel, kernels_of, library
from addnorm.ops.streams import eager as streams_eager

OLDEST = (3, 6)  # the version of torch 2.10
SWITCHED_OFF = "switched off by ADDNORM_TRITON=0 in the environment"


@functools.cache
def unavailable_reason() -> str:
    """Return why these kernels are not available, empty if they are."""
    try:  # an installation can be broken in any way
        if tuple(int(part) for part in _version().split(".")[:2]) < OLDEST:
            return f"Triton {_version()} is too old, expected {'.'.join(map(str, OLDEST))} or newer"
        from addnorm.ops.triton import operators  # noqa: F401  # tests the import
    except Exception as error:
        return f"Triton cannot be used ({type(error).__name__}: {error})"
    return ""


@functools.cache
def kernels() -> dict[str, Kernel]:
    """Return the operators' kernels: Triton's, or with a warning the reference if Triton is not usable."""
    if unavailable_reason():
        warnings.warn(
            f"addnorm runs without its Triton kernels: {unavailable_reason()}. "
            "Install another one with pip install 'addnorm[gpu]'.",
            RuntimeWarning,
            stacklevel=4,
        )
        return {**eager.KERNELS, **streams_eager.KERNELS}
    from addnorm.ops.triton import operators

    return operators.KERNELS


def _version() -> str:
    import triton

    return str(triton.__version__)


def status() -> tuple[bool, str]:
    """Return whether the kernels compute CUDA tensors in this process, and a sentence about it."""
    if not REGISTERED:
        off = os.environ.get("ADDNORM_TRITON") == "0"
        return False, SWITCHED_OFF if off else "Triton is not installed: pip install 'addnorm[gpu]'"
    if not torch.cuda.is_available():
        return False, f"Triton is installed, but torch {torch.__version__} sees no CUDA device"
    if cpu.MISSING_PART:
        return False, cpu.MISSING_PART
    if unavailable_reason():
        return False, f"{unavailable_reason()}: pip install 'addnorm[gpu]'"
    return True, f"Triton {_version()} kernels for {torch.cuda.get_device_name()}"


def _installed() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # another module replaces it in sys.modules
        return False


REGISTERED = os.environ.get("ADDNORM_TRITON") != "0" and _installed()
if REGISTERED:
    for _name in (*eager.KERNELS, *streams_eager.KERNELS):
        for _op, _function in kernels_of(_name, lambda a, name=_name: kernels()[name](a), OVERLOADS.get(_name, ("",))):  # type: ignore[misc]
            library.impl(_op, _function, "CUDA")
