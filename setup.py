"""Build the C++ library; all other settings are in pyproject.toml.

The library uses libtorch's stable ABI and neither Python.h, OpenMP nor torch's C++ symbols, so one build serves every Python
version and every torch from 2.10 on. Its build needs a compiler and no torch. With ADDNORM_CPP=0 in the environment it is not
built.

A small second library has the autograd node in C++, and calls from Python without the dispatcher. It uses the C++ interfaces of
torch and Python, so it serves only those that it is built with, whose versions are in its name. It is left out where no torch is
installed, where it does not compile, and with ADDNORM_NODE=0 in the environment, as for a wheel for other machines.
"""

import importlib.util
import os
import platform
import runpy
import sysconfig
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HINT = (
    "addnorm: the C++ kernels did not compile. Install a C++17 compiler (g++), or set ADDNORM_CPP=0 to do without them."
)


class BuildLibrary(build_ext):
    """Build of the libraries at the same time: torch loads them, they are no Python modules."""

    def initialize_options(self):
        super().initialize_options()
        self.parallel = 2

    def get_ext_filename(self, fullname):
        if fullname.endswith("_autograd"):
            torch = runpy.run_path(str(find_torch() / "version.py"))["__version__"]
            return f"{fullname.replace('.', '/')}-{torch}{EXTENSION_SUFFIXES[0]}"
        return f"{fullname.replace('.', '/')}.so"

    def get_export_symbols(self, ext):
        return []

    def build_extension(self, ext):
        if ext.optional:
            super().build_extension(ext)
            return
        try:
            ext.library_dirs = [self.build_empty_libtorch()]
            super().build_extension(ext)
        except Exception as error:
            raise SystemExit(f"{error}\n{HINT}") from error

    def build_empty_libtorch(self):
        """Build an empty library with libtorch's name, for the linker only: in a process, torch's own is loaded already."""
        folder = Path(self.build_temp, "libtorch")
        folder.mkdir(parents=True, exist_ok=True)
        source = folder / "empty.cpp"
        source.touch()
        objects = self.compiler.compile([str(source)], output_dir=str(folder))
        options = ["-Wl,-soname,libtorch_cpu.so"]
        self.compiler.link_shared_object(objects, str(folder / "libtorch_cpu.so"), extra_postargs=options)
        return str(folder)


class AnyPython(bdist_wheel):
    """Wheel for any Python version and any torch: `py3-none-<platform>`."""

    def get_tag(self):
        _, _, plat = super().get_tag()
        return "py3", "none", plat


def find_torch() -> Path | None:
    """Return the folder of the installed torch: also that of the environment which an isolated build is for."""
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin).parent if spec and spec.origin else Path(sysconfig.get_path("platlib"), "torch")
    return folder if (folder / "include").is_dir() else None


def kernels() -> Extension:
    return Extension(
        "addnorm._C",
        sources=sorted(str(p) for p in Path("csrc").glob("*.cpp")),
        depends=sorted(str(p) for p in Path("csrc").glob("*.h")),
        extra_compile_args=[
            "-std=c++17",
            "-O3",
            "-g0",
            "-fvisibility=hidden",
            "-ffp-contract=off",  # products are fused where the source says so, and nowhere else
            "-Wall",
            "-Wextra",
            "-Wno-psabi",  # vectors of sixteen floats are passed within one file only
            "-Wno-uninitialized",  # in gcc 12's own AVX-512 headers
            "-Wno-maybe-uninitialized",
        ],
        extra_link_args=["-Wl,--no-as-needed", "-ltorch_cpu", "-ldl"],
    )


def node(torch: Path) -> Extension:
    return Extension(
        "addnorm._autograd",
        sources=["csrc/autograd/node.cpp"],
        depends=["csrc/arguments.h"],
        include_dirs=[str(torch / "include"), str(torch / "include" / "torch" / "csrc" / "api" / "include")],
        library_dirs=[str(torch / "lib")],
        libraries=["torch_python", "torch_cpu", "c10"],
        extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden"],
        optional=True,  # the Python nodes serve without it
    )


if os.environ.get("ADDNORM_CPP") == "0" or platform.system() != "Linux":
    setup()
else:
    torch = None if os.environ.get("ADDNORM_NODE") == "0" else find_torch()
    extensions = [kernels()] if torch is None else [kernels(), node(torch)]
    setup(ext_modules=extensions, cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPython})
