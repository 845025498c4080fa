"""`addnorm demo`, which `make demo` runs: nine parts, each a heading, a sentence that says what to look at, and a table.

- `operation`: one token step by step, real tensors against PyTorch, the bias gradient in bfloat16, the speed
- `model`: the residual streams of MiniLM, their proof and their statistics by depth; fused Add & Norms; a report
- `training`: post-LN and pre-LN trained side by side, with a report

A part returns whether its proof held, None where it proves nothing, or why it was left out. The files are in the folder
addnorm-demo.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from addnorm._util.files import UnwritableError, check_writable
from addnorm.cli._output import stdout
from addnorm.cli.demo import model, operation, training
from addnorm.cli.demo._parts import FOLDER, RECORDING, Part
from addnorm.ops import cpu

PARTS: tuple[Part, ...] = (
    operation.one_token, operation.real_tensors, operation.bias_gradient, operation.speed, model.find_streams,
    model.record_by_depth, model.fuse_model, training.compare_wirings, model.write_report,
)  # fmt: skip


def run() -> None:
    """Print the demonstration and exit with 3 where a proof failed.

    Raises:
        click.ClickException: the folder of the demonstration cannot be written.
    """
    try:
        check_writable(RECORDING, name="the recording")
    except UnwritableError as error:
        place = str(error).rpartition(": ")[0]
        raise click.ClickException(f"{place}: run the command where it can make the folder {FOLDER}.") from None
    click.get_current_context().exit(0 if show(stdout()) else 3)


def show(console: Console) -> bool:
    """Print the demonstration and return whether every proof held."""
    if cpu.ISA is None:
        console.print(
            f"[yellow]The C++ kernels are absent[/]: {cpu.DETAIL}. In their place PyTorch computes the formulas."
        )
    results = [part(console) for part in PARTS]
    proofs = [result for result in results if isinstance(result, bool)]
    failed, left_out = proofs.count(False), [result for result in results if isinstance(result, str)]
    if failed:
        console.print(f"\n[bold red]{failed} of {len(proofs)} proofs failed.[/]")
    else:
        console.print(f"\nEvery proof {'of the parts that ran ' * bool(left_out)}held.")
    if left_out:
        console.print(f"[yellow]{len(left_out)} of {len(PARTS)} parts were left out or cut short:[/]")
        for reason in dict.fromkeys(left_out):
            console.print(Text(f"  {reason}"), soft_wrap=True)
    recording = f" {RECORDING}" if RECORDING.exists() else ""
    console.print("\nTo move the LayerNorm yourself and look into the recording, open the explorer in a browser:")
    console.print(Text(f"  {_program()} explore{recording}", "bold"), soft_wrap=True)
    return not failed


def _program() -> str:
    """Return how to call this program: with its path, where the shell does not find it by its name."""
    program = Path(sys.argv[0])
    if program.name != "addnorm" or shutil.which("addnorm") == str(program):
        return "addnorm"
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)
