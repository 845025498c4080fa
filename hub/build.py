"""Write a kernel repository for the hub, build/hub: the norms of `addnorm_norms/` with the C++ kernels. `make hub` checks it too.

One variant serves every torch from 2.10 on and every Python of a platform. Its operators have a namespace of their own, made from
the sources, so several versions and the package addnorm can be loaded in one process. Nothing is uploaded.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TARGET = ROOT / "build" / "hub"
OPERATORS = '''"""The operators of this build, in a namespace of their own."""

from pathlib import Path

import torch

NAMESPACE = "{namespace}"
torch.ops.load_library(str(Path(__file__).with_name("_C.so")))
ops = getattr(torch.ops, NAMESPACE)
'''


def main():
    """Compile the kernels and write the repository."""
    sources = sorted([*(ROOT / "csrc").glob("*.[ch]*"), *(HERE / "addnorm_norms").glob("*.py")])
    namespace = "addnorm_norms_" + hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:12]
    shutil.rmtree(TARGET, ignore_errors=True)
    variant = TARGET / "build" / f"torch-stable-abi210-cpu-{platform.machine()}-linux"
    shutil.copytree(HERE / "addnorm_norms", variant, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (HERE / "README.md", ROOT / "LICENSE"):
        shutil.copy(file, TARGET)
    shutil.copy(compile_kernels(namespace), variant)
    (variant / "_ops.py").write_text(OPERATORS.format(namespace=namespace))
    metadata = {"name": "addnorm-norms", "id": f"{namespace}_cpu", "version": 1, "license": "MIT", "python-depends": []}
    (variant / "metadata.json").write_text(json.dumps(metadata | {"backend": {"type": "cpu"}}, indent=2) + "\n")
    print(f"Written: {variant.relative_to(ROOT)}, {(variant / '_C.so').stat().st_size / 1e6:.1f} MB")


def compile_kernels(namespace):
    """Compile the C++ library with this namespace and return its path."""
    folder = ROOT / "build" / "hub-library"
    options = ["--force", "--build-lib", folder, "--build-temp", f"{folder}-objects"]
    environment = os.environ | {"ADDNORM_NODE": "0", "CPPFLAGS": f"""-DADDNORM_NAMESPACE='"{namespace}"'"""}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", *map(str, options)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return folder / "addnorm" / "_C.so"


if __name__ == "__main__":
    main()
