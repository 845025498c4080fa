"""The lab's training beside a plain PyTorch loop, and what recording costs it, into results/lab.json.

    python benchmarks/bench_lab.py [--rounds 11]

README.md beside this file has the protocol.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from addnorm import bench
from addnorm.bench import labs
from addnorm.bench.tables import digits

RESULTS = Path(__file__).parent / "results" / "lab.json"


def main() -> int:
    """Measure, print, write; 130 if interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=labs.ROUNDS)
    options = parser.parse_args()
    document = labs.run(rounds=options.rounds, progress=lambda line: print(line, file=sys.stderr, flush=True))
    bench.warn_if_busy(document, bench.console())
    for cell, found in labs.by_cell(document["rows"]).items():
        times = "   ".join(f"{name} {digits(row['median_us'] / 1000)} ms" for name, row in found.items())
        print(f"{labs.title(cell):30} {times}")
    for one in document["summary"]:
        judged = {True: "", False: "  MISSED", None: ""}[one["met"]]
        print(f"{one['value']:.3g}  {one['name']}{judged}")
    print(f"Written: {bench.write(document, RESULTS)}")
    return 0 if document["complete"] else 130


if __name__ == "__main__":
    raise SystemExit(main())
