"""What `addnorm inspect --report FILE` does: inspect, record a forward and a backward, ablate each sublayer, write the page.

The page is written whole or not at all; a place that cannot be written to is refused before anything runs.
"""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from rich.console import Console

import addnorm
from addnorm import report as pages
from addnorm._util.optional import require
from addnorm.cli.record import NoGradients, Probe, step_of, tell
from addnorm.cli.stream import (
    Given,
    Refused,
    inputs_of,
    inspected,
    loaded_of,
    mask_of,
    show_inspection,
    unproved,
    working,
)
from addnorm.stream.ablate import Ablation
from addnorm.stream.find.inspection import Inspection
from addnorm.stream.models.hf import first_line
from addnorm.stream.models.load import Loaded, quiet
from addnorm.stream.record.recording import Recording

__all__ = ["inspect"]


def inspect(given: Given, screen: Console, *, as_json: bool, float64: bool, report: Path) -> str | None:
    """The table of the sublayers, and the report."""
    with _told():
        for package, to in (("matplotlib", "draw"), ("jinja2", "write a report")):
            require(package, to)
        pages.check(report)
    loaded = loaded_of(given)
    found = inspected(loaded, float64)
    show_inspection(screen, loaded, found, as_json)
    if not found.sites:
        return unproved(found)
    probe = Probe(given.seed)
    rec, trouble = _recorded(loaded, found, probe), []
    done: Sequence[Ablation] = ()
    errors = Console(stderr=True)
    try:
        with quiet():
            done = addnorm.ablate_each(
                found, *loaded.args, progress=errors if errors.is_terminal else False, **loaded.kwargs
            )
    except (RuntimeError, TypeError) as error:  # an add's operand cannot be exchanged; an output has no tensor
        trouble.append(f"It cannot be ablated ({first_line(error)}).")
    facts = {
        "model": given.name, "weights": loaded.source, "inputs": inputs_of(loaded).removeprefix("Inputs: "),
        "seed": str(given.seed), "loss": probe.sentence if _has_gradients(rec) else "none: forward only",
        "ablation": " ".join(trouble) or "what the sublayer writes is zero", "command": _command(given, report, float64),
    }  # fmt: skip
    with _told(), working(f"write {report}"):
        page = pages.of_model(found, rec, done, facts, title=given.name, foot=_foot())
        path = pages.write(page, report)
    tell(f"Written: {path}")
    return unproved(found)


@contextmanager
def _told() -> Iterator[None]:
    """What is wrong with the path, or missing, as the refusal of the option."""
    try:
        yield
    except ImportError as error:
        raise Refused(f"{error}.") from None
    except (OSError, ValueError) as error:
        if not str(error).startswith("path is "):
            raise
        raise Refused(f"--report is {str(error).removeprefix('path is ')}") from None


def _recorded(loaded: Loaded, found: Inspection, probe: Probe) -> Recording:
    """One forward and one backward; a forward alone where the output depends on no parameter."""
    masked = "attention_mask" if mask_of(loaded.kwargs) is not None else None
    for grads in (True, False):
        try:
            with (
                working(f"record {found.model}"),
                quiet(),
                addnorm.record(loaded.model, grads=grads, tokens=masked) as rec,
            ):
                step_of(loaded, loaded.kwargs, probe if grads else None)
            break
        except NoGradients:
            continue
    return rec


def _has_gradients(rec: Recording) -> bool:
    return bool(rec.series("grad", "l2") or rec.series("params", "grad_l2"))


def _command(given: Given, report: Path, float64: bool) -> str:
    """What makes the same report again."""
    words = ["addnorm", "inspect", given.name]
    for one in fields(Given):
        value = getattr(given, one.name)
        if one.name != "name" and value != one.default:
            words += [f"--{one.name}"] if value is True else [f"--{one.name}", str(value)]
    return shlex.join([*words, *["--float64"] * float64, "--report", str(report)])


def _foot() -> list[str]:
    made = ", ".join(f"{name} {version}" for name, version in pages.versions().items())
    return [f"Made with {made}, on {datetime.datetime.now(datetime.UTC):%Y-%m-%d at %H:%M} UTC."]
