"""The default comparison of wirings. Writes results/compare.json, which README and docs/comparing.md show.

The losses are those of the seeds, on one thread; they do not depend on the load of the machine. The seconds do.
"""

from __future__ import annotations

import time

from harness import RESULTS
from rich.console import Console

from addnorm import lab
from addnorm.bench import environment
from addnorm.bench.harness import Run, header, write

COMPARED = ("post_ln", "pre_ln")
SCHEMA = 1


def main() -> int:
    """Compare, print, write."""
    start, meter = time.monotonic(), environment.LoadMeter()
    results = lab.compare(COMPARED, progress=Console(stderr=True))
    document = {
        **header(SCHEMA, Run({}, ended="done")), **environment.describe(),
        **meter.columns(), "load_of_others": None,  # the processes that train are children of another one, not counted as own
        "seconds": time.monotonic() - start, "comparison": results.to_dict(), "rows": list(results.runs),
    }  # fmt: skip
    Console().print(results)
    print(f"Written: {write(document, RESULTS / 'compare.json')}")
    return 0


if __name__ == "__main__":  # its processes import it
    raise SystemExit(main())
