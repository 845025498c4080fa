"""`addnorm bench`: the speed and the accuracy of the operation on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import click

from addnorm import bench as benchmark
from addnorm._util.files import check_writable
from addnorm._util.norms import Norm
from addnorm.cli._output import ArgumentError, argument_errors, print_json, save_result


def run(
    target: str | None,
    norms: tuple[Norm, ...],
    dtypes: tuple[str, ...],
    threads: int | None,
    rounds: int | None,
    quick: bool,
    compiled: bool | None,
) -> None:
    """Measure the speed and the accuracy of add + norm against PyTorch."""
    if target == "":
        raise ArgumentError("--json is '', expected the path of a file, or - for stdout")
    file = None if target in (None, "-") else Path(target)
    if file is not None:
        with argument_errors():
            check_writable(file, name="--json")
    cores = os.cpu_count() or 1
    if threads is not None and threads > cores:
        raise ArgumentError(f"--threads is {threads}, expected at most {cores}, the cores of this machine")
    chosen = norms or tuple(benchmark.NORMS), dtypes or tuple(benchmark.DTYPES)
    if quick:
        cells = benchmark.matrix(*chosen, benchmark.QUICK_SHAPES, threads=threads)
    else:
        cells = benchmark.whole(*chosen, threads=threads)
    document = benchmark.run(
        cells,
        rounds=rounds or (benchmark.QUICK_ROUNDS if quick else benchmark.ROUNDS),
        compiled=not quick if compiled is None else compiled,
        progress=benchmark.console(stderr=True),
    )
    if file is not None:
        save_result(file, lambda path: benchmark.write(document, path), "--json")
    if target == "-":
        print_json(document)
    else:
        benchmark.show(document, benchmark.console())
    if not document["complete"]:
        raise KeyboardInterrupt
    click.get_current_context().exit(3 if benchmark.failed_proofs(document) else 0)
