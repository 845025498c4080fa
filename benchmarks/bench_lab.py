"""The lab's training beside a plain PyTorch loop, and the cost of recording every 20th step. Writes results/lab.json.

All variants train the same model on the same batches from the same weights. `plain` is what most people write: torch.nn.Linear,
torch.nn.LayerNorm and F.scaled_dot_product_attention in a loop. `addnorm` is `addnorm.lab` without recording, `recorded` with it.
A round is a whole training of each. The clock is read after each step. The first step stands by itself, since the recorder
inspects the model there; then come windows of `EVERY` steps, whose last step is recorded. README.md in this folder has the
protocol.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import harness
import torch
import torch.nn.functional as F
from harness import Case, Column, Document, Results, Row, by_case, digits, headline, markdown, quotient, right
from torch import Tensor, nn

from addnorm import wirings
from addnorm._util.timing import interleave
from addnorm.bench.targets import Target, ratio
from addnorm.bench.timing import spread
from addnorm.lab.data import Text, python_docs
from addnorm.lab.models import CharLM
from addnorm.lab.run import Run
from addnorm.lab.train import Training

FIELDS = ("wiring", "num_layers", "d", "batch", "tokens", "threads")
WIRINGS = ("post_ln", "pre_ln")
SIZES = ((12, 64, 16), (6, 256, 4))  # layers, d, sequences in a step; the first is the lab's own
TOKENS = 64
NHEAD = 4
EVERY = 20  # the lab's own value too
WINDOWS = 2  # in a round
ROUNDS = 11
VARIANTS = ("plain", "addnorm", "recorded")
CHECKED = 5  # steps whose losses are compared before anything is timed
CLOSE = 1e-5  # of the loss: after one step it differs by round-off (1e-7), and Adam carries that on
LEAST, MOST = 0.95, 1.10

Observer = Callable[[int, float], None]  # called after each step with its number and its loss


def cases(threads: int) -> list[Case]:
    """Return a model and its batches for each size and wiring. The lab trains each model on one thread."""
    return [
        Case(wiring=wiring, num_layers=n, d=d, batch=batch, tokens=TOKENS, threads=threads)
        for n, d, batch in SIZES for wiring in WIRINGS
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ the plain PyTorch loop


class PlainBlock(nn.Module):
    """Attention and feed-forward with their two norms, as most people write them."""

    def __init__(self, d: int, nhead: int, pre: bool) -> None:
        super().__init__()
        self.nhead, self.pre = nhead, pre
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.norm_1, self.norm_2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, tokens, d)` to the same shape."""
        if self.pre:
            x = x + self.attend(self.norm_1(x))
            x = x + self.feed(self.norm_2(x))
        else:
            x = self.norm_1(x + self.attend(x))
            x = self.norm_2(x + self.feed(x))
        return x

    def attend(self, x: Tensor) -> Any:
        """Apply causal self-attention."""
        batch, n, d = x.shape
        q, k, v = (part.view(batch, n, self.nhead, -1).transpose(1, 2) for part in self.qkv(x).split(d, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, n, d))

    def feed(self, x: Tensor) -> Any:
        """Apply the feed-forward."""
        return self.down(F.relu(self.up(x)))


