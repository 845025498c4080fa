"""The lab's training: steps a second beside a loop written by hand in plain PyTorch, and what recording every 20th step costs.

All variants train the same model on the same batches from the same weights. `plain` is what everyone writes: torch.nn.Linear,
torch.nn.LayerNorm and F.scaled_dot_product_attention in a loop; `addnorm` is `addnorm.lab` without recording, `recorded` with it.
A round is a whole training of each, from the start. The clock is read after each step. The first step stands by itself (a
recorder finds its way through the model there); then come windows of `EVERY` steps, in each of which one is recorded, the last.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from addnorm import wirings
from addnorm.bench import frame
from addnorm.bench.frame import Document, Progress, document
from addnorm.bench.summary import claim
from addnorm.bench.timing import Row, spread
from addnorm.lab.data import Text, topics
from addnorm.lab.models import CharLM
from addnorm.lab.run import Run
from addnorm.lab.train import Told, Training

__all__ = ["ROUNDS", "Cell", "Plain", "cells", "measure", "run", "summarize"]

SCHEMA = 1
WIRINGS = ("post_ln", "pre_ln")
SIZES = ((12, 64, 16), (6, 256, 4))  # layers, d, sequences in a step; the first is the lab's own
TOKENS = 64
HEADS = 4
EVERY = 20  # the lab's own too
WINDOWS = 2  # in a round
ROUNDS = 11
VARIANTS = ("plain", "addnorm", "recorded")
CHECKED = 5  # steps whose losses are compared before anything is timed
CLOSE = 1e-5  # of the loss: that of one step differs by roundings (1e-7), and Adam carries them on
LEAST, MOST = 0.95, 1.10


class Cell(NamedTuple):
    """A model, and what it is given in a step: `batch` sequences of `tokens` characters."""

    wiring: str
    num_layers: int
    d: int
    batch: int
    tokens: int
    threads: int


def cells(*, threads: int = 1) -> list[Cell]:
    """The matrix. The lab trains each model on one thread."""
    return [Cell(wiring, n, d, batch, TOKENS, threads) for n, d, batch in SIZES for wiring in WIRINGS]


# ---------------------------------------------------------------------------------------------------- written by hand


class PlainBlock(nn.Module):
    """Attention and feed-forward with their two norms, as everyone writes them."""

    def __init__(self, d: int, nhead: int, pre: bool) -> None:
        super().__init__()
        self.nhead, self.pre = nhead, pre
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.norm_1, self.norm_2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, tokens, d)` to the same shape."""
        if self.pre:
            x = x + self.attend(self.norm_1(x))
            return x + self.feed(self.norm_2(x))
        x = self.norm_1(x + self.attend(x))
        return self.norm_2(x + self.feed(x))  # type: ignore[no-any-return]  # torch does not type a module's call

    def attend(self, x: Tensor) -> Tensor:
        """Causal self-attention."""
        batch, n, d = x.shape
        q, k, v = (part.view(batch, n, self.nhead, -1).transpose(1, 2) for part in self.qkv(x).split(d, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, n, d))  # type: ignore[no-any-return]  # the same

    def feed(self, x: Tensor) -> Tensor:
        """The feed-forward."""
        return self.down(F.relu(self.up(x)))  # type: ignore[no-any-return]  # the same


class Plain(nn.Module):
    """The lab's character model in plain PyTorch, with a copy of the weights of one of the lab's."""

    def __init__(self, of: CharLM, nhead: int) -> None:
        super().__init__()
        stack = of.decoder.stack
        pre, d = stack.wiring.name == "pre_ln", stack.d_model
        self.embedding, self.position = (
            nn.Embedding(*of.embedding.weight.shape),
            nn.Embedding(*of.position.weight.shape),
        )
        self.blocks = nn.ModuleList(PlainBlock(d, nhead, pre) for _ in stack.layers())
        self.norm = nn.LayerNorm(d) if pre else nn.Identity()
        self.head = nn.Linear(d, of.head.out_features)
        _copy(self.embedding, of.embedding)
        _copy(self.position, of.position)
        _copy(self.head, of.head)
        if pre:
            _copy(self.norm, stack.norm_final)
        blocks: list[Any] = list(self.blocks)
        for block, (attention, feed) in zip(blocks, stack.layers(), strict=True):
            of_attention: Any = attention.sublayer
            of_feed: Any = feed.sublayer
            pairs = {
                block.qkv: of_attention.in_proj, block.out: of_attention.out_proj, block.up: of_feed.up, block.down: of_feed.down,
                block.norm_1: attention.norm_in if pre else attention.norm_out,
                block.norm_2: feed.norm_in if pre else feed.norm_out,
            }  # fmt: skip
            for one, other in pairs.items():
                _copy(one, other)

    def forward(self, text: Tensor) -> Tensor:
        """The logits of what follows each character, `(batch, tokens, characters)`."""
        x = self.embedding(text) + self.position.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]  # torch does not type a module's call


