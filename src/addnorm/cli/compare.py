"""`addnorm compare`: wirings compared by training small models; the verdict on stdout, progress on stderr, a report.

`run` has many parameters, since click passes each option of the command line as one.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from addnorm import lab
from addnorm import report as pages
from addnorm._util.files import UnwritableError
from addnorm._util.memory import free_memory
from addnorm._util.numbers import format_bytes
from addnorm._util.render import make_console
from addnorm.cli._output import (
    ArgumentError,
    ProofError,
    argument_errors,
    check_folder,
    command_line,
    name_flag,
    option_names,
    print_result,
    save_result,
    working,
)
from addnorm.cli.inspect import check_report
from addnorm.cli.wirings import check_depth, make_wiring
from addnorm.lab.run import MAXIMA
from addnorm.nn import Wiring

DEFAULT = ("post_ln", "pre_ln")
PER_CORE = 4  # processes a core, at most: more would only wait for each other, and take memory
# What sets the arguments that errors of addnorm.lab name, beside the options of these names.
OTHER_NAMES = {"compared": "WIRINGS", "warm_up": "--warm-up", "lr": "--rates"}


def run(
    compared: tuple[str, ...], text: Path | None, full: bool, init_only: bool, out: Path, report: Path | None,
    jobs: int | None, cluster: str | None, as_json: bool, **settings: Any,
) -> None:  # fmt: skip
    """Train small models with different wirings and write a report."""
    with argument_errors():
        wirings = [_parse_wiring(spec) for spec in compared or DEFAULT]
    most = PER_CORE * (os.cpu_count() or 1)
    if jobs is not None and jobs > most and cluster is None:
        raise ArgumentError(f"--jobs is {jobs}, expected at most {most}, {PER_CORE} processes a core")
    path = out / "report.html" if report is None else report
    flags = option_names() | OTHER_NAMES
    if init_only:
        _check_init_only({"text": text, "full": full or None, **settings})
    if report is not None:
        check_report(report)
    check_folder(out, "--out")
    check_report(path)
    try:
        with argument_errors(flags):
            protocol = _make_protocol(lab.FULL if full else lab.ILLUSTRATION, settings)
            if not init_only:
                _check_memory(protocol)
                for wiring in wirings:
                    for depth in (min(protocol.num_layers), max(protocol.num_layers)):
                        check_depth(wiring, depth)
            content = None if text is None else lab.read_text(text)
            try:
                comparison = lab.compare(
                    wirings, protocol, text=content, out=out, jobs=jobs, cluster=cluster, training=not init_only,
                    progress=make_console(stderr=True),
                )  # fmt: skip
            except UnwritableError as error:  # a disk that fills up
                raise click.ClickException(name_flag(error, flags)) from None
        print_result(as_json, comparison.to_dict(), comparison)
        with working("draw the report"):
            page = pages.build_comparison_page(comparison, {"command": command_line()})
        save_result(path, lambda file: pages.write(page, file), "--report")
        unmet = [check.name for check in comparison.checks if check.holds is False]
        if unmet:
            raise ProofError(f"Published results do not hold for the untrained stacks: {' '.join(unmet)}")
    except (lab.RunError, ImportError, OSError) as error:  # the last two: of the report
        raise click.ClickException(f"{str(error).rstrip('.')}. Finished runs are in {out}.") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Finished runs are in {out}; the same command continues.") from None


def _parse_wiring(spec: str) -> Wiring:
    """Return the wiring of NAME or NAME:OPTION=VALUE,..."""
    if "," in spec.partition(":")[0]:
        raise ArgumentError(f"WIRING is '{spec}', expected names separated by spaces: {' '.join(spec.split(','))}.")
    return make_wiring(spec, example="mix_ln:k=3", argument="WIRING")


def _check_memory(protocol: lab.Protocol) -> None:
    """Refuse models that cannot fit into memory, by a lower bound: weights with their gradients and moments, activations."""
    usual = lab.ILLUSTRATION
    layers, width, rows = max(protocol.num_layers), protocol.d_model, protocol.batch * protocol.tokens
    weights = 16.0 * layers * 12 * width**2
    activations = 4.0 * layers * rows * (12 * width + protocol.nhead * protocol.tokens)
    free = free_memory()
    if weights + activations > free and layers <= MAXIMA["num_layers"]:  # more are refused by the run
        sizes = {
            "--layers": (layers, usual.num_layers[0]), "--d-model": (width, usual.d_model),
            "--tokens": (protocol.tokens, usual.tokens), "--batch": (protocol.batch, usual.batch),
        }  # fmt: skip
        option = max(sizes, key=lambda name: sizes[name][0] / sizes[name][1])
        raise ArgumentError(
            f"{option} is {sizes[option][0]}, for which training takes at least {format_bytes(weights + activations)} of "
            f"memory, expected at most the {format_bytes(free)} that are free: use a smaller number"
        )


def _check_init_only(settings: dict[str, Any]) -> None:
    """Refuse options that have no effect without training."""
    for name, value in settings.items():
        if value is not None:
            option = option_names()[name]
            raise ArgumentError(f"{option} is set beside --init-only, which trains nothing: leave {option} out")


def _make_protocol(protocol: lab.Protocol, settings: dict[str, Any]) -> lab.Protocol:
    """Return the protocol with the settings that are not None. Unset warm-ups are computed from the number of steps."""
    changes = {name: value for name, value in settings.items() if value is not None}
    if "seeds" in changes:
        changes["seeds"] = tuple(range(changes["seeds"]))
    return replace(protocol, **{"warm_ups": ()} | changes)
