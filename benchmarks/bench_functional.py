"""The whole matrix of `addnorm bench`, into results/functional.json, from which table.py makes the tables of README.md and docs/.

    python benchmarks/bench_functional.py [--threads 2] [--rounds 21] [--no-compile]

README.md beside this file has the protocol.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from addnorm import bench

RESULTS = Path(__file__).parent / "results" / "functional.json"


def main() -> int:
    """Measure, print, write; 3 if a proof failed, 130 if interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--threads", type=int, default=2, help="of torch (default 2, what the targets are for); one besides"
    )
    parser.add_argument("--rounds", type=int, default=bench.ROUNDS)
    parser.add_argument("--no-compile", dest="compiled", action="store_false", help="without torch.compile")
    options = parser.parse_args()
    cells = bench.whole(threads=options.threads)
    document = bench.run(cells, rounds=options.rounds, compiled=options.compiled, progress=bench.console(stderr=True))
    bench.show(document, bench.console())
    print(f"Written: {bench.write(document, RESULTS)}")
    if not document["complete"]:
        return 130
    return 3 if bench.failed_proofs(document) else 0


if __name__ == "__main__":
    raise SystemExit(main())
