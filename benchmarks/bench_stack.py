"""Whole encoders, fused, in plain PyTorch and as torch.nn.TransformerEncoder, into results/stack.json.

    python benchmarks/bench_stack.py [--threads 2] [--rounds 21]

README.md beside this file has the protocol.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from addnorm import bench
from addnorm.bench import stacks
from addnorm.bench.tables import digits

RESULTS = Path(__file__).parent / "results" / "stack.json"


def main() -> int:
    """Measure, print, write; 130 if interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2, help="of torch (default 2)")
    parser.add_argument("--rounds", type=int, default=bench.ROUNDS)
    options = parser.parse_args()
    document = stacks.run(
        stacks.cells(threads=options.threads),
        rounds=options.rounds,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    bench.warn_if_busy(document, bench.console())
    for cell, found in stacks.by_cell(document["rows"]).items():
        times = " ".join(f"{name} {digits(row['median_us']):>9}" for name, row in found.items())
        ratios = " ".join(f"x {name} {stacks.ratio(found, name):.2f}" for name in stacks.PEERS)
        print(f"{cell.wiring:8}{cell.job:10}{cell.batch:3} x {cell.tokens:3} x {cell.d:3}   {times}   {ratios}")
    for one in document["summary"]:
        print(f"{one['value']:.2f}  {one['name']}")
    print(f"Written: {bench.write(document, RESULTS)}")
    return 0 if document["complete"] else 130


if __name__ == "__main__":
    raise SystemExit(main())
