"""The operation on a GPU against its peers: what benchmarks/bench_gpu.py runs.

`run` gives one JSON document: the device, the protocol, a row a variant and cell, errors against float64, failures, who is
missing, the summary computed from the rows. Everything but the clock runs on a CPU too; such a document says so, and no target
is judged by it. benchmarks/README.md has the protocol.
"""

from addnorm.bench.gpu.cells import DTYPES, JOBS, Cell, plan
from addnorm.bench.gpu.clock import ROUNDS
from addnorm.bench.gpu.running import BUDGET, resumable, run, write
from addnorm.bench.gpu.summary import broken, by_cell, summarize
from addnorm.bench.gpu.tables import report, section
from addnorm.bench.gpu.variants import VARIANTS, missing

__all__ = [
    "BUDGET", "DTYPES", "JOBS", "ROUNDS", "VARIANTS", "Cell", "broken", "by_cell", "missing", "plan", "report", "resumable",
    "run", "section", "summarize", "write",
]  # fmt: skip
