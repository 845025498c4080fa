"""The lab's training beside a plain PyTorch loop, and the cost of recording every 20th step. Writes results/lab.json.

All variants train the same model on the same batches from the same weights. `plain` is what most people write: the same sublayers
in a loop, torch.nn.LayerNorm, and torch's own optimizer. `addnorm` is `addnorm.lab` without recording, `recorded` with it.
A round is a whole training of each. The clock is read after each step. The first step stands by itself, since the recorder
inspects the model there; then come windows of `EVERY` steps, whose last step is recorded. README.md in this folder has the
protocol.
"""

from __future__ import annotations

import copy
import gc
import itertools
import statistics
import time
from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from stacks import Plain
from torch import nn

from addnorm import wirings
from addnorm._util.timing import interleave
from addnorm.bench.case import Case, Document, Results, Row, Rows, Target, grid, ratio
from addnorm.bench.harness import Benchmark, main
from addnorm.bench.pages import digits, headline, markdown, missed, quotient
from addnorm.bench.timing import spread
from addnorm.lab.data import Text, python_docs
from addnorm.lab.models import CharLM
from addnorm.lab.run import Run
from addnorm.lab.train import Training

SIZES = ((12, 64, 16), (6, 256, 4))  # layers, d, sequences in a step; the first is the lab's own
CASES = grid(num_layers__d__batch=SIZES, tokens=(64,), wiring=("post_ln", "pre_ln"))
NHEAD = 4
EVERY = 20  # the lab's own value too
WINDOWS = 2  # in a round
VARIANTS = ("plain", "addnorm", "recorded")
CHECKED = 5  # steps whose losses are compared before anything is timed
CLOSE = 1e-5  # of the loss: after one step it differs by round-off (1e-7), and Adam carries that on
LEAST, MOST = 0.95, 1.10


def plain_model(model: CharLM) -> CharLM:
    """Return the lab's character model with a plain loop over the sublayers, and a copy of its weights."""
    plain = copy.deepcopy(model)
    plain.decoder = Plain(plain.decoder.stack)  # type: ignore[assignment]  # it is called in the same way
    return plain


def train_plain(model: nn.Module, run: Run, text: Text) -> Iterator[float]:
    """Train a model in a plain loop, one step per iteration, and yield the losses."""
    optimizer = torch.optim.Adam(model.parameters(), lr=run.lr, fused=True)
    for step in range(run.steps):
        read, following = text.batch(run.seed, step, run.batch, run.tokens)
        loss = F.cross_entropy(model(read).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def prepare(case: Case, variant: str, steps: int) -> Iterator[float]:
    """Return a training that has not begun, as an iterator that takes a step per iteration and yields the losses."""
    run = Run(
        wirings.get(case.wiring), num_layers=case.num_layers, d_model=case.d, nhead=NHEAD, tokens=case.tokens, batch=case.batch,
        steps=steps, every=EVERY if variant == "recorded" else 0,
    )  # fmt: skip
    training = Training(run, text_of_the_lab())
    if variant == "plain":
        return train_plain(plain_model(training.model), run, training.text)
    return training.each_step()


def timed(training: Iterator[float]) -> list[float]:
    """Train, and return the seconds of each step."""
    gc.collect()  # older garbage; during the training the collector runs as usual
    ends = [time.perf_counter()]
    ends += (time.perf_counter() for _ in training)
    return [after - before for before, after in itertools.pairwise(ends)]


def check_losses(case: Case) -> Row:
    """Compare the losses of the first steps, and return them.

    Raises:
        ValueError: they differ by more than round-off.
    """
    losses = {name: [*prepare(case, name, CHECKED)] for name in VARIANTS}
    every, plain = torch.tensor([*losses.values()]).double(), torch.tensor(losses["plain"]).double()
    off = float(((every - plain).abs() / plain).max())
    if not off <= CLOSE:
        raise ValueError(
            f"the losses of {title(case)} differ by {off:.1e} in {CHECKED} steps, expected round-off: {losses}."
        )
    return case.row(steps=CHECKED, off=off, losses=losses["plain"])


text_of_the_lab = cache(python_docs)


def measure(case: Case, *, rounds: int) -> Results:
    """Return for each variant the time of a step in a window, of the first step, and of the last step of a window."""
    losses, steps = check_losses(case), 1 + WINDOWS * EVERY
    samplers = {name: lambda name=name: timed(prepare(case, name, steps)) for name in VARIANTS}
    rows = []
    for name, each in interleave(samplers, rounds, collector=True).items():
        cut = [seconds[1 + k * EVERY : 1 + (k + 1) * EVERY] for seconds in each for k in range(WINDOWS)]
        rows.append(case.row(
            variant=name, **spread([sum(window) / EVERY * 1e6 for window in cut]), steps=EVERY,
            first_us=statistics.median(seconds[0] * 1e6 for seconds in each),
            last_us=statistics.median(window[-1] * 1e6 for window in cut),
        ))  # fmt: skip
    return {"losses": [losses], "rows": rows}


def first_step(rows: Rows) -> float:
    """Return the seconds that the first step takes longer where the recorder inspects the model."""
    return float(rows["recorded"]["first_us"] - rows["addnorm"]["first_us"]) / 1e6


TARGETS = (
    Target(
        "{}: times as fast as plain PyTorch",
        ">=",
        LEAST,
        ratio("addnorm", "plain"),
        None,
        why="a comparison costs what the models cost; 0.05 is noise",
    ),
    Target(
        f"{{}}: recording every {EVERY}th step, times without",
        "<=",
        MOST,
        ratio("addnorm", "recorded"),
        None,
        why="a recorded step takes up to three times as long as another",
    ),
)


def title(case: Case) -> str:
    """Return a case in words."""
    return f"{case.wiring}, {case.num_layers} layers, d = {case.d}"


def line(case: Case, rows: Rows) -> dict[str, str]:
    """Return the line of a model: steps a second, and what recording costs."""
    times = {name: row["median_us"] for name, row in rows.items()}
    return {
        "wiring": f"`{case.wiring}`", "layers x d": f"{case.num_layers} x {case.d}",
        "batch x tokens": f"{case.batch} x {case.tokens}", "plain PyTorch": digits(1e6 / times["plain"]),
        "the lab": digits(1e6 / times["addnorm"]), "times as fast": quotient(rows, "plain"),
        f"recording every {EVERY}th": f"**{times['recorded'] / times['addnorm'] - 1:+.1%}**",
        "first recorded step": f"{first_step(rows):+.2f} s",
    }  # fmt: skip


def section(document: Document) -> str:
    """Return the table of steps a second: a line a model."""
    limits = f"{LEAST:g} times as fast at least, recording {MOST - 1:.0%} at most"
    text = (
        "Training steps a second, on one thread, ± from quartile to quartile; what recording adds to the time of a run, and to "
        "its first step:"
    )
    verdict = missed(document, "Both targets are met")
    table = markdown(line(*item) for item in BENCHMARK.by_case(document).items())
    return f"{text}\n\n{table}\n\n{verdict} ({limits}). {headline(document)}."


BENCHMARK = Benchmark(
    "lab", CASES, measure, title, TARGETS, ("losses", "rows"),
    {
        "cell_seconds": None, "fewest_rounds": None, "windows": WINDOWS, "every": EVERY, "checked": CHECKED, "nhead": NHEAD,
        "dim_feedforward": "4 d", "dropout": 0.0, "optimizer": "Adam, fused", "text": "pydoc_data.topics", "dtype": "float32",
    },
    sections={"docs/comparing.md#lab": section}, threads=1, rounds=11,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