def _copy(one: nn.Module, other: Any) -> None:
    one.load_state_dict(other.state_dict())


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, run: Run, text: Text, told: Told) -> None:
    """The loop."""
    for step in range(run.steps):
        read, following = text.batch(run.seed, step, run.batch, run.tokens)
        loss = F.cross_entropy(model(read).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told(step + 1, loss.item())


# -------------------------------------------------------------------------------------------------------- the stopwatch


def started(cell: Cell, variant: str, text: Text, steps: int) -> Callable[[Told], None]:
    """A training that has not begun, as a function that does all of it."""
    run = Run(
        wirings.get(cell.wiring), num_layers=cell.num_layers, d_model=cell.d, nhead=HEADS, tokens=cell.tokens, batch=cell.batch,
        steps=steps, every=EVERY if variant == "recorded" else 0,
    )  # fmt: skip
    training = Training(run, text)
    if variant != "plain":
        return lambda told: training.go(told=told)
    model = Plain(training.model, HEADS)
    optimizer = torch.optim.Adam(model.parameters(), lr=run.lr, fused=True)
    return lambda told: train_plain(model, optimizer, run, text, told)


class Clocked(NamedTuple):
    """A whole training: the loss of each step, and the seconds of each."""

    losses: list[float]
    seconds: list[float]


def clocked(train: Callable[[Told], None]) -> Clocked:
    """Trains, and reads the clock after each step."""
    losses, read = [], []

    def told(_: int, loss: float) -> None:
        read.append(time.perf_counter())
        losses.append(loss)

    gc.collect()  # of what was there before; during the training the collector runs as it does for anyone
    start = time.perf_counter()
    train(told)
    return Clocked(losses, [after - before for before, after in zip([start, *read], read, strict=False)])


def check(cell: Cell, text: Text) -> Row:
    """The losses of the first steps, which are the same but for roundings: if they are not, an error."""
    found = {name: clocked(started(cell, name, text, CHECKED)).losses for name in VARIANTS}
    off = max(
        abs(one - plain) / plain for name in VARIANTS for one, plain in zip(found[name], found["plain"], strict=True)
    )
    if not off <= CLOSE:
        raise ValueError(
            f"the losses of {title(cell)} differ by {off:.1e} in {CHECKED} steps, expected roundings: {found}."
        )
    return {**cell._asdict(), "steps": CHECKED, "off": off, "losses": found["plain"]}


def measure(cell: Cell, text: Text, *, rounds: int = ROUNDS, windows: int = WINDOWS) -> list[Row]:
    """A row for each variant: the time of a step in a window, of the first one, and of the last in each window."""
    found: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    for turn in range(rounds):
        first = turn % len(VARIANTS)
        for name in VARIANTS[first:] + VARIANTS[:first]:
            found[name].append(clocked(started(cell, name, text, 1 + windows * EVERY)).seconds)
    rows = []
    for name, each in found.items():
        cut = [seconds[1 + k * EVERY : 1 + (k + 1) * EVERY] for seconds in each for k in range(windows)]
        rows.append({
            **cell._asdict(), "variant": name, **spread([sum(window) / EVERY * 1e6 for window in cut]), "steps": EVERY,
            "first_us": statistics.median(seconds[0] * 1e6 for seconds in each),
            "last_us": statistics.median(window[-1] * 1e6 for window in cut),
        })  # fmt: skip
    return rows


# ------------------------------------------------------------------------------------------------------ what follows


def by_cell(rows: Sequence[Row]) -> dict[Cell, dict[str, Row]]:
    """The rows of a document: cell -> variant -> row."""
    return frame.by_cell(rows, Cell)


def title(cell: Cell) -> str:
    """Of a cell."""
    return f"{cell.wiring}, {cell.num_layers} layers, d = {cell.d}"


def fast(found: dict[str, Row]) -> float:
    """The lab's steps a second over those of the loop by hand."""
    return float(found["plain"]["median_us"] / found["addnorm"]["median_us"])


def recording(found: dict[str, Row]) -> float:
    """The time of training with recording over that without."""
    return float(found["recorded"]["median_us"] / found["addnorm"]["median_us"])


def looking(found: dict[str, Row]) -> float:
    """Seconds that the first step takes longer where a recorder inspects the model."""
    return float(found["recorded"]["first_us"] - found["addnorm"]["first_us"]) / 1e6


def summarize(rows: Sequence[Row]) -> list[Row]:
    """Each next to its target."""
    summary = []
    for cell, found in by_cell(rows).items():
        where = title(cell)
        summary += [
            claim(f"{where}: times as fast as plain PyTorch", None, fast(found), ">=", LEAST),
            claim(f"{where}: recording every {EVERY}th step, times without", None, recording(found), "<=", MOST),
            claim(f"{where}: the first recorded step, seconds more", None, looking(found), "<=", None),
        ]
    return summary


def run(
    chosen: Sequence[Cell] | None = None, *, text: Text | None = None, rounds: int = ROUNDS, windows: int = WINDOWS,
    progress: Progress | None = None,
) -> Document:  # fmt: skip
    """Measures the cells (None: all) and returns the document; an interrupt ends it early, `complete` is then False."""
    learned = text or topics()
    return document(
        cells() if chosen is None else chosen,
        lambda cell: {"losses": [check(cell, learned)], "rows": measure(cell, learned, rounds=rounds, windows=windows)},
        lambda found: summarize(found["rows"]),
        parts=("losses", "rows"),
        protocol={
            "rounds": rounds, "fewest_rounds": rounds, "cell_seconds": None, "windows": windows, "every": EVERY,
            "checked": CHECKED, "nhead": HEADS, "dim_feedforward": "4 d", "dropout": 0.0, "optimizer": "Adam, fused",
            "text": learned.name, "dtype": "float32",
        },
        schema=SCHEMA,
        title=title,
        progress=progress,
    )  # fmt: skip
