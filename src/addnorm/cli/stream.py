"""What `addnorm inspect`, `decompose` and `ablate` do with the model that they were given the name of.

Each prints its result, and returns why it proves nothing, in a sentence, or None. What came and cannot be used is `Refused`.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

import addnorm
from addnorm._util.jsonio import to_jsonable
from addnorm.stream.decompose import BIASES
from addnorm.stream.find.inspection import Inspection
from addnorm.stream.models.hf import first_line
from addnorm.stream.models.inputs import in_words
from addnorm.stream.models.load import Loaded, Refused, load, quiet, refused
from addnorm.stream.models.texts import read_texts

__all__ = [
    "FIELDS", "Given", "Refused", "ablate", "decompose", "inputs_of", "inspect", "inspected", "loaded_of", "mask_of",
    "notes", "print_json", "said", "show_inspection", "show_shares", "unproved", "working",
]  # fmt: skip

WIDEST = 100
NOTE = {
    "decompose": "The share of a source is ⟨its part, x⟩ / |x|² of a token, and its mean over the tokens; the shares sum to one.",
    "ablate": "What the model loses without each sublayer: the KL divergence is of the softmax over the output's last dimension, "
    "and the change of the output is relative.",
}


@dataclasses.dataclass(frozen=True)
class Given:
    """A model by its name, and what else was said of it."""

    name: str
    text: Path | None = None
    input: Path | None = None
    seed: int = 0
    layers: int | None = None
    tokens: int | None = None
    batch: int | None = None
    dtype: str | None = None
    train: bool = False

    @property
    def reads(self) -> bool:
        """Whether it is text that the model is given."""
        with suppress(OSError, ValueError):  # a name that is too long for a file's
            tokenizer = self.name == "minilm" or (Path(self.name) / "tokenizer.json").is_file()
            return self.text is not None or (tokenizer and self.input is None)
        return self.text is not None


FIELDS = tuple(field.name for field in dataclasses.fields(Given))

# The commands.


def inspect(given: Given, screen: Console, *, as_json: bool, float64: bool) -> str | None:
    """The table of the sublayers."""
    loaded = loaded_of(given)
    found = inspected(loaded, float64)
    show_inspection(screen, loaded, found, as_json)
    return unproved(found)


def show_inspection(screen: Console, loaded: Loaded, found: Inspection, as_json: bool) -> None:
    """The table, or the document."""
    if as_json:
        print_json({**said(loaded), **found.to_dict()})
    else:
        screen.print(found)
        notes(screen, inputs_of(loaded), loaded.source)


def decompose(given: Given, screen: Console, *, as_json: bool, float64: bool) -> str | None:
    """What every source has in the stream at its end."""
    loaded = loaded_of(given)
    found = inspected(loaded)
    if not found.sites:
        return unproved(found)
    parts, refusals = [], []
    with working(f"decompose {found.model}"), quiet():
        for stream in found.streams:
            try:
                parts.append(
                    addnorm.decompose(loaded.model, *loaded.args, stream=stream.name, float64=float64, **loaded.kwargs)
                )
            except ValueError as error:  # the model ran a moment ago
                refusals.append(str(error))
    mask = mask_of(loaded.kwargs)
    shares = [{name: _mean(share, mask) for name, share in one.shares().items()} for one in parts]
    if as_json:
        streams = [
            {"name": one.stream.name, "depth": one.depth, "closure": one.closure, "shares": of}
            for one, of in zip(parts, shares, strict=True)
        ]
        document = {"schema": "addnorm.decomposition", "schema_version": 1, **said(loaded), "model": found.model}
        print_json({**document, "streams": streams, "refused": refusals})
    else:
        for k, (one, of) in enumerate(zip(parts, shares, strict=True)):
            screen.print(end="\n" * bool(k))
            title = f"{found.model}, {one.stream.name} after {one.depth} adds: its parts add up, relative error {one.closure:.1e}"
            show_shares(screen, title, of)
        if parts:
            notes(screen, NOTE["decompose"], inputs_of(loaded), loaded.source)
    return " ".join(refusals) or None


def ablate(given: Given, screen: Console, *, as_json: bool, mode: Literal["zero", "mean"]) -> str | None:
    """What the model loses without each of its sublayers."""
    loaded = loaded_of(given)
    found = inspected(loaded)
    if not found.sites:
        return unproved(found)
    errors = Console(stderr=True)
    progress = errors if errors.is_terminal else False
    try:
        with quiet():
            done = addnorm.ablate_each(found, *loaded.args, mode=mode, progress=progress, **loaded.kwargs)
    except (RuntimeError, TypeError) as error:  # an add's operand cannot be exchanged; an output has no tensor
        return f"{found.model} cannot be ablated ({first_line(error)})."
    if as_json:
        document = {"schema": "addnorm.ablation", "schema_version": 1, **said(loaded), "model": found.model}
        print_json({**document, "mode": mode, "sites": done.to_dict()})
    else:
        screen.print(done)
        notes(screen, NOTE["ablate"], inputs_of(loaded), loaded.source)
    return unproved(found)


# The model.


def loaded_of(given: Given, texts: Sequence[str] | None = None) -> Loaded:
    """The model with its inputs, made of these texts or of those in the file."""
    known = dataclasses.asdict(given)
    file, inputs, train = (known.pop(name) for name in ("text", "input", "train"))
    known |= {"texts": read_texts(file) if file is not None and texts is None else texts, "inputs": inputs}
    with working(f"load {given.name}"):
        loaded = load(**known)
    torch.manual_seed(given.seed)  # of dropout
    loaded.model.train(train)
    return loaded


def inspected(loaded: Loaded, float64: bool = False) -> Inspection:
    """What is found in it; what the model raises at its inputs is refused."""
    try:
        with working(f"inspect {loaded.name}"), quiet():
            return addnorm.inspect(loaded.model, *loaded.args, float64=float64, **loaded.kwargs)
    except Exception as error:  # of the model, at what it was called with
        raise refused(error, loaded) from error


def unproved(found: Inspection) -> str | None:
    """Why an inspection proves nothing, in a sentence."""
    if not found.sites:
        return f"{found.model} has no residual stream: {found.unknown[0].reason}."
    open_ = [site for site in found.sites if not site.closes]
    if open_:
        worst = max(open_, key=lambda site: site.closure if site.closure == site.closure else float("inf"))
        count = f"{len(open_)} of {len(found.sites)} sublayers do not close"
        return f"{count}: {worst.equation} is off by {worst.closure:.1e} at {worst.id}, relative to what the model computed."
    total = [stream for stream in found.streams if not stream.closes]
    if total:
        return f"{total[0].name} is not x_0 and all writes: their sum is off by {total[0].closure:.1e}."
    return None


def said(loaded: Loaded) -> dict[str, Any]:
    """Of the model, for a document."""
    return {"name": loaded.name, "source": loaded.source, "inputs": in_words(loaded.args, loaded.kwargs)}


def inputs_of(loaded: Loaded) -> str:
    """The inputs in a sentence."""
    mask = mask_of(loaded.kwargs)
    if loaded.texts is not None and mask is not None:
        return f"Inputs: {len(loaded.texts)} texts, {int(mask.sum())} tokens of {mask.numel()} with padding."
    return f"Inputs: {in_words(loaded.args, loaded.kwargs)}."


def mask_of(kwargs: dict[str, Any]) -> Tensor | None:
    """Which tokens are no padding, where the inputs tell it of every stream."""
    mask = kwargs.get("attention_mask")
    ids = [value for name, value in kwargs.items() if name.endswith("input_ids")]
    fits = isinstance(mask, Tensor) and bool(ids) and all(one.shape == mask.shape for one in ids)
    return mask.bool() if fits and isinstance(mask, Tensor) else None


def _mean(share: Tensor, mask: Tensor | None) -> float:
    """Over the tokens that are no padding."""
    if mask is not None and share.shape != mask.shape and share.shape == mask.T.shape:
        mask = mask.T
    return float((share[mask] if mask is not None and share.shape == mask.shape else share).mean())


# What a reader sees.


def print_json(document: dict[str, Any]) -> None:
    """On stdout; what is no number is a word, "NaN" or "Infinity", as in a recording's file."""
    print(json.dumps(to_jsonable(document), indent=2, allow_nan=False))


def notes(screen: Console, *texts: str) -> None:
    """Sentences below a table."""
    screen.print()
    for note in texts:
        for line in textwrap.wrap(note, min(screen.width, WIDEST), break_on_hyphens=False):
            screen.print(Text(line, "dim"), no_wrap=True, overflow="ignore", crop=False)


def show_shares(screen: Console, title: str, shares: dict[str, float]) -> None:
    """Sources by depth, the biases of the norms last."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("source", overflow="fold")
    table.add_column("share", justify="right", no_wrap=True)
    for source in sorted(shares, key=lambda source: source == BIASES):
        table.add_row(Text(source), f"{shares[source]:.2%}")
    screen.print(Text(title, "bold"), table)


@contextmanager
def working(what: str) -> Iterator[None]:
    """On a terminal a word that something is being done whose end nobody knows."""
    errors = Console(stderr=True)
    if not errors.is_terminal:
        yield
        return
    with errors.status(Text(what if len(what) < 60 else f"{what[:58]}…")):
        yield
