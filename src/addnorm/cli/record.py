"""`addnorm record`: a model's residual streams by depth, forward and backward, as a table, a file and plots.

The paths and the packages that the files need are checked before the model runs.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import addnorm
from addnorm._util.files import atomic_path
from addnorm._util.numbers import format_count
from addnorm._util.optional import require
from addnorm._util.render import make_console
from addnorm.cli._model import (
    ModelOptions,
    describe_failure,
    inspect_model,
    load_model,
    model_facts,
    token_mask,
    with_model,
)
from addnorm.cli._output import (
    ArgumentError,
    check_file,
    check_folder,
    print_json,
    print_message,
    print_notes,
    save_result,
    stdout,
    working,
)
from addnorm.cli._probe import ProbeLoss, run_step
from addnorm.cli.decompose import print_shares
from addnorm.stream.models.hf import quiet
from addnorm.stream.models.inputs import format_inputs, random_inputs, read_texts
from addnorm.stream.models.load import LoadedModel
from addnorm.stream.record.recording import Recording

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["run"]

BATCH = 8  # texts a step
MOST_STEPS = 10_000  # with random inputs
PATIENCE, NEXT_LINE = 2.0, 10.0  # seconds until a line of progress where there is no bar, and between two such lines
FORMATS = {".json": None, ".parquet": "pyarrow"}  # of a recording, and the package that writes it
PLOTS = ("stream", "gradients", "writes", "similarity", "memory_map")


@with_model
def run(
    model: ModelOptions,
    steps: int | None,
    only: str | None,
    grads: bool,
    memory_map: bool,
    out: Path | None,
    plots: Path | None,
    as_json: bool,
) -> str | None:
    """Record the residual streams of a model, forward and backward, by depth."""
    _check_files(out, plots)
    rows = max(model.batch or BATCH, 1)
    texts = None if model.text is None else read_texts(model.text)[: steps and steps * rows]
    split = model.reads_text and (model.batch is None or model.batch > 0)  # otherwise loading refuses the batch
    loaded = load_model(dataclasses.replace(model, batch=None) if split else model, texts)
    inspection = inspect_model(loaded)
    if not inspection.sites:
        return describe_failure(inspection)
    layers = None if only is None else _parse_layers(only, max(stream.num_layers for stream in inspection.streams))
    batches = _make_batches(model, loaded, steps, rows)
    loss = ProbeLoss(model.seed) if grads else None
    mask = "attention_mask" if token_mask(loaded.kwargs) is not None else None
    finished, at_last_step = 0, Recording()
    with (
        redirect_stdout(sys.stderr),  # of what the model prints
        quiet(),
        addnorm.record(loaded.model, grads=grads, layers=layers, tokens=mask) as recording,
        _progress() as bar,
    ):
        announce = _Announcement(f"record {inspection.model}", bar.disable)
        try:
            for kwargs in bar.track(batches, description=f"record {inspection.model}"):
                announce(finished, len(batches))
                run_step(loaded, kwargs, loss)
                finished += 1
                at_last_step = Recording(recording.sites, recording.metadata, recording.memory_maps, recording.balances)
        except KeyboardInterrupt:
            if not finished:
                raise
    interrupted = finished < len(batches)
    if interrupted:
        recording = _copy_steps(recording, finished, at_last_step)
        recording.metadata["interrupted"] = f"after {finished} of {len(batches)} steps"
    recording.metadata |= model_facts(loaded)
    recording.metadata |= {"inputs": _describe_batches(loaded, batches, finished), "loss": loss and loss.sentence}
    if as_json:
        print_json(recording.to_dict())
    else:
        _print_recording(recording, memory_map, loaded.source)
    _write_files(recording, out, plots)
    if interrupted:
        raise KeyboardInterrupt
    return describe_failure(inspection)


def _print_recording(recording: Recording, memory_map: bool, *notes: str) -> None:
    """Print the recording, the shares with `--memory-map`, and notes."""
    console = stdout()
    console.print(recording)
    for name, (sources, shares) in recording.memory_maps.items() if memory_map else ():
        console.print()
        print_shares(
            console,
            f"Shares of {name} at its end, step {recording.steps[-1]}",
            dict(zip(sources, shares[-1], strict=True)),
        )
    print_notes(console, *filter(None, notes))


def _copy_steps(recording: Recording, finished: int, target: Recording) -> Recording:
    """Copy the finished steps: the recording also has the first half of the step that was interrupted."""
    for site, role, statistic, series in recording.iter_series():
        for step, value in zip(*series, strict=True):
            if step < finished:
                target.add(step, site, role, statistic, value)
    return target


def _make_batches(model: ModelOptions, loaded: LoadedModel, steps: int | None, rows: int) -> Sequence[dict[str, Any]]:
    """Return the model's keyword arguments for each step."""
    if loaded.texts is not None:
        count = -(-len(loaded.texts) // rows)
        if steps is not None and steps > count:
            texts = format_count(len(loaded.texts), "text")
            raise ArgumentError(f"--steps is {steps}, expected at most {count}: the inputs are {texts}, {rows} a step.")
        return [_slice(loaded.kwargs, k * rows, (k + 1) * rows) for k in range(steps or count)]
    if steps is None or steps == 1:
        return [loaded.kwargs]
    if model.input is not None or ":" in model.name:
        raise ArgumentError(
            f"--steps is {steps}, expected 1: MODEL {model.name!r} has one batch of inputs, from --input or its factory."
        )
    sizes = {name: value for name in ("tokens", "batch") if (value := getattr(model, name)) is not None}
    if steps > MOST_STEPS:
        raise ArgumentError(
            f"--steps is {steps}, expected at most {MOST_STEPS}: all inputs are made before the first step."
        )
    with working(f"make the inputs of {steps} steps"), quiet(), torch.no_grad():
        more = [random_inputs(loaded.model, model.seed + k, **sizes) for k in range(1, steps)]
    return [loaded.kwargs, *more]


def _slice(kwargs: dict[str, Any], first: int, end: int) -> dict[str, Any]:
    """Return some of the texts, without the padding that only the others need."""
    part = {name: value[first:end] for name, value in kwargs.items()}
    longest = int(part["attention_mask"].sum(1).max())
    return {name: value[:, :longest] for name, value in part.items()}


def _describe_batches(loaded: LoadedModel, batches: Sequence[dict[str, Any]], finished: int) -> str:
    """Return the inputs of all steps."""
    steps = format_count(finished, "step")
    if loaded.texts is None:
        more = f" in each of {steps}" if finished > 1 else ""
        return f"{format_inputs(loaded.args, batches[0])}{more}"
    masks = [batch["attention_mask"] for batch in batches[:finished]]
    texts, tokens = sum(map(len, masks)), sum(int(mask.sum()) for mask in masks)
    return f"{format_count(texts, 'text')} of {format_count(tokens, 'token')} in {steps}; padding is not counted"


def _parse_layers(only: str, depth: int) -> list[int]:
    """Return the layers of `--only`, counted from 0, where the option counts from 1."""
    layers: list[int] = []
    for part in only.split(","):
        span = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", part)
        first, last = (int(span[1]), int(span[2] or span[1])) if span else (0, 0)
        if not 1 <= first <= last <= depth:
            raise ArgumentError(
                f"--only is {only!r}, expected layers from 1 to {depth}, as in 1,{max(depth - 1, 1)}-{depth}."
            )
        layers += range(first - 1, last)
    return layers


def _progress() -> Progress:
    """Return a bar with the number of steps and the remaining time, for terminals."""
    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class _Announcement:
    """Lines on the progress of the steps, from time to time, where there is no bar.

    Args:
        title: what runs.
        is_shown: whether lines are printed.
    """

    def __init__(self, title: str, is_shown: bool) -> None:
        self.title, self.next = title, time.monotonic() + PATIENCE if is_shown else math.inf

    def __call__(self, finished: int, total: int) -> None:
        """Print a line if the last one is some time ago."""
        if time.monotonic() > self.next:
            self.next = time.monotonic() + NEXT_LINE
            print_message(f"{self.title}: {finished} of {total} steps")


# Files.


def _check_files(out: Path | None, plots: Path | None) -> None:
    """Check that the files of `--out` and `--plots` can be written, and that the packages that write them are installed."""
    if out is not None and out.suffix not in FORMATS:
        raise ArgumentError(
            f"--out is '{out}', expected a file that ends in {' or '.join(FORMATS)}: the ending sets the format."
        )
    try:
        if out is not None and (package := FORMATS[out.suffix]) is not None:
            require(package, "write Parquet")
        if plots is not None:
            require("matplotlib", "draw")
    except ImportError as error:
        raise ArgumentError(error) from None
    if out is not None:
        check_file(out, "--out")
    if plots is not None:
        if out is not None and out.resolve() in (plots.resolve(), *plots.resolve().parents):
            raise ArgumentError(f"--plots is '{plots}', the file of --out, expected a folder: choose another path")
        check_folder(plots, "--plots")
        for name in PLOTS:
            check_file(plots / f"{name}.png", "--plots")


def _write_files(recording: Recording, out: Path | None, plots: Path | None) -> None:
    """Write the files of `--out` and `--plots`, each of them whole or not at all."""
    if out is not None:
        save_result(out, recording.save, "--out")
        print_message(f"Written: {out}")
    if plots is None:
        return
    with working("draw the plots"):
        drawn = {f"{name}.png": _draw(recording, name) for name in PLOTS}
    figures = {name: figure for name, figure in drawn.items() if figure is not None}
    save_result(plots, partial(_save_plots, figures), "--plots")
    for name in drawn:
        print_message(f"Written: {plots / name}" if name in figures else f"Nothing to draw: {name}")


def _draw(recording: Recording, name: str) -> Figure | None:
    """Return one plot, or None where its numbers were not recorded."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4, 5.2), layout="constrained")
    try:
        getattr(recording.plot, name)(ax=figure.add_subplot())
    except ValueError:
        return None
    return figure


def _save_plots(figures: Mapping[str, Figure], folder: Path) -> None:
    """Write each figure to its file in the folder."""
    for name, figure in figures.items():
        with atomic_path(folder / name) as temporary:
            figure.savefig(temporary, format="png", dpi=150, bbox_inches="tight")
