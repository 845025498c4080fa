"""The operation on a GPU beside its peers: what benchmarks/bench_gpu.py runs.

- `cases`: jobs, dtypes, the plan, the tensors of a case; `variants`: addnorm, PyTorch, torch.compile and kernel libraries
- `check`: each variant against float64; `clock`, `device`: device, host and call time, the device and the bandwidth of a copy
- `running`: one case and the whole run; `summary`: targets, and the document as Markdown

`run` returns a document. Everything except the clock works on a CPU too. The document then names the CPU, and no target
applies to it.
benchmarks/README.md has the protocol.
"""

from addnorm.bench.gpu.cases import DTYPES, FIELDS, JOBS, plan, title
from addnorm.bench.gpu.clock import ROUNDS
from addnorm.bench.gpu.running import BUDGET, resumable, run
from addnorm.bench.gpu.summary import failed_cases, report, section, summarize
from addnorm.bench.gpu.variants import VARIANTS, missing

__all__ = [
    "BUDGET", "DTYPES", "FIELDS", "JOBS", "ROUNDS", "VARIANTS", "failed_cases", "missing", "plan", "report", "resumable", "run",
    "section", "summarize", "title",
]  # fmt: skip
