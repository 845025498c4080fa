"""`addnorm record`: a model's residual streams by depth, forward and backward, as a table, a file and plots.

The paths and the packages that the files need are checked before the model runs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import addnorm
from addnorm._util.files import UnwritableError, atomic_path, check_writable
from addnorm._util.numbers import format_count
from addnorm._util.optional import require
from addnorm._util.tables import make_console
from addnorm.cli._model import (
    FILE,
    ModelOptions,
    describe_failure,
    inspect_model,
    load_model,
    model_command,
    model_facts,
    token_mask,
)
from addnorm.cli._output import ArgumentError, print_json, print_message, print_notes, stdout
from addnorm.cli._probe import ProbeLoss, run_step
from addnorm.cli.decompose import print_shares
from addnorm.stream.models.hf import quiet
from addnorm.stream.models.inputs import format_inputs, random_inputs, read_texts
from addnorm.stream.models.load import LoadedModel
from addnorm.stream.record.recording import Recording

__all__ = ["record"]

BATCH = 8  # texts a step
FORMATS = {".json": None, ".parquet": "pyarrow"}  # of a recording, and the package that writes it
PLOTS = ("stream", "gradients", "writes", "similarity", "memory_map")


@click.command()
@model_command
@click.option("--steps", type=click.IntRange(1), metavar="N", help="Number of batches (default: all texts, or one).")
@click.option("--only", metavar="LAYERS", help="Record only these layers, counted from 1: 1,3-5.")
@click.option("--no-grads", "grads", flag_value=False, default=True, help="Record the forward pass only.")
@click.option("--memory-map", is_flag=True, help="Also print each source's share of the stream at its end.")
@click.option("--out", type=FILE, metavar="FILE", help="Write the recording to FILE: .json or .parquet.")
@click.option("--plots", type=FILE, metavar="DIR", help="Write plots by depth to DIR, as PNG files.")
def record(
    model: ModelOptions,
    steps: int | None,
    only: str | None,
    grads: bool,
    memory_map: bool,
    out: Path | None,
    plots: Path | None,
    as_json: bool,
) -> str | None:
    r"""Record the residual streams of a model, forward and backward, by depth.

    MODEL is as in `addnorm inspect`. A step is one batch of texts (8, or --batch); nothing is trained. Ctrl-C keeps the steps
    that were finished.

    \b
      addnorm record minilm --text FILE --out run.parquet --plots plots
    """
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
        quiet(),
        addnorm.record(loaded.model, grads=grads, layers=layers, tokens=mask) as recording,
        _progress() as bar,
    ):
        try:
            for kwargs in bar.track(batches, description=f"record {inspection.model}"):
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
    recording.metadata |= model_facts(loaded) | {"loss": loss and loss.sentence}
    if as_json:
        print_json(recording.to_dict())
    else:
        _print_recording(recording, memory_map, _describe_batches(loaded, batches[:finished]), loaded.source)
    _write_files(recording, out, plots)
    if interrupted:
        raise KeyboardInterrupt
    return describe_failure(inspection)


def _print_recording(recording: Recording, memory_map: bool, *notes: str) -> None:
    """Print the table, the shares with `--memory-map`, and notes."""
    console = stdout()
    console.print(recording)
    for name, (sources, shares) in recording.memory_maps.items() if memory_map else ():
        console.print()
        print_shares(
            console,
            f"Shares of {name} at its end, step {recording.steps[-1]}",
            dict(zip(sources, shares[-1], strict=True)),
        )
    note = recording.metadata.get("note")
    print_notes(
        console, *(str(text) for text in (note and f"Note: {note}.", recording.metadata["loss"], *notes) if text)
    )


def _copy_steps(recording: Recording, finished: int, target: Recording) -> Recording:
    """Copy the finished steps: the recording also has the first half of the step that was interrupted."""
    for site, role, statistic, series in recording.iter_series():
        for step, value in zip(*series, strict=True):
            if step < finished:
                target.add(step, site, role, statistic, value)
    return target


def _make_batches(model: ModelOptions, loaded: LoadedModel, steps: int | None, rows: int) -> list[dict[str, Any]]:
    """Return the model's keyword arguments for each step."""
    if loaded.texts is not None:
        count = -(-len(loaded.texts) // rows)
        if steps is not None and steps > count:
            raise ArgumentError(
                f"--steps is {steps}, expected at most {count}: there are {len(loaded.texts)} texts, {rows} a step."
            )
        return [_slice(loaded.kwargs, k * rows, (k + 1) * rows) for k in range(steps or count)]
    if steps is None or steps == 1:
        return [loaded.kwargs]
    if model.input is not None or ":" in model.name:
        raise ArgumentError(
            f"--steps is {steps}, expected 1: MODEL {model.name!r} has one batch of inputs, from --input or its factory."
        )
    sizes = {name: value for name in ("tokens", "batch") if (value := getattr(model, name)) is not None}
    with quiet(), torch.no_grad():
        more = [random_inputs(loaded.model, model.seed + k, **sizes) for k in range(1, steps)]
    return [loaded.kwargs, *more]


def _slice(kwargs: dict[str, Any], first: int, end: int) -> dict[str, Any]:
    """Return some of the texts, without the padding that only the others need."""
    part = {name: value[first:end] for name, value in kwargs.items()}
    longest = int(part["attention_mask"].sum(1).max())
    return {name: value[:, :longest] for name, value in part.items()}


def _describe_batches(loaded: LoadedModel, batches: list[dict[str, Any]]) -> str:
    """Return the inputs of all steps in a sentence."""
    steps = format_count(len(batches), "step")
    if loaded.texts is None:
        more = f" in each of {steps}" if len(batches) > 1 else ""
        return f"Inputs: {format_inputs(loaded.args, batches[0])}{more}."
    masks = [batch["attention_mask"] for batch in batches]
    texts, tokens = sum(map(len, masks)), sum(int(mask.sum()) for mask in masks)
    return f"Inputs: {texts} texts of {tokens} tokens in {steps}; padding is not counted."


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


# Files.


@contextmanager
def _file_errors(option: str) -> Iterator[None]:
    """Turn a missing package and a path that cannot be written into an error of the option."""
    try:
        yield
    except UnwritableError as error:
        raise ArgumentError(error.renamed(option)) from None
    except OSError as error:
        raise ArgumentError(f"{option} cannot be written ({error.strerror}): choose another path.") from None
    except ImportError as error:
        raise ArgumentError(error) from None


def _check_files(out: Path | None, plots: Path | None) -> None:
    """Check that the files of `--out` and `--plots` can be written."""
    if out is not None:
        if out.suffix not in FORMATS:
            raise ArgumentError(
                f"--out is '{out}', expected a file that ends in {' or '.join(FORMATS)}: the ending sets the format."
            )
        with _file_errors("--out"):
            if (package := FORMATS[out.suffix]) is not None:
                require(package, "write Parquet")
            check_writable(out)
    if plots is not None:
        with _file_errors("--plots"):
            require("matplotlib", "draw")
            check_writable(plots / PLOTS[0])


def _write_files(recording: Recording, out: Path | None, plots: Path | None) -> None:
    """Write the files of `--out` and `--plots`, each of them whole or not at all."""
    if out is not None:
        with _file_errors("--out"):
            print_message(f"Written: {recording.save(out)}")
    for name in PLOTS if plots is not None else ():
        path = Path(plots or "") / f"{name}.png"
        with _file_errors("--plots"):
            written = _draw(recording, name, path)
        print_message(f"Written: {path}" if written else f"Nothing to draw: {path.name}")


def _draw(recording: Recording, name: str, path: Path) -> bool:
    """Write one plot and return True, or return False where its numbers were not recorded."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4, 5.2), layout="constrained")
    try:
        getattr(recording.plot, name)(ax=figure.add_subplot())
    except ValueError:
        return False
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150, bbox_inches="tight")
    return True
