"""The C++ kernels: find the shared library beside the package, load it, remember why not."""

from __future__ import annotations

import ctypes
import os
import warnings
from pathlib import Path

import torch

# ADDNORM_LIBRARY names another build of it: one with sanitizers, say.
ELSEWHERE = os.environ.get("ADDNORM_LIBRARY")
LIBRARY = Path(ELSEWHERE or Path(__file__).resolve().parent.parent / "_C.so")


def load() -> tuple[str | None, str]:
    """The instruction set of the kernels that were loaded (None: none were), and a sentence about it."""
    if os.environ.get("ADDNORM_CPP") == "0":
        return None, "switched off by ADDNORM_CPP=0 in the environment"
    if not LIBRARY.exists() and ELSEWHERE:
        return None, _broken(f"ADDNORM_LIBRARY={LIBRARY} in the environment is no file: build it or unset the variable")
    if not LIBRARY.exists():
        return None, "not built (the package was installed with ADDNORM_CPP=0): reinstall it without that variable"
    try:
        torch.ops.load_library(str(LIBRARY))
        name = ctypes.CDLL(str(LIBRARY)).addnorm_isa
    except (OSError, AttributeError) as error:
        remedy = "build it again or unset ADDNORM_LIBRARY" if ELSEWHERE else "reinstall addnorm"
        return None, _broken(f"{LIBRARY} does not load with torch {torch.__version__} ({error}): {remedy}")
    name.restype = ctypes.c_char_p
    isa = name().decode()
    return isa, f"C++ kernels for {isa}"


def _broken(reason: str) -> str:
    """The reason, and a warning of it: a broken install is worth one, a pure-Python one is not."""
    warnings.warn(f"addnorm runs without its CPU kernels: {reason}.", RuntimeWarning, stacklevel=3)
    return reason


ISA, DETAIL = load()
