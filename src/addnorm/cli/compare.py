"""`addnorm compare`: wirings compared by training small models; the verdict on stdout, progress on stderr, a report."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from addnorm import lab
from addnorm import report as pages
from addnorm._util.files import UnwritableError
from addnorm._util.tables import make_console
from addnorm.cli._output import ArgumentError, print_json, print_message, save_result, stdout, working
from addnorm.cli.inspect import check_report
from addnorm.cli.wirings import make_wiring
from addnorm.nn import Wiring

__all__ = ["run"]

DEFAULT = ("post_ln", "pre_ln")
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


def run(
    compared: tuple[str, ...], text: Path | None, full: bool, init_only: bool, out: Path, report: Path | None,
    jobs: int | None, cluster: str | None, as_json: bool, **settings: Any,
) -> None:  # fmt: skip
    """Train small models with different wirings and write a report."""
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
        with working("draw the report"):
            page = pages.build_comparison_page(comparison)
        save_result(path, lambda file: pages.write(page, file), "--report")
        print_message(f"Written: {path}")
    except (lab.RunError, ImportError, OSError) as error:  # the last two: of the report
        raise click.ClickException(f"{str(error).rstrip('.')}. Finished runs are in {out}.") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Finished runs are in {out}; the same command continues.") from None


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
