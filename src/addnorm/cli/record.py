"""What `addnorm record` does: forward and backward of every batch, a table on stdout, and the files that were asked for.

A file is written whole or not at all; a place that cannot be written to is refused before anything runs.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

import addnorm
from addnorm._util.optional import require
from addnorm.cli.stream import (
    Given,
    Refused,
    inspected,
    loaded_of,
    mask_of,
    notes,
    print_json,
    said,
    show_shares,
    unproved,
)
from addnorm.stream.ablate import find_logits
from addnorm.stream.models.inputs import generated, in_words
from addnorm.stream.models.load import Loaded, quiet, refused
from addnorm.stream.models.texts import read_texts
from addnorm.stream.record.recording import Recording

__all__ = ["NoGradients", "Probe", "record", "step_of", "tell"]

BATCH = 8  # texts a step
FORMATS = {".json": None, ".parquet": "pyarrow"}  # of a recording, and what is needed to write it
PLOTS = ("stream", "gradients", "writes", "similarity", "memory_map")
OWN_LOSS = "The loss is the model's own."


def record(
    given: Given,
    screen: Console,
    *,
    steps: int | None,
    only: str | None,
    grads: bool,
    memory_map: bool,
    out: Path | None,
    plots: Path | None,
    as_json: bool,
) -> str | None:
    """Forward and backward of every batch; an interrupt keeps what was recorded, and is raised again at the end."""
    _check_out(out, plots)
    rows = max(given.batch or BATCH, 1)
    texts = None if given.text is None else read_texts(given.text)[: steps and steps * rows]
    sliced = given.reads and (given.batch is None or given.batch > 0)  # else `load` says what is wrong with it
    loaded = loaded_of(dataclasses.replace(given, batch=None) if sliced else given, texts)
    found = inspected(loaded)
    if not found.sites:
        return unproved(found)
    layers = None if only is None else _layers(only, max(stream.num_layers for stream in found.streams))
    batches = _batches(given, loaded, steps, rows)
    probe = Probe(given.seed)
    masked = "attention_mask" if mask_of(loaded.kwargs) is not None else None
    finished, kept = 0, Recording()
    with quiet(), addnorm.record(loaded.model, grads=grads, layers=layers, tokens=masked) as rec, _bar() as bar:
        try:
            for kwargs in bar.track(batches, description=f"record {found.model}"):
                step_of(loaded, kwargs, probe if grads else None)
                finished, kept = finished + 1, Recording(rec.sites, rec.metadata, rec.memory_maps, rec.balances)
        except KeyboardInterrupt:
            if not finished:
                raise
    interrupted = finished < len(batches)
    if interrupted:
        rec = _until(rec, finished, kept)
        rec.metadata["interrupted"] = f"after {finished} of {len(batches)} steps"
    rec.metadata |= said(loaded) | {"loss": probe.sentence if grads else None}
    if as_json:
        print_json(rec.to_dict())
    else:
        screen.print(rec)
        for name, (sources, shares) in rec.memory_maps.items() if memory_map else ():
            of = dict(zip(sources, shares[-1], strict=True))
            screen.print()
            show_shares(screen, f"What {name} is made of at its end, step {rec.steps[-1]}", of)
        note = rec.metadata.get("note")
        told = [note and f"Note: {note}.", rec.metadata["loss"], _inputs(loaded, batches[:finished]), loaded.source]
        notes(screen, *(str(note) for note in told if note))
    _write(rec, out, plots)
    if interrupted:
        raise KeyboardInterrupt
    return unproved(found)


class NoGradients(Refused):
    """The output depends on no parameter."""


class Probe:
    """A loss that needs no labels: each token's output times a fixed random vector of its own, N(0, 1/d), mean over the tokens.

    The mean square of what a LayerNorm returns is a constant, whose gradient is rounding; this has one in every direction.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.sentence = (
            f"The loss needs no labels: the mean over the tokens of ⟨v, y⟩, y the model's output, v drawn for each position "
            f"from N(0, 1/d), seed {seed}."
        )

    def __call__(self, output: Any, mask: Tensor | None) -> Tensor:
        """The loss; the model's own where its output has one."""
        own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if isinstance(own, Tensor):
            self.sentence = OWN_LOSS
            return own
        y = find_logits(output)
        random = torch.Generator().manual_seed(self.seed)
        v = torch.randn(y.shape[1:], generator=random).div(y.shape[-1] ** 0.5).to(y.device)
        products = (y.to(torch.promote_types(y.dtype, torch.float32)) * v).sum(-1)
        return products[mask].mean() if mask is not None and mask.shape == products.shape else products.mean()


def step_of(loaded: Loaded, kwargs: dict[str, Any], probe: Probe | None) -> None:
    """One forward, and with a probe one backward."""
    try:
        if probe is None:
            with torch.no_grad():
                loaded.model(*loaded.args, **kwargs)
            return
        loss = probe(loaded.model(*loaded.args, **kwargs), mask_of(kwargs))
        if loss.requires_grad:
            loss.backward()
        else:
            raise NoGradients(
                f"MODEL {loaded.name!r} has no gradients, its output depends on no parameter: use --no-grads."
            )
    except Refused:
        raise
    except Exception as error:  # of the model, at what it was called with
        raise refused(error, dataclasses.replace(loaded, kwargs=kwargs)) from error
    loaded.model.zero_grad()


