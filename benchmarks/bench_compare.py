"""The default comparison of wirings. Writes results/compare.json, which README and docs/comparing.md show.

The losses are those of the seeds, on one thread; they do not depend on the load of the machine. The seconds do.
"""

from __future__ import annotations

from rich.console import Console

from addnorm import lab
from addnorm.bench.case import Case, Document, Results
from addnorm.bench.harness import Benchmark, main


def measure(case: Case, *, rounds: int) -> Results:
    """Return the runs of the comparison, and the comparison."""
    results = lab.compare(case.compared, progress=Console(stderr=True))
    return {"comparisons": [results.to_dict()], "rows": list(results.runs)}


def finish(results: Results, head: Document) -> Document:
    """Return the comparison and its runs. The processes that train count as others, so their load is not known."""
    return {"load_of_others": None, "comparison": next(iter(results["comparisons"]), None), "rows": results["rows"]}


BENCHMARK = Benchmark(
    "compare", [Case(compared=("post_ln", "pre_ln"))], measure, parts=("comparisons", "rows"),
    finish=finish, threads=1, rounds=1, idle=False,
)  # fmt: skip

if __name__ == "__main__":  # its processes import it
    raise SystemExit(main(BENCHMARK))
