"""Benchmark of this library against PyTorch on the user's machine: `addnorm bench` on a CPU, `addnorm.bench.gpu` on a GPU.

- `cases`: norms, jobs, shapes and dtypes, and each job in eager PyTorch and in addnorm; `onnx_peer`: the same in onnxruntime
- `timing`: the stopwatch; `environment`: the machine, the versions, the commit
- `accuracy`, `facts`: errors against float64, saved bytes, and other facts that do not depend on the machine
- `operation`: one case, the targets, the whole run; `tables`: its document for a terminal
- `harness`, `targets`: what every benchmark shares, those of the folder `benchmarks/` included

`run` returns a document; `write` saves it, `show` prints it.
"""

from addnorm._util.jsonio import dumps
from addnorm.bench.cases import DTYPES, JOBS, NORMS, PLAIN, SHAPES, matrix, whole
from addnorm.bench.harness import Case, Document, partial_path, read, write
from addnorm.bench.operation import failed_proofs, measure, run
from addnorm.bench.tables import console, show, warn_if_busy
from addnorm.bench.timing import ROUNDS

__all__ = [
    "DTYPES", "JOBS", "NORMS", "PLAIN", "QUICK_ROUNDS", "QUICK_SHAPES", "ROUNDS", "SHAPES", "Case", "Document", "console",
    "dumps", "failed_proofs", "matrix", "measure", "partial_path", "read", "run", "show", "warn_if_busy", "whole", "write",
]  # fmt: skip

# `addnorm bench --quick`: does it work, and roughly how fast is it?
QUICK_SHAPES = ((1, 768), (128, 768), (512, 768))
QUICK_ROUNDS = 5
