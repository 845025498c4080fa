"""The command line: `addnorm COMMAND`.

Each command is in its own file, `addnorm/cli/COMMAND.py`, which is imported when the command runs or prints its help.
`_model.py` contains the shared code of commands on a model, `_output.py` that for printing and for errors.

Results go to stdout (`--json` for programs), progress goes to stderr. Exit codes: 0 done; 1 failed; 2 the arguments are wrong;
3 a proof failed; 130 interrupted.
"""

from __future__ import annotations

import importlib

import click

import addnorm

__all__ = ["main"]

# Each command and the first sentence of its help, which `addnorm --help` shows without importing the command.
COMMANDS = {
    "ablate": "Remove each sublayer in turn and measure how the output changes.",
    "bench": "Measure the speed and the accuracy of add + norm against PyTorch.",
    "compare": "Train small models with different wirings and write a report.",
    "decompose": "Compute each sublayer's share of a model's residual stream.",
    "demo": "Show in a few minutes what addnorm does.",
    "explore": "Open the explorer, a local web page.",
    "fuse": "Fuse the Add & Norms of a model and prove that its results stay the same.",
    "inspect": "Find the residual streams of a model and prove their equations.",
    "record": "Record the residual streams of a model, forward and backward, by depth.",
    "trace": "Compute Add & Norm of one token step by step, forward and backward.",
    "wirings": "List the residual wirings, or describe one.",
}


class _Commands(click.Group):
    """Group that imports a command's file when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"addnorm.cli.{cmd_name}"), cmd_name)
        command.help = (command.help or "").replace(r"\b", "\b")  # click's mark for lines that are not wrapped
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])


@click.group(
    cls=_Commands,
    help="The transformer's Add & Norm: fused, exact, explained.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(addnorm.__version__, package_name="addnorm")
def main() -> None:
    """Run a command of addnorm."""
