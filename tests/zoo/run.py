"""Install the packages, examine their models, and write benchmarks/results/zoo.json and docs/zoo.md: `make zoo`.

    python tests/zoo/run.py [--only PACKAGE] [--again] [--seconds 120]

Each package runs in a process with its own environment. Results are kept in build/zoo/ as they come, so an interrupted run goes
on where it was; they are dropped when the library's source or a package's answers change.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from zoo import page
from zoo.answer import Package
from zoo.packages import ENVIRONMENTS, ROOT, install, load

KEPT = ENVIRONMENTS / "results.jsonl"


def main() -> None:
    """Examine all packages and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="name of a package; may be repeated")
    parser.add_argument("--again", action="store_true", help="drop the kept results of these packages")
    parser.add_argument("--seconds", type=int, default=120, help="time limit of one model")
    arguments = parser.parse_args()
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    packages, source = load(), fingerprint()
    chosen = {name: packages[name] for name in arguments.only or packages}
    rows = [row for row in read() if row["source"] == source and not (arguments.again and row["package"] in chosen)]
    KEPT.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number, (name, package) in enumerate(chosen.items(), 1):
        done = {row["model"] for row in rows if row["package"] == name}
        todo = [model.name for model in package.models if model.name not in done]
        print(f"{number} of {len(chosen)}  {name}: {len(todo)} models", file=sys.stderr, flush=True)
        if todo:
            examine(package, todo, arguments.seconds, source)
    page.write([row for row in read() if row["source"] == source], packages)


def fingerprint() -> str:
    """Return a hash of the library and of the code that examines it."""
    files = [*(ROOT / "src" / "addnorm").rglob("*.py"), *(ROOT / "tests" / "zoo").rglob("*.py")]
    files = [file for file in files if file.name not in ("run.py", "page.py") and "test_" not in file.name]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def read() -> list[dict[str, Any]]:
    """Return the kept results."""
    return [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []


def examine(package: Package, todo: list[str], seconds: int, source: str) -> None:
    """Examine models of a package in processes of its environment and keep each result."""
    folder = install(package)
    paths = [str(folder), str(ROOT / "tests"), str(ROOT / "src")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__).with_name("examine.py")), package.name, str(seconds)]
    while todo:
        current = None
        with subprocess.Popen([*command, *todo], env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith("{"):  # what a package prints
                    continue
                row = json.loads(line)
                if "begin" in row:
                    current = row["begin"]
                else:
                    keep(row, package, source)
                    todo.remove(row["model"])
                    current = None
        if process.returncode:  # a crash below Python, or the package could not be imported
            name = current or todo[0]
            keep(
                {"model": name, "verdict": "crash", "detail": f"the process ended with {process.returncode}"},
                package,
                source,
            )
            todo.remove(name)


def keep(row: dict[str, Any], package: Package, source: str) -> None:
    """Append a result."""
    with KEPT.open("a") as file:
        file.write(json.dumps({"package": package.name, **row, "source": source}) + "\n")
    print(f"  {row['verdict']:9} {row['model']}  {str(row.get('detail', ''))[:110]}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
