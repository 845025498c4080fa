"""Benchmark of this library against PyTorch on the user's machine: `addnorm bench` on a CPU, `addnorm.bench.gpu` on a GPU.

- `case`, `harness`: the parts that all benchmarks share, also those in `benchmarks/`: cases and targets as data, the run, the
  document, the command line; `pages`: numbers beside their targets, and as tables
- `timing`: the stopwatch; `environment`: the machine, the versions, the commit
- `jobs`: the operation's jobs in eager PyTorch and in addnorm; `peers`: in other libraries; `exactness`: errors against
  float64, saved bytes, and other facts that do not depend on the machine
- `operation`: the benchmark on a CPU; `gpu`: on a GPU

`harness.run` returns a document, the results as JSON types; `harness.write` saves it; `addnorm.cli.bench` prints it.
"""
