"""What addnorm.fuse brings a real model (MiniLM), in inference and in training steps, into results/fuse.json.

    python benchmarks/bench_fuse.py [--threads 2] [--rounds 21] [--no-inductor]

README.md beside this file has the protocol.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from addnorm import bench
from addnorm.bench import fuses
from addnorm.bench.tables import digits

RESULTS = Path(__file__).parent / "results" / "fuse.json"


def main() -> int:
    """Measure, print, write; 130 if interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2, help="of torch (default 2)")
    parser.add_argument("--rounds", type=int, default=bench.ROUNDS)
    parser.add_argument("--no-inductor", action="store_true", help="without Inductor, which compiles for a minute")
    options = parser.parse_args()
    document = fuses.run(
        fuses.cells(threads=options.threads),
        rounds=options.rounds,
        inductor=not options.no_inductor,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    bench.warn_if_busy(document, bench.console())
    for cell, found in fuses.by_cell(document["rows"]).items():
        times = "   ".join(f"{name} {digits(row['median_us'] / 1000)}" for name, row in found.items())
        print(f"{fuses.title(cell)}, ms:   {times}")
    for one in document["failures"]:
        print(f"{one['variant']}, {one['job']} {one['batch']} x {one['tokens']} {one['dtype']} failed: {one['error']}")
    for one in document["summary"]:
        judged = {True: "", False: "  MISSED", None: "  not measured"}[one["met"]]
        print(f"{'-' if one['value'] is None else digits(one['value'])}  {one['name']}{judged}")
    print(f"Written: {bench.write(document, RESULTS)}")
    return 0 if document["complete"] else 130


if __name__ == "__main__":
    raise SystemExit(main())
