"""The commands without a MODEL argument: `bench`, `compare`, `demo`, `explore`, `trace`, `wirings`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from addnorm_cli.dispatch import run_command
from addnorm_cli.parameters import (
    COUNT,
    FILE,
    FOLDER,
    TEXT,
    Numbers,
    OneOf,
    Real,
    Whole,
    complete_presets,
    complete_wirings,
    json_option,
)

__all__ = ["bench", "compare", "demo", "explore", "trace", "wirings"]

DEPTH = Whole(1, 10_000)


@click.command()
@click.option("--json", "target", metavar="FILE", help="Write the results as JSON; - is stdout, instead of tables.")
@click.option("--norm", "norms", type=OneOf(["layer", "rms"]), multiple=True, help="Only this norm (repeatable).")
@click.option(
    "--dtype", "dtypes", type=OneOf(["float32", "bfloat16"]), multiple=True, help="Only this dtype (repeatable)."
)
@click.option("--threads", type=COUNT, metavar="N", help="Measure on 1 and on N threads (default: torch's number).")
@click.option(
    "--rounds", type=Whole(1, 10_000), metavar="N", help="Timings of each variant (default 21, with --quick 5)."
)
@click.option("--quick", is_flag=True, help="Three small sizes, few rounds, no torch.compile: under half a minute.")
@click.option("--compile/--no-compile", "compiled", default=None, help="Also time torch.compile (takes minutes).")
def bench(**options: Any) -> None:
    r"""Measure the speed and the accuracy of add + norm against PyTorch.

    addnorm is compared with eager PyTorch, torch.compile and, where it is installed, onnxruntime. Without --quick it takes
    several minutes. The exit code is 3 if an error is beyond its limit.

    \b
      addnorm bench --quick
      addnorm bench --norm rms --dtype bfloat16 --json results.json
    """
    run_command("bench", options)


@click.command()
@click.argument("compared", nargs=-1, metavar="[WIRING]...", shell_complete=complete_wirings)
@click.option("--text", type=TEXT, metavar="FILE", help="UTF-8 text to learn (default: Python's documentation).")
@click.option("--full", is_flag=True, help="Several depths, learning rates and seeds: about an hour.")
@click.option("--init-only", is_flag=True, help="No training: measure untrained stacks only.")
@click.option(
    "--out", type=FOLDER, default=Path("addnorm-compare"), metavar="DIR",
    help="Folder for results (default addnorm-compare).",
)  # fmt: skip
@click.option("--report", type=FILE, metavar="FILE", help="The report (default report.html in --out).")
@click.option("--layers", "num_layers", type=Numbers(int), metavar="N,...", help="Numbers of layers (default 12).")
@click.option("--rates", type=Numbers(float), metavar="X,...", help="Learning rates (default 1e-3).")
@click.option(
    "--warm-up", "warm_ups", type=Numbers(int), metavar="N,...",
    help="Steps of warm-up (default 0,100; at most half of --steps).",
)  # fmt: skip
@click.option("--seeds", type=Whole(1, 1000), metavar="N", help="Number of seeds (default 1).")
@click.option("--steps", type=COUNT, metavar="N", help="Steps of each run (default 200).")
@click.option("--d-model", type=COUNT, metavar="N", help="Width of the model (default 64).")
@click.option("--heads", "nhead", type=COUNT, metavar="N", help="Attention heads (default 4).")
@click.option("--tokens", type=COUNT, metavar="N", help="Characters in a sequence (default 64).")
@click.option("--batch", type=COUNT, metavar="N", help="Sequences in a step (default 16).")
@click.option("--norm", type=OneOf(["layer", "rms"]), help="LayerNorm (default) or RMSNorm.")
@click.option("--jobs", type=COUNT, metavar="N", help="Processes (default: one a core).")
@click.option("--cluster", metavar="ADDRESS", help="Train on a Dask cluster, as in tcp://10.0.0.5:8786.")
@json_option
def compare(**options: Any) -> None:
    r"""Train small models with different wirings and write a report.

    WIRING is a name of `addnorm wirings`, with options after a colon; post_ln and pre_ln by default. Without options it takes
    about two minutes and illustrates; --full is evidence. After Ctrl-C or a crash the same command continues.

    \b
      addnorm compare post_ln pre_ln
      addnorm compare pre_ln mix_ln:k=3 --layers 6,12 --rates 1e-3,3e-3
    """
    run_command("compare", options)


@click.command()
def demo() -> None:
    """Show in a few minutes what addnorm does.

    One token step by step, the speed, a real model inspected, recorded and fused, and two wirings trained. Its files are
    in the folder addnorm-demo. The exit code is 3 if a proof fails.
    """
    run_command("demo", {})


@click.command()
@click.option(
    "--port",
    type=Whole(0, 65535),
    metavar="N",
    help="Port; 0 is any free one (default 8017).",
)
@click.option(
    "--host", default="127.0.0.1", metavar="NAME", help="Address to listen at (default 127.0.0.1, this machine only)."
)
@click.option(
    "--recording", "recordings", type=FILE, multiple=True, metavar="FILE",
    help="File of `addnorm record --out` (repeatable).",
)  # fmt: skip
@click.option("--open", "opens_browser", is_flag=True, help="Also open the page in the browser.")
def explore(**options: Any) -> None:
    r"""Open the explorer, a local web page.

    Move the LayerNorm of a stack, follow one token, look into a recording, train two wirings side by side. Only this machine
    can reach the page, unless --host names another address; other machines then need the printed token. The page loads nothing
    from elsewhere. Ctrl-C ends the server.

    \b
      addnorm explore
      addnorm record minilm --out minilm.json --memory-map
      addnorm explore --recording minilm.json
    """
    run_command("explore", options, keep=False)


class _SignedCommand(click.Command):
    """Command whose arguments may be negative numbers. A space before the minus keeps click from reading an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [re.sub(r"^-(?=[\d.]|inf|nan)", " -", arg, flags=re.I) for arg in args])


