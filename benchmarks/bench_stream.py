"""What it costs to inspect, record and decompose a real model (MiniLM), into results/stream.json.

    python benchmarks/bench_stream.py [--threads 2] [--rounds 21]

README.md beside this file has the protocol.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from addnorm import bench
from addnorm.bench import streams
from addnorm.bench.tables import digits

RESULTS = Path(__file__).parent / "results" / "stream.json"


def main() -> int:
    """Measure, print, write; 130 if interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2, help="of torch (default 2)")
    parser.add_argument("--rounds", type=int, default=bench.ROUNDS)
    options = parser.parse_args()
    document = streams.run(
        streams.cells(threads=options.threads),
        rounds=options.rounds,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    bench.warn_if_busy(document, bench.console())
    for row in document["rows"]:
        print(f"{row['batch']:3} x {row['tokens']:3}   {row['variant']:18} {digits(row['median_us'] / 1000):>8} ms")
    for one in document["summary"]:
        judged = {True: "", False: "  MISSED", None: ""}[one["met"]]
        print(f"{one['value']:.3g}  {one['name']}{judged}")
    print(f"Written: {bench.write(document, RESULTS)}")
    return 0 if document["complete"] else 130


if __name__ == "__main__":
    raise SystemExit(main())
