"""Build the C++ library; all other settings are in pyproject.toml.

The library uses libtorch's stable ABI and neither Python.h, OpenMP nor torch's C++ symbols, so one build serves every Python
version and every torch from 2.10 on. With ADDNORM_CPP=0 in the environment it is not built.

A small second library has the autograd node in C++. It uses torch's own C++ interface, so it serves only the torch that it is
built with, whose version is in its name. An installation goes on where it does not compile. Set ADDNORM_NODE=0 to leave it out
of a wheel for other machines.
"""

import importlib.util
import os
import platform
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# 2.10, one byte for each component; equals the minimum in `dependencies` of pyproject.toml.
TORCH_TARGET_VERSION = "0x020a000000000000"

HINT = (
    "addnorm: the C++ kernels did not compile. Install a C++17 compiler (g++), or set ADDNORM_CPP=0 to do without them."
)


class BuildLibrary(build_ext):
    """Build of the libraries at the same time: torch loads them, they are no Python modules."""

    def initialize_options(self):
        super().initialize_options()
        self.parallel = 2

    def get_ext_filename(self, fullname):
        version = ""
        if fullname.endswith("_autograd"):
            version = "-" + runpy.run_path(str(find_torch() / "version.py"))["__version__"]
        return f"{fullname.replace('.', '/')}{version}.so"

    def get_export_symbols(self, ext):
        return []

    def build_extension(self, ext):
        if ext.optional:
            super().build_extension(ext)
            return
        try:
            super().build_extension(ext)
        except Exception as error:
            raise SystemExit(f"{error}\n{HINT}") from error


class AnyPython(bdist_wheel):
    """Wheel for any Python version and any torch: `py3-none-<platform>`."""

    def get_tag(self):
        _, _, plat = super().get_tag()
        return "py3", "none", plat


def find_torch() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "addnorm: building the C++ kernels needs torch: pip install torch first, or set ADDNORM_CPP=0."
        )
    return Path(spec.origin).parent


def kernels(torch: Path) -> Extension:
    return Extension(
        "addnorm._C",
        sources=sorted(str(p) for p in Path("csrc").glob("*.cpp")),
        depends=sorted(str(p) for p in Path("csrc").glob("*.h")),
        include_dirs=[str(torch / "include")],
        library_dirs=[str(torch / "lib")],
        libraries=["torch_cpu"],
        define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION)],
        extra_compile_args=[
            "-std=c++17",
            "-O3",
            "-g0",
            "-fvisibility=hidden",
            "-ffp-contract=off",  # products are fused where the source says so, and nowhere else
            "-Wall",
            "-Wextra",
            "-Wno-unused-parameter",  # in torch's headers
            "-Wno-psabi",  # vectors of sixteen floats are passed within one file only
            "-Wno-uninitialized",  # in gcc 12's own AVX-512 headers
            "-Wno-maybe-uninitialized",
        ],
        extra_link_args=["-Wl,--as-needed"],
    )


def node(torch: Path) -> Extension:
    return Extension(
        "addnorm._autograd",
        sources=["csrc/autograd/node.cpp"],
        depends=["csrc/arguments.h"],
        include_dirs=[str(torch / "include"), str(torch / "include" / "torch" / "csrc" / "api" / "include")],
        library_dirs=[str(torch / "lib")],
        libraries=["torch_cpu", "c10"],
        extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden"],
        optional=True,  # the Python nodes serve without it
    )


if os.environ.get("ADDNORM_CPP") == "0" or platform.system() != "Linux":
    setup()
else:
    torch = find_torch()
    extensions = [kernels(torch)] if os.environ.get("ADDNORM_NODE") == "0" else [kernels(torch), node(torch)]
    setup(ext_modules=extensions, cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPython})
