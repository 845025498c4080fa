"""Add & Norm under torch.compile: the operator, its formulas fused by Inductor, torch alone, into results/compile.json.

    python benchmarks/bench_compile.py [--device cpu] [--threads 2] [--rounds 21] [--quick]

README.md beside this file has the protocol. A run that was interrupted goes on where it ended, while the commit is the same.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from addnorm import bench
from addnorm.bench import compiles, machine
from addnorm.bench.tables import digits

RESULTS = Path(__file__).parent / "results"
NAMES = {"cpu": "compile.json", "cuda": "compile_cuda.json"}


def begun(path: Path) -> dict[str, Any] | None:
    """What an interrupted run of this commit, with no change since, left behind."""
    partial = path.with_suffix(".partial.json")
    if not partial.exists():
        return None
    found, here = bench.read(partial), machine.environment()
    same = all(found[name] == here[name] for name in ("commit", "dirty", "versions"))
    return found if same and not found["dirty"] else None


def main() -> int:
    """Measure, print, write; 130 if interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=NAMES, default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default 2)")
    parser.add_argument("--rounds", type=int, default=bench.ROUNDS)
    parser.add_argument("--quick", action="store_true", help="one cell of each job, and nothing is written")
    options = parser.parse_args()
    chosen = compiles.cells(options.device, threads=options.threads)
    if options.quick:
        chosen = list({cell.job: cell for cell in chosen}.values())
    path = RESULTS / NAMES[options.device]
    document = compiles.run(
        chosen,
        rounds=options.rounds,
        before=None if options.quick else begun(path),
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    bench.warn_if_busy(document, bench.console())
    for cell, found in compiles.by_cell(document["rows"]).items():
        times = "   ".join(f"{name} {digits(row['median_us'])}" for name, row in found.items())
        print(f"{compiles.title(cell)}, us:   {times}")
    for one in document["failures"]:
        print(f"{one['variant']}, {one['job']} {one['rows']} x {one['d']} {one['dtype']} failed: {one['error']}")
    for one in document["summary"]:
        print(f"{one['value']:.2f}  {one['name']}")
    print(f"Chosen: {document['choice']}")
    if not options.quick:
        print(f"Written: {bench.write(document, path)}")
    return 0 if document["complete"] else 130


if __name__ == "__main__":
    raise SystemExit(main())
