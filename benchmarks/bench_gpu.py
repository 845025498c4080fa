"""Add & Norm on a GPU beside eager PyTorch, torch.compile, Liger, flash-attn and QuACK. Writes results/gpu.json.

    python benchmarks/bench_gpu.py                       # under ten minutes; the most important cases first
    python benchmarks/bench_gpu.py --resume              # continues after an interrupt or at the end of the budget
    python benchmarks/bench_gpu.py --d 4096 --rows 8192 --job forward --variants eager addnorm
    python benchmarks/bench_gpu.py --device cpu --d 64 --rows 8      # a trial of everything but the clock

README.md in this folder has the protocol.
"""

from addnorm.bench.gpu import BENCHMARK
from addnorm.bench.harness import main

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
