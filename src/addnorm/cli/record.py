"""`addnorm record`: a model's residual streams by depth, forward and backward, as a table, a file and plots.

The paths and the packages that the files need are checked before the model runs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import addnorm
from addnorm._util.blocks import Paragraph
from addnorm._util.files import atomic_path, check_writable
from addnorm._util.numbers import format_count
from addnorm._util.optional import require
from addnorm._util.render import print_blocks
from addnorm.cli._model import (
    ModelOptions,
    ProbeLoss,
    check_proof,
    find_streams,
    load_model,
    mask_name,
    model_facts,
    run_step,
    with_model,
)
from addnorm.cli._output import (
    ArgumentError,
    argument_errors,
    check_folder,
    print_json,
    print_message,
    print_notes,
    save_result,
    stdout,
    working,
)
from addnorm.stream.decomposition import tabulate_shares
from addnorm.stream.models.hf import quiet
from addnorm.stream.models.inputs import format_inputs, random_inputs, read_texts
from addnorm.stream.models.load import LoadedModel
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.store import check_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCH = 8  # texts a step
MOST_STEPS = 10_000  # with random inputs
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
    states: Path | None,
    as_json: bool,
) -> None:
    """Record the residual streams of a model, forward and backward, by depth."""
    _check_files(out, plots, states, model.input)
    rows = model.batch or BATCH
    texts = None if model.text is None else read_texts(model.text)[: steps and steps * rows]
    split = model.reads_text and (model.batch is None or model.batch > 0)  # otherwise loading refuses the batch
    loaded = load_model(dataclasses.replace(model, batch=None) if split else model, texts)
    inspection = find_streams(loaded)
    layers = None if only is None else _parse_layers(only, 1 + max(site.layer for site in inspection.list_sites()))
    batches = _make_batches(model, loaded, steps, rows)
    loss = ProbeLoss(model.seed) if grads else None
    finished, at_last_step = 0, Recording()
    with (
        working(f"record {inspection.model}", len(batches)) as advance,
        quiet(),
        addnorm.record(loaded.model, grads=grads, layers=layers, tokens=mask_name(loaded)) as recording,
    ):
        try:
            for kwargs in batches:
                run_step(loaded, kwargs, loss)
                finished += 1
                advance()
                at_last_step = Recording(recording.sites, recording.metadata, recording.memory_maps, recording.balances)
        except KeyboardInterrupt:
            if not finished:
                raise
    interrupted = finished < len(batches)
    if interrupted:
        recording = _copy_steps(recording, finished, at_last_step)
        recording.metadata["interrupted"] = f"after {finished} of {len(batches)} steps"
    recording.metadata |= model_facts(loaded)
    recording.metadata |= {"inputs": _describe_batches(loaded, batches[:finished]), "loss": loss and loss.sentence}
    if as_json:
        print_json(recording.to_dict())
    else:
        _print_recording(recording, memory_map, loaded.source)
    _write_files(recording, out, plots)
    if states is not None:
        save_result(states, lambda path: addnorm.save_states(inspection, path), "--states")
    if interrupted:
        raise KeyboardInterrupt
    check_proof(inspection)


def _print_recording(recording: Recording, memory_map: bool, *notes: str) -> None:
    """Print the recording, the shares with `--memory-map`, and notes."""
    console = stdout()
    console.print(recording)
    for name, (sources, shares) in recording.memory_maps.items() if memory_map else ():
        title = f"Shares of {name} at its end, step {recording.steps[-1]}"
        print_blocks(console, Paragraph(), tabulate_shares(title, dict(zip(sources, shares[-1], strict=True))))
    print_notes(console, *notes)


def _copy_steps(recording: Recording, finished: int, target: Recording) -> Recording:
    """Copy the finished steps to `target` and return it. The recording also has a part of the interrupted step."""
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
    """Return the inputs of the texts from `first` to `end`, without the padding that only other texts need."""
    part = {name: value[first:end] for name, value in kwargs.items()}
    longest = int(part["attention_mask"].sum(1).max())
    return {name: value[:, :longest] for name, value in part.items()}


def _describe_batches(loaded: LoadedModel, batches: Sequence[dict[str, Any]]) -> str:
    """Return a description of the inputs of the finished steps."""
    steps = format_count(len(batches), "step")
    if loaded.texts is None:
        more = f" in each of {steps}" if len(batches) > 1 else ""
        return f"{format_inputs(loaded.args, batches[0])}{more}"
    masks = [batch["attention_mask"] for batch in batches]
    texts, tokens = sum(map(len, masks)), sum(int(mask.sum()) for mask in masks)
    return f"{format_count(texts, 'text')} with {format_count(tokens, 'token')} together, in {steps}; padding is not counted"


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


# Files.


def _check_files(out: Path | None, plots: Path | None, states: Path | None, inputs: Path | None) -> None:
    """Check that the files differ and can be written, and that the packages that write them are installed."""
    files = {"--input": inputs, "--out": out, "--states": states}
    for (one, path), (other, same) in combinations([(name, p) for name, p in files.items() if p is not None], 2):
        if path.resolve() == same.resolve():
            raise ArgumentError(f"{other} is '{same}', the file of {one}, expected another file: choose another path")
    with argument_errors():
        if states is not None:
            check_writable(states, name="--states")
    with argument_errors({"path": "--out"}):
        if out is not None:
            check_path(out)
        if plots is not None:
            require("matplotlib", "draw")
            if out is not None and out.resolve() in (plots.resolve(), *plots.resolve().parents):
                raise ArgumentError(f"--plots is '{plots}', the file of --out, expected a folder: choose another path")
            check_folder(plots, "--plots")
            for name in PLOTS:
                check_writable(plots / f"{name}.png", name="--plots")


def _write_files(recording: Recording, out: Path | None, plots: Path | None) -> None:
    """Write the files of `--out` and `--plots`, each of them whole or not at all."""
    if out is not None:
        save_result(out, recording.save, "--out")
    if plots is None:
        return
    with working("draw the plots"):
        figures = {name: _draw(recording, name) for name in PLOTS}

    def save(folder: Path) -> None:
        for name, figure in figures.items():
            if figure is not None:
                with atomic_path(folder / f"{name}.png") as temporary:
                    figure.savefig(temporary, format="png", dpi=150, bbox_inches="tight")

    save_result(plots, save, "--plots")
    for name, figure in figures.items():
        print_message(f"Nothing to draw: {name}.png" if figure is None else f"Written: {plots / name}.png")


def _draw(recording: Recording, name: str) -> Figure | None:
    """Return one plot, or None if its numbers were not recorded."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4, 5.2), layout="constrained")
    try:
        getattr(recording.plot, name)(ax=figure.add_subplot())
    except ValueError:
        return None
    return figure
