"""Loading of the C++ kernels: the shared library beside the package, and the reason if it is not loaded.

The library defines the operators and registers its kernels. It also works in a process without this package, where there is no
reference for the arguments that the kernels do not support: such a call is an error.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from pathlib import Path

import torch

from addnorm._util.torch_internals import MISSING

# ADDNORM_LIBRARY names another build of the library, for example one with sanitizers.
OVERRIDE = os.environ.get("ADDNORM_LIBRARY")
LIBRARY = Path(OVERRIDE or Path(__file__).resolve().parent.parent / "_C.so")
# The reason why no kernel is called, if this torch lacks an internal that kernel calls need; else empty.
MISSING_PART = "".join(
    f"not called, since torch {torch.__version__} has no {name}: use an older torch or a newer addnorm"
    for name in MISSING[:1]
)


def load() -> tuple[str | None, str]:
    """Load the library; return the instruction set of its kernels (None: not loaded) and a sentence about it."""
    if MISSING_PART:
        return None, MISSING_PART
    if os.environ.get("ADDNORM_CPP") == "0":
        return None, "switched off by ADDNORM_CPP=0 in the environment"
    if not LIBRARY.exists() and OVERRIDE:
        return None, _warn_broken(
            f"ADDNORM_LIBRARY={LIBRARY} in the environment is not a file: build it or unset the variable"
        )
    if not LIBRARY.exists():
        return None, "not in this installation, which has no kernels: install from source with a C++ compiler"
    try:
        torch.ops.load_library(str(LIBRARY))
        library = ctypes.CDLL(str(LIBRARY))
        name = library.addnorm_isa
        library.addnorm_allow_reference()  # eager.py registers it
    except (OSError, AttributeError) as error:
        remedy = "build it again or unset ADDNORM_LIBRARY" if OVERRIDE else "reinstall addnorm"
        return None, _warn_broken(f"{LIBRARY} does not load with torch {torch.__version__} ({error}): {remedy}")
    name.restype = ctypes.c_char_p
    isa = name().decode()
    return isa, f"C++ kernels for {isa}"


def addresses() -> list[int | None]:
    """Return the addresses of the functions that `csrc/autograd/node.cpp` calls without the dispatcher."""
    library = ctypes.CDLL(str(LIBRARY))
    calls = library.addnorm_forward, library.addnorm_forward_out, library.addnorm_backward
    return [ctypes.cast(call, ctypes.c_void_p).value for call in calls]


def library_path() -> Path:
    """Return the path of the C++ library, which runs exported programs in a process without this package.

    `torch.ops.load_library(path)` there defines the operators and registers their CPU kernels. It needs the same file and torch
    2.10 or later, and no Python package but torch. A process without Python loads the file with `dlopen`.

    Raises:
        RuntimeError: the library is not loaded in this process either; the message says why.

    Example:
        >>> addnorm.library_path().name
        '_C.so'
    """
    if ISA is None:
        raise RuntimeError(f"The C++ library of addnorm is not there, since it is {DETAIL}.")
    return LIBRARY


def _warn_broken(reason: str) -> str:
    """Warn that the C++ library is broken, and return `reason`; an installation without the library is not broken."""
    warnings.warn(f"addnorm runs without its CPU kernels: {reason}.", RuntimeWarning, stacklevel=3)
    return reason


ISA, DETAIL = load()
