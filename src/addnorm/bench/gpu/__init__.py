"""Benchmark of the operation on a GPU beside its peers, which benchmarks/bench_gpu.py runs.

- `plan`: the cases; `variants`: addnorm, PyTorch, torch.compile and kernel libraries
- `benchmark`: one case, device and call time, the bandwidth of a copy, the device, targets, the document as Markdown

Everything except the clock works on a CPU too. The document then names the CPU, and no target applies to it.
benchmarks/README.md has the protocol.
"""

from addnorm.bench.gpu.benchmark import BENCHMARK

__all__ = ["BENCHMARK"]
