"""Benchmark of this library against PyTorch on the user's machine: `addnorm bench` on a CPU, `addnorm.bench.gpu` on a GPU.

- `case`, `harness`: the parts that all benchmarks share, also those in `benchmarks/`: cases and targets as data, the run, the
  document, the command line; `pages`: numbers beside their targets, and as tables
- `timing`: the stopwatch; `environment`: the machine, the versions, the commit
- `jobs`: the operation's jobs in eager PyTorch and in addnorm; `onnx_peer`: the same in onnxruntime, `variants`: in kernel
  libraries for GPUs; `proofs`: errors against float64; `exactness`: errors, saved bytes, and other facts that do not depend on
  the machine
- `operation`: the benchmark on a CPU, and its document in a terminal; `gpu`: the benchmark on a GPU

`run` returns a document, the results as JSON types; `write` saves the document, and `show` prints it.
"""

from addnorm.bench.harness import failed_proofs, partial_path, write
from addnorm.bench.jobs import JOBS, NORMS
from addnorm.bench.operation import DTYPES, console, matrix, run, show, whole
from addnorm.bench.timing import ROUNDS

__all__ = [
    "DTYPES", "JOBS", "NORMS", "QUICK_ROUNDS", "QUICK_SHAPES", "ROUNDS", "console", "failed_proofs", "matrix",
    "partial_path", "run", "show", "whole", "write",
]  # fmt: skip

# `addnorm bench --quick`: does it work, and roughly how fast is it?
QUICK_SHAPES = ((1, 768), (128, 768), (512, 768))
QUICK_ROUNDS = 5
