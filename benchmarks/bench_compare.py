"""The default comparison of wirings, into results/compare.json: what README and docs/comparing.md say of it.

    python benchmarks/bench_compare.py

The losses are those of the seeds, on one thread; they do not depend on what else the machine does. The seconds do.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from addnorm import lab
from addnorm._util.jsonio import to_jsonable
from addnorm.bench import machine

RESULTS = Path(__file__).parent / "results" / "compare.json"
COMPARED = ("post_ln", "pre_ln")
SCHEMA = 1


def main() -> int:
    """Compares, prints, writes."""
    start, load = time.monotonic(), machine.load()
    found = lab.compare(COMPARED, progress=Console(stderr=True))
    document = {
        "schema": SCHEMA, "date": datetime.now(UTC).isoformat(timespec="seconds"), **machine.environment(), "load": load,
        "seconds": time.monotonic() - start, "comparison": found.to_dict(), "rows": list(found.runs),
    }  # fmt: skip
    Console().print(found)
    rows = ",\n".join(json.dumps(to_jsonable(run), allow_nan=False) for run in found.runs)
    head = json.dumps(to_jsonable({**document, "rows": []}), indent=1, allow_nan=False)
    temporary = RESULTS.with_suffix(".tmp")
    temporary.write_text(head.removesuffix("[]\n}") + f"[\n{rows}\n]}}\n", encoding="utf-8")
    temporary.replace(RESULTS)
    print(f"Written: {RESULTS}")
    return 0


if __name__ == "__main__":  # its processes import it
    raise SystemExit(main())
