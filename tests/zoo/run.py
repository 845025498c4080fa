"""Install the packages, examine their models, and write benchmarks/results/zoo.json and docs/zoo.md: `make zoo`.

    python tests/zoo/run.py [--only PACKAGE] [--stage inspect|fuse] [--again] [--seconds 120]

Each package runs in a process with its own environment. Results are kept in build/zoo/ as they come, so an interrupted run goes
on where it was. `fuse` is a stage of its own, since it takes most of the time. The results of `inspect` and its functions are dropped
when their source or an answer changes, those of `fuse` when the source of `fusion/` changes; --again drops both.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from zoo import page
from zoo.packages import ENVIRONMENTS, ROOT, install, load, modules

STAGES = {"inspect": ("addnorm",), "fuse": ("addnorm/fusion", "addnorm/ops")}


def main():
    """Examine all packages and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="name of a package; may be repeated")
    parser.add_argument("--stage", choices=[*STAGES], help="run this stage alone")
    parser.add_argument("--again", action="store_true", help="drop the kept results of these packages")
    parser.add_argument("--seconds", type=int, default=120, help="time limit of one model")
    arguments = parser.parse_args()
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    packages = load()
    chosen = {name: packages[name] for name in arguments.only or packages}
    for stage in [arguments.stage] if arguments.stage else STAGES:
        sources = {name: fingerprint(stage, name) for name in packages}
        rows = [
            row
            for row in read(stage)
            if row["source"] == sources.get(row["package"]) and not (arguments.again and row["package"] in chosen)
        ]
        kept(stage).write_text("".join(json.dumps(row) + "\n" for row in rows))
        for number, (name, package) in enumerate(chosen.items(), 1):
            done = {row["model"] for row in rows if row["package"] == name}
            todo = [model.name for model in package.models if model.name not in done]
            print(f"{stage}, {number} of {len(chosen)}  {name}: {len(todo)} models", file=sys.stderr, flush=True)
            if todo:
                examine(package, todo, arguments.seconds, sources[name], stage)
    page.write(merge(), packages)


def kept(stage):
    """Return the file with the results of a stage."""
    return ENVIRONMENTS / f"{stage}.jsonl"


def fingerprint(stage, package):
    """Return a hash of the code that a stage examines, and of the code that examines it."""
    files = [file for folder in STAGES[stage] for file in (ROOT / "src" / folder).rglob("*.py")]
    zoo = ROOT / "tests" / "zoo"
    files += [zoo / f"{name}.py" for name in ("examine", "use")]
    if stage == "inspect":
        files += [ROOT / "tests" / "support" / "judge.py", Path(str(modules()[package].__file__))]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def read(stage):
    """Return the kept results of a stage."""
    return [json.loads(line) for line in kept(stage).read_text().splitlines()] if kept(stage).exists() else []


def merge():
    """Return one row for each model, with the results of both stages."""
    fused = {(row["package"], row["model"]): row.get("fuse", f"crash: {row.get('detail')}") for row in read("fuse")}
    return [row | {"fuse": fused.get((row["package"], row["model"]), "not run")} for row in read("inspect")]


def examine(package, todo, seconds, source, stage):
    """Examine models of a package in processes of its environment and keep each result."""
    folder = install(package)
    paths = [str(folder), str(ROOT / "tests"), str(ROOT / "src")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__).with_name("examine.py")), package.name, stage, str(seconds)]
    while todo:
        current = None
        with subprocess.Popen([*command, *todo], env=environment, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                if not line.startswith("{"):  # what a package prints
                    continue
                row = json.loads(line)
                if "begin" in row:
                    current = row["begin"]
                else:
                    keep(row, package, source, stage)
                    todo.remove(row["model"])
                    current = None
        if process.returncode:  # a crash below Python, or the package could not be imported
            name = current or todo[0]
            text = f"the process ended with {process.returncode}"
            crash = {"verdict": "crash", "detail": text} if stage == "inspect" else {"fuse": f"crash: {text}"}
            keep({"model": name, **crash}, package, source, stage)
            todo.remove(name)


def keep(row, package, source, stage):
    """Append a result."""
    with kept(stage).open("a") as file:
        file.write(json.dumps({"package": package.name, **row, "source": source}) + "\n")
    print(
        f"  {row.get('verdict') or row['fuse']:9} {row['model']}  {str(row.get('detail', ''))[:110]}",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    main()
