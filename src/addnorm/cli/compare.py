"""`addnorm compare`: wirings compared by training small models; the verdict on stdout, progress on stderr, a report."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from addnorm import lab
from addnorm import report as pages
from addnorm._util.files import UnwritableError
from addnorm._util.tables import make_console
from addnorm.cli._model import FILE
from addnorm.cli._output import ArgumentError, print_json, print_message, stdout
from addnorm.cli.inspect import check_report
from addnorm.cli.wirings import make_wiring
from addnorm.nn import Wiring

__all__ = ["compare"]

DEFAULT = ("post_ln", "pre_ln")
OUT = Path("addnorm-compare")
# The options, by the arguments that the errors of addnorm.lab name.
FLAGS = {name: f"--{name}" for name in ("text", "out", "seeds", "steps", "tokens", "batch", "jobs", "cluster", "rates")}
FLAGS |= {
    "d_model": "--d-model",
    "compared": "WIRINGS",
    "num_layers": "--layers",
    "warm_up": "--warm-up",
    "nhead": "--heads",
    "lr": "--rates",
}
COUNT = click.IntRange(1)


class _Numbers(click.ParamType[Any]):
    """Numbers separated by commas."""

    name = "numbers"

    def __init__(self, kind: Callable[[str], Any]) -> None:
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self.kind(part) for part in str(value).split(","))
        except ValueError:
            example = "6,12" if self.kind is int else "3e-4,1e-3"
            self.fail(f"{value!r}, expected numbers separated by commas, as in {example}.", param, ctx)


@click.command()
@click.argument("compared", nargs=-1, metavar="[WIRING]...")
@click.option("--text", type=FILE, metavar="FILE", help="UTF-8 text to learn (default: Python's documentation).")
@click.option(
    "--full", is_flag=True, help="The full protocol: several depths, learning rates and seeds. About an hour."
)
@click.option("--init-only", is_flag=True, help="No training: measure at init, also no_norm and no_residual.")
@click.option(
    "--out", type=FILE, default=OUT, metavar="DIR", help=f"Folder of results and checkpoints (default {OUT})."
)
@click.option("--report", type=FILE, metavar="FILE", help="The report (default report.html in --out).")
@click.option("--layers", "num_layers", type=_Numbers(int), metavar="N,...", help="Numbers of layers (default 12).")
@click.option("--rates", type=_Numbers(float), metavar="X,...", help="Learning rates (default 1e-3).")
@click.option(
    "--warm-up",
    "warm_ups",
    type=_Numbers(int),
    metavar="N,...",
    help="Steps of warm-up (default 0,100, or half of --steps).",
)
@click.option("--seeds", type=click.IntRange(1, 1000), metavar="N", help="Number of seeds (default 1).")
@click.option("--steps", type=COUNT, metavar="N", help="Steps of each run (default 200).")
@click.option("--d-model", type=COUNT, metavar="N", help="Width of the model (default 64).")
@click.option("--heads", "nhead", type=COUNT, metavar="N", help="Attention heads (default 4).")
@click.option("--tokens", type=COUNT, metavar="N", help="Characters in a sequence (default 64).")
@click.option("--batch", type=COUNT, metavar="N", help="Sequences in a step (default 16).")
@click.option("--norm", type=click.Choice(["layer", "rms"]), help="LayerNorm (default) or RMSNorm.")
@click.option("--jobs", type=COUNT, metavar="N", help="Processes (default: one a core).")
@click.option("--cluster", metavar="ADDRESS", help="Dask scheduler whose workers train, as in tcp://10.0.0.5:8786.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def compare(
    compared: tuple[str, ...], text: Path | None, full: bool, init_only: bool, out: Path, report: Path | None,
    jobs: int | None, cluster: str | None, as_json: bool, **settings: Any,
) -> None:  # fmt: skip
    r"""Train small models with different wirings and write a report.

    WIRING is a name of `addnorm wirings`, with options after a colon; post_ln and pre_ln by default. The default is an
    illustration that takes about two minutes; --full is the full protocol. After Ctrl-C or a crash the same command continues.

    \b
      addnorm compare post_ln pre_ln
      addnorm compare pre_ln deepnorm mix_ln:k=3 --layers 6,12 --rates 1e-3,3e-3 --seeds 3
    """
    wirings = [_parse_wiring(spec) for spec in compared or DEFAULT]
    path = out / "report.html" if report is None else report
    check_report(path)
    try:
        try:
            comparison = lab.compare(
                wirings, _make_protocol(lab.FULL if full else lab.ILLUSTRATION, settings),
                text=None if text is None else lab.read_text(text), out=out, jobs=jobs, cluster=cluster, training=not init_only,
                progress=make_console(stderr=True),
            )  # fmt: skip
        except (ValueError, ImportError, UnwritableError) as error:
            raise ArgumentError(_name_options(str(error))) from None
        if as_json:
            print_json(comparison.to_dict())
        else:
            stdout().print(comparison)
        print_message(f"Written: {pages.write(pages.build_comparison_page(comparison), path)}")
    except (lab.RunError, ImportError, OSError) as error:  # the last two: of the report
        raise click.ClickException(f"{str(error).rstrip('.')}. Finished runs are in {out}.") from None
    except KeyboardInterrupt:
        print_message(f"Interrupted. Finished runs are in {out}; the same command continues.")
        click.get_current_context().exit(130)


def _parse_wiring(spec: str) -> Wiring:
    """Return the wiring of NAME or NAME:OPTION=VALUE,..."""
    name, _, options = spec.partition(":")
    try:
        return make_wiring(name, options.split(",") if options else (), example="mix_ln:k=3")
    except ValueError as error:
        raise ArgumentError(error) from None


def _make_protocol(protocol: lab.Protocol, settings: dict[str, Any]) -> lab.Protocol:
    """Return the protocol with the settings from the options; None keeps the protocol's."""
    changes = {name: value for name, value in settings.items() if value is not None}
    if "seeds" in changes:
        changes["seeds"] = tuple(range(changes["seeds"]))
    if "steps" in changes:  # a short run must reach its learning rate
        changes = {"warm_ups": tuple(min(n, changes["steps"] // 2) for n in protocol.warm_ups)} | changes
    return replace(protocol, **changes)


def _name_options(sentence: str) -> str:
    """Replace the argument at the beginning of an error by the option."""
    return re.sub(r"^\w+", lambda word: FLAGS.get(word[0], word[0]), sentence)
