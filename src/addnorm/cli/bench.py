"""`addnorm bench`: the speed and the accuracy of the operation on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from addnorm import bench as benchmark

__all__ = ["bench"]


@click.command()
@click.option(
    "--json", "target", metavar="FILE", help="Write the results to FILE as JSON; - is stdout, without tables."
)
@click.option(
    "--norm", "norms", type=click.Choice(["layer", "rms"]), multiple=True, help="Only this norm (repeatable)."
)
@click.option(
    "--dtype", "dtypes", type=click.Choice(["float32", "bfloat16"]), multiple=True, help="Only this dtype (repeatable)."
)
@click.option(
    "--threads", type=click.IntRange(1), help="Threads of torch, beside one thread (default: all of torch's)."
)
@click.option("--rounds", type=click.IntRange(1), help="Number of timings of each variant.")
@click.option("--quick", is_flag=True, help="Three small sizes, few rounds, no torch.compile: under half a minute.")
@click.option("--compile/--no-compile", "compiled", default=None, help="Also time torch.compile (takes minutes).")
def bench(
    target: str | None,
    norms: tuple[Literal["layer", "rms"], ...],
    dtypes: tuple[str, ...],
    threads: int | None,
    rounds: int | None,
    quick: bool,
    compiled: bool | None,
) -> None:
    """Measure the speed and the accuracy of add + norm against PyTorch.

    The peers are eager PyTorch, torch.compile and onnxruntime where it is installed.
    """
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
    if target == "-":
        click.echo(benchmark.dumps(document), nl=False)
    else:
        benchmark.show(document, benchmark.console())
    if target and target != "-":
        click.echo(f"Written: {benchmark.write(document, Path(target))}", err=True)
    click.get_current_context().exit(130 if not document["complete"] else 3 if benchmark.failed_proofs(document) else 0)
