"""The packages of the zoo, and the environment of each: a folder of its own, found before the project's own environment."""

import importlib
import pkgutil
import shutil
import subprocess
import sys

from support import ROOT
from zoo import answers

ENVIRONMENTS = ROOT / "build" / "zoo"


def load():
    """Return the packages by name."""
    return {name: module.PACKAGE for name, module in modules().items()}


def modules():
    """Return the modules with the answers, by the name of the package."""
    names = [f"{answers.__name__}.{module.name}" for module in pkgutil.iter_modules(answers.__path__)]
    return {module.PACKAGE.name: module for module in map(importlib.import_module, names)}


def install(package):
    """Install a package and its requirements into a folder of its own and return it; do nothing if that was done before or is not needed."""
    folder, done = ENVIRONMENTS / package.name, ENVIRONMENTS / f"{package.name}.txt"
    text = "\n".join(package.requirements)
    if package.installed:
        return folder
    if done.exists() and done.read_text() == text:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    # torch is the project's; a package that pins another one is installed without its dependencies, which are listed instead.
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-compile",
    ]
    subprocess.run([*pip, "--target", str(folder), *package.requirements], check=True)
    for path in package.remove:
        shutil.rmtree(folder / path)
    done.write_text(text)
    return folder