def _until(rec: Recording, finished: int, kept: Recording) -> Recording:
    """The recording without the step in which it was interrupted: half of it would stand beside the other half of the last."""
    for site, role, name, series in rec.iter_series():
        for step, value in zip(*series, strict=True):
            if step < finished:
                kept.add(step, site, role, name, value)
    return kept


def _batches(given: Given, loaded: Loaded, steps: int | None, rows: int) -> list[dict[str, Any]]:
    """What the model is called with, step by step."""
    if loaded.texts is not None:
        count = -(-len(loaded.texts) // rows)
        if steps is not None and steps > count:
            raise Refused(
                f"--steps is {steps}, expected at most {count}: there are {len(loaded.texts)} texts, {rows} a step."
            )
        return [_part(loaded.kwargs, k * rows, (k + 1) * rows) for k in range(steps or count)]
    if steps is None or steps == 1:
        return [loaded.kwargs]
    if given.input is not None or ":" in given.name:
        raise Refused(
            f"--steps is {steps}, expected 1: the inputs of MODEL {given.name!r} are given, and make one step."
        )
    sizes = {name: value for name in ("tokens", "batch") if (value := getattr(given, name)) is not None}
    with quiet(), torch.no_grad():
        more = [generated(loaded.model, given.seed + k, **sizes) for k in range(1, steps)]
    return [loaded.kwargs, *more]


def _part(kwargs: dict[str, Any], first: int, end: int) -> dict[str, Any]:
    """Some of the texts, without the padding that only the others need."""
    part = {name: value[first:end] for name, value in kwargs.items()}
    longest = int(part["attention_mask"].sum(1).max())
    return {name: value[:, :longest] for name, value in part.items()}


def _inputs(loaded: Loaded, batches: list[dict[str, Any]]) -> str:
    """The inputs in a sentence."""
    if loaded.texts is None:
        more = f" in each of {len(batches)} steps" if len(batches) > 1 else ""
        return f"Inputs: {in_words(loaded.args, batches[0])}{more}."
    masks = [batch["attention_mask"] for batch in batches]
    texts, tokens = sum(map(len, masks)), sum(int(mask.sum()) for mask in masks)
    return f"Inputs: {texts} texts of {tokens} tokens in {len(batches)} step{'s' * (len(batches) > 1)}; padding is not counted."


def _layers(only: str, depth: int) -> list[int]:
    """The numbers of layers, from 0, as they were typed, from 1: 1,3-5."""
    found: list[int] = []
    for part in only.split(","):
        span = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", part)
        first, last = (int(span[1]), int(span[2] or span[1])) if span else (0, 0)
        if not 1 <= first <= last <= depth:
            raise Refused(
                f"--only is {only!r}, expected layers from 1 to {depth}, as in 1,{max(depth - 1, 1)}-{depth}."
            )
        found += range(first - 1, last)
    return found


# Files.


def _check_out(out: Path | None, plots: Path | None) -> None:
    """Refuses a place that cannot be written to, before anything runs."""
    try:
        if out is not None:
            if out.suffix not in FORMATS:
                raise Refused(
                    f"--out is '{out}', expected a file that ends in {' or '.join(FORMATS)}: which says the format."
                )
            if out.is_dir():
                raise Refused(f"--out is '{out}', a directory, expected the file to write.")
            if (package := FORMATS[out.suffix]) is not None:
                require(package, "write Parquet")
            _can_write("--out", out, out.parent)
        if plots is not None:
            require("matplotlib", "draw")
            _can_write("--plots", plots, plots)
    except ImportError as error:
        raise Refused(f"{error}.") from None


def _can_write(option: str, path: Path, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise _unwritable(option, path, error) from None


def _unwritable(option: str, path: Path, error: Exception) -> Refused:
    return Refused(f"{option} is '{path}', which cannot be written ({getattr(error, 'strerror', None) or error}).")


def _write(rec: Recording, out: Path | None, plots: Path | None) -> None:
    """The files that were asked for, each whole or not at all."""
    if out is not None:
        try:
            tell(f"Written: {rec.save(out)}")
        except OSError as error:
            raise _unwritable("--out", out, error) from None
    if plots is not None:
        for name in PLOTS:
            path = plots / f"{name}.png"
            try:
                tell(f"Written: {path}" if _draw(getattr(rec.plot, name), path) else f"Nothing to draw: {path.name}")
            except OSError as error:
                raise _unwritable("--plots", path, error) from None


def _draw(plot: Callable[..., Any], path: Path) -> bool:
    """One drawing; False where the recording has nothing for it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4, 5.2), layout="constrained")
    try:
        plot(ax=figure.add_subplot())
    except ValueError:  # which says what was not recorded
        return False
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format="png", dpi=150, bbox_inches="tight")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def tell(sentence: str) -> None:
    """On stderr, in one line."""
    Console(stderr=True, highlight=False).print(Text(sentence), soft_wrap=True)


def _bar() -> Any:
    """On a terminal how many steps are done, and how long the others will take."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