@click.command(cls=_SignedCommand)
@click.argument("vectors", nargs=-1, metavar="[X SUBLAYER]")
@click.option(
    "--preset", metavar="NAME", shell_complete=complete_presets,
    help="Use a worked example instead of vectors.",
)  # fmt: skip
@click.option("--list", "listing", is_flag=True, help="List the worked examples.")
@click.option("--placement", type=OneOf(["post", "pre"]), help="Norm after the add (default) or before f.")
@click.option("--norm", type=OneOf(["layer", "rms"]), help="LayerNorm (default) or RMSNorm.")
@click.option("--gamma", "weight", metavar="VECTOR", help="Scale: d numbers, or one for all (default 1).")
@click.option("--beta", "bias", metavar="VECTOR", help="Shift: d numbers, or one for all (default 0).")
@click.option("--eps", type=Real(), metavar="X", help="Added to the variance (default 1e-5).")
@click.option("--grad", metavar="VECTOR", help="Gradient of the output (default 1,0,...,0).")
@click.option("--read-grad", metavar="VECTOR", help="Pre-LN: gradient of f's input (default: --grad).")
@click.option("--variance", type=OneOf(["biased", "unbiased"]), help="Divide by d (default) or by d - 1.")
@click.option("--eps-place", type=OneOf(["inside", "outside"]), help="Add eps inside the root (default) or to it.")
@click.option("--digits", type=Whole(1, 17), metavar="N", help="Significant digits (default 5).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, with all digits.")
def trace(**options: Any) -> None:
    r"""Compute Add & Norm of one token step by step, forward and backward.

    X is the token, d numbers separated by commas, and SUBLAYER the output of the sublayer f for it, as many numbers.

    \b
      addnorm trace 1,2,3 0.5,-1,1.5
      addnorm trace --preset lesson-001 --placement pre
    """
    run_command("trace", options, keep=False)


@click.command()
@click.argument("name", required=False, shell_complete=complete_wirings)
@click.option("--layers", type=DEPTH, metavar="N", help="Also show the constants for N layers.")
@click.option("--decoder-layers", type=DEPTH, metavar="M", help="Of an encoder of N and a decoder of M layers.")
@click.option(
    "--set", "settings", multiple=True, metavar="OPTION=VALUE", help="Option of the wiring, as in k=3 (repeatable)."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, with all rows.")
def wirings(**options: Any) -> None:
    r"""List the residual wirings, or describe one.

    A wiring says where the norms are placed and how a sublayer's output is added. With NAME: its equation, a drawing, its source,
    and with --layers its constants.

    \b
      addnorm wirings
      addnorm wirings deepnorm --layers 100
      addnorm wirings mix_ln --layers 12 --set k=3
    """
    run_command("wirings", options, keep=False)
