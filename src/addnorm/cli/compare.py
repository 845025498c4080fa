"""`addnorm compare`: the wirings, options and files of a comparison; the verdict on stdout, progress on stderr."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

from addnorm.cli.screen import wide

if TYPE_CHECKING:  # what it needs is imported when it runs
    from addnorm.lab import Comparison, Protocol
    from addnorm.nn import Wiring

__all__ = ["compare"]

DEFAULT = ("post_ln", "pre_ln")
OUT = Path("addnorm-compare")
FLAGS = {name: f"--{name}" for name in ("text", "out", "seeds", "steps", "tokens", "batch", "jobs", "cluster", "rates")}
FLAGS |= {
    "d_model": "--d-model",
    "compared": "WIRINGS",
    "num_layers": "--layers",
    "warm_up": "--warm-up",
    "nhead": "--heads",
    "lr": "--rates",
}
FILE = click.Path(path_type=Path)


class Refused(click.ClickException):
    """The arguments were wrong, and the sentence says how."""

    exit_code = 2


class Numbers(click.ParamType[Any]):
    """Numbers with commas."""

    name = "numbers"

    def __init__(self, kind: Callable[[str], Any]) -> None:
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """`3e-4,1e-3` as a tuple."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self.kind(part) for part in str(value).split(","))
        except ValueError:
            example = "6,12" if self.kind is int else "3e-4,1e-3"
            self.fail(f"{value!r}, expected numbers with commas, as in {example}.", param, ctx)


def count(least: int, most: int | None = None) -> click.IntRange:
    """A whole number from so many."""
    return click.IntRange(least, most)


@click.command()
@click.argument("compared", nargs=-1, metavar="[WIRING]...")
@click.option(
    "--text", type=FILE, metavar="FILE", help="What the models learn, UTF-8; Python's documentation by default."
)
@click.option("--full", is_flag=True, help="The honest protocol: depths, a grid of rates, seeds. About an hour.")
@click.option("--init-only", is_flag=True, help="Train nothing: the figures at init, of no_norm and no_residual too.")
@click.option("--out", type=FILE, default=OUT, metavar="DIR", help=f"Results, and what is open (default {OUT}).")
@click.option("--report", type=FILE, metavar="FILE", help="The report (default report.html in --out).")
@click.option("--layers", "num_layers", type=Numbers(int), metavar="N,...", help="Depths (default 12).")
@click.option("--rates", type=Numbers(float), metavar="X,...", help="Learning rates (default 1e-3).")
@click.option(
    "--warm-up", "warm_ups", type=Numbers(int), metavar="N,...", help="Steps of warm-up (default 0 and 100, or half)."
)
@click.option("--seeds", type=count(1, 1000), metavar="N", help="How many seeds (default 1).")
@click.option("--steps", type=count(1), metavar="N", help="Of a run (default 200).")
@click.option("--d-model", "d_model", type=count(1), metavar="N", help="Width (default 64).")
@click.option("--heads", "nhead", type=count(1), metavar="N", help="Of the attention (default 4).")
@click.option("--tokens", type=count(1), metavar="N", help="Characters in a sequence (default 64).")
@click.option("--batch", type=count(1), metavar="N", help="Sequences in a step (default 16).")
@click.option("--norm", type=click.Choice(["layer", "rms"]), help="LayerNorm (default) or RMSNorm.")
@click.option("--jobs", type=count(1), metavar="N", help="Processes (default: one a core).")
@click.option("--cluster", metavar="ADDRESS", help="A Dask scheduler whose workers do it, as in tcp://10.0.0.5:8786.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def compare(
    compared: tuple[str, ...], text: Path | None, full: bool, init_only: bool, out: Path, report: Path | None,
    jobs: int | None, cluster: str | None, as_json: bool, **given: Any,
) -> None:  # fmt: skip
    r"""Train small models under different wirings, side by side, and write a report.

    WIRING is a name of `addnorm wirings`, with its options after a colon; post_ln and pre_ln by default. The default is an
    illustration and takes about two minutes; --full is the honest protocol. Ctrl-C, or a crash, loses nothing: the same
    command goes on.

    \b
      addnorm compare post_ln pre_ln
      addnorm compare pre_ln deepnorm mix_ln:k=3 --layers 6,12 --rates 1e-3,3e-3 --seeds 3
    """
    from addnorm import lab

    wirings = [wiring(spec) for spec in compared or DEFAULT]
    target = out / "report.html" if report is None else report
    errors = Console(stderr=True, highlight=False)
    try:
        with refusing():
            check_report(target)
            protocol = chosen(lab.FULL if full else lab.ILLUSTRATION, given)
            found = lab.compare(
                wirings, protocol, text=None if text is None else lab.read(text), out=out, jobs=jobs, cluster=cluster,
                training=not init_only, progress=errors,
            )  # fmt: skip
        if as_json:
            click.echo(json.dumps(document(found), indent=2, allow_nan=False))
        else:
            wide().print(found)
        errors.print(Text(f"Written: {written(found, target)}"), soft_wrap=True)
    except lab.RunError as error:
        raise click.ClickException(f"{str(error).rstrip('.')}. What is finished is in {out}.") from None
    except (ImportError, OSError) as error:  # of the report
        raise click.ClickException(f"{str(error).rstrip('.')}. What is finished is in {out}.") from None
    except KeyboardInterrupt:
        errors.print(Text(f"Interrupted. What is finished is in {out}; the same command goes on."), soft_wrap=True)
        click.get_current_context().exit(130)


@contextmanager
def refusing() -> Iterator[None]:
    """What a function says of its arguments, as a sentence about the options."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise Refused(in_flags(str(error))) from None


def wiring(spec: str) -> Wiring:
    """The wiring of NAME or NAME:OPTION=VALUE,..."""
    from addnorm.cli import wirings as cli_wirings

    name, _, options = spec.partition(":")
    try:
        return cli_wirings.made(name, options.split(",") if options else ())
    except ValueError as error:
        raise Refused(
            str(error).replace("--set came with", f"{spec!r} came with").replace("--set k=3", "mix_ln:k=3")
        ) from None


def chosen(protocol: Protocol, given: dict[str, Any]) -> Protocol:
    """The protocol with what was asked for."""
    told = {name: value for name, value in given.items() if value is not None}
    if "seeds" in told:
        told["seeds"] = tuple(range(told["seeds"]))
    if "steps" in told:  # else a short run would never reach its rate
        told = {"warm_ups": tuple(min(n, told["steps"] // 2) for n in protocol.warm_ups)} | told
    return replace(protocol, **told)


def in_flags(sentence: str) -> str:
    """What a function says of its argument, of the option; with a full stop."""
    name = re.match(r"\w+", sentence)
    flag = FLAGS.get(name[0], "") if name else ""
    return (flag + sentence[len(name[0]) :] if flag and name else sentence).rstrip(".") + "."


def check_report(target: Path) -> None:
    """Refuses a place for the report that cannot be written to, before anything runs."""
    from addnorm import report
    from addnorm._util.optional import require

    for package, to in (("matplotlib", "draw"), ("jinja2", "write a report")):
        require(package, to)
    try:
        report.check(target)
    except (ValueError, OSError) as error:
        raise Refused(re.sub("^path is", "--report is", str(error))) from None


def document(found: Comparison) -> Any:
    """JSON types."""
    from addnorm._util.jsonio import to_jsonable

    return to_jsonable(found.to_dict())


def written(found: Comparison, target: Path) -> Path:
    """The report, on the disk."""
    from addnorm import report

    return report.write(report.of_comparison(found), target)