class Plain(nn.Module):
    """The lab's character model in plain PyTorch, with a copy of the weights of one of the lab's."""

    def __init__(self, of: CharLM, nhead: int) -> None:
        super().__init__()
        stack = of.decoder.stack
        pre, d = stack.wiring.name == "pre_ln", of.embedding.weight.shape[1]
        self.embedding = nn.Embedding(*of.embedding.weight.shape)
        self.position = nn.Embedding(*of.position.weight.shape)
        self.blocks = nn.ModuleList(PlainBlock(d, nhead, pre) for _ in stack.layers)
        self.norm = nn.LayerNorm(d) if pre else nn.Identity()
        self.head = nn.Linear(d, of.head.out_features)
        pairs: list[tuple[nn.Module, Any]] = [
            (self.embedding, of.embedding), (self.position, of.position), (self.head, of.head),
        ]  # fmt: skip
        if pre:
            pairs.append((self.norm, stack.norm_final))
        blocks: list[Any] = list(self.blocks)
        layers: list[Any] = [*stack.layers]
        for block, layer in zip(blocks, layers, strict=True):
            attention, feed = layer.connections
            of_attention: Any = attention.sublayer
            of_feed: Any = feed.sublayer
            pairs += [
                (block.qkv, of_attention.in_proj), (block.out, of_attention.out_proj), (block.up, of_feed.up),
                (block.down, of_feed.down), (block.norm_1, attention.norm_in if pre else attention.norm_out),
                (block.norm_2, feed.norm_in if pre else feed.norm_out),
            ]  # fmt: skip
        for mine, theirs in pairs:
            mine.load_state_dict(theirs.state_dict())

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the character after each, `(batch, tokens, characters)`."""
        x = self.embedding(text) + self.position.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, run: Run, text: Text, observe: Observer) -> None:
    """Train a model in a plain loop."""
    for step in range(run.steps):
        read, following = text.batch(run.seed, step, run.batch, run.tokens)
        loss = F.cross_entropy(model(read).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        observe(step + 1, loss.item())


# ------------------------------------------------------------------------------------------------------------- measuring


def prepare(case: Case, variant: str, text: Text, steps: int) -> Callable[[Observer], object]:
    """Return a training that has not begun, as a function that runs it."""
    run = Run(
        wirings.get(case.wiring), num_layers=case.num_layers, d_model=case.d, nhead=NHEAD, tokens=case.tokens, batch=case.batch,
        steps=steps, every=EVERY if variant == "recorded" else 0,
    )  # fmt: skip
    training = Training(run, text)
    if variant != "plain":
        return lambda observe: training.finish(on_step=observe)
    model = Plain(training.model, NHEAD)
    optimizer = torch.optim.Adam(model.parameters(), lr=run.lr, fused=True)
    return lambda observe: train_plain(model, optimizer, run, text, observe)


class Timed(NamedTuple):
    """Losses of a whole training, and the seconds of each step."""

    losses: list[float]
    seconds: list[float]


def timed(train: Callable[[Observer], object]) -> Timed:
    """Train, and read the clock after each step."""
    losses, ends = [], []

    def observe(_: int, loss: float) -> None:
        ends.append(time.perf_counter())
        losses.append(loss)

    gc.collect()  # older garbage; during the training the collector runs as usual
    start = time.perf_counter()
    train(observe)
    return Timed(losses, [after - before for before, after in zip([start, *ends], ends, strict=False)])


def check_losses(case: Case, text: Text) -> Row:
    """Compare the losses of the first steps, and return them.

    Raises:
        ValueError: they differ by more than round-off.
    """
    losses = {name: timed(prepare(case, name, text, CHECKED)).losses for name in VARIANTS}
    off = max(
        abs(one - plain) / plain for name in VARIANTS for one, plain in zip(losses[name], losses["plain"], strict=True)
    )
    if not off <= CLOSE:
        raise ValueError(
            f"the losses of {title(case)} differ by {off:.1e} in {CHECKED} steps, expected round-off: {losses}."
        )
    return case.row(steps=CHECKED, off=off, losses=losses["plain"])


text_of_the_lab = cache(python_docs)


def measure(case: Case, *, rounds: int, text: Text | None = None, windows: int = WINDOWS) -> Results:
    """Return for each variant the time of a step in a window, of the first step, and of the last step of a window."""
    text = text or text_of_the_lab()
    losses = check_losses(case, text)

    def sampler(name: str) -> Callable[[], list[float]]:
        return lambda: timed(prepare(case, name, text, 1 + windows * EVERY)).seconds

    results = interleave({name: sampler(name) for name in VARIANTS}, rounds, collector=True)
    rows = []
    for name, each in results.items():
        cut = [seconds[1 + k * EVERY : 1 + (k + 1) * EVERY] for seconds in each for k in range(windows)]
        rows.append(case.row(
            variant=name, **spread([sum(window) / EVERY * 1e6 for window in cut]), steps=EVERY,
            first_us=statistics.median(seconds[0] * 1e6 for seconds in each),
            last_us=statistics.median(window[-1] * 1e6 for window in cut),
        ))  # fmt: skip
    return {"losses": [losses], "rows": rows}


def first_step(rows: dict[str, Row]) -> float:
    """Return the seconds that the first step takes longer where the recorder inspects the model."""
    return float(rows["recorded"]["first_us"] - rows["addnorm"]["first_us"]) / 1e6


def summarize(results: Results) -> list[Row]:
    """Return each number beside its target."""
    summary = []
    for case, rows in by_case(results["rows"], FIELDS).items():
        name = title(case)
        summary += [
            Target(f"{name}: times as fast as plain PyTorch", ">=", LEAST).row(ratio("addnorm", "plain")(rows)),
            Target(f"{name}: recording every {EVERY}th step, times without", "<=", MOST).row(
                ratio("addnorm", "recorded")(rows)
            ),
            Target(f"{name}: the first recorded step, seconds more", "<=", None).row(first_step(rows)),
        ]
    return summary


def title(case: Case) -> str:
    """Return a case in words."""
    return f"{case.wiring}, {case.num_layers} layers, d = {case.d}"


BENCHMARK = harness.Benchmark(
    "lab", "The lab's training beside a plain PyTorch loop", FIELDS, cases, measure, summarize, title, ("losses", "rows"),
    {
        "cell_seconds": None, "windows": WINDOWS, "every": EVERY, "checked": CHECKED, "nhead": NHEAD,
        "dim_feedforward": "4 d", "dropout": 0.0, "optimizer": "Adam, fused", "text": "pydoc_data.topics", "dtype": "float32",
    },
    threads=1, rounds=ROUNDS,
)  # fmt: skip


def section(document: Document) -> str:
    """Return the table of steps a second: a line a model."""
    lines = []
    for case, rows in by_case(document["rows"], FIELDS).items():
        rates = [digits(1e6 / rows[name]["median_us"]) for name in ("plain", "addnorm")]
        times = {name: row["median_us"] for name, row in rows.items()}
        cost = times["recorded"] / times["addnorm"]
        lines.append([
            f"`{case.wiring}`", f"{case.num_layers} x {case.d}", f"{case.batch} x {case.tokens}", *rates,
            quotient(rows, "plain", "addnorm"),
            f"**{cost - 1:+.1%}**", f"{first_step(rows):+.2f} s",
        ])  # fmt: skip
    head: list[str | Column] = ["wiring", *right(
        "layers x d", "batch x tokens", "plain PyTorch", "the lab", "times as fast",
        f"recording every {document['protocol']['every']}th", "first recorded step",
    )]  # fmt: skip
    limits = f"{LEAST:g} times as fast at least, recording {MOST - 1:.0%} at most"
    text = (
        "Training steps a second, on one thread, ± from quartile to quartile; what recording adds to the time of a run, and to "
        "its first step:"
    )
    verdict = harness.missed(document, "Both targets are met")
    return f"{text}\n\n{markdown(head, lines)}\n\n{verdict} ({limits}). {headline(document)}."


if __name__ == "__main__":
    raise SystemExit(harness.main(BENCHMARK))
