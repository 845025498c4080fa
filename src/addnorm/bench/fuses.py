"""What `addnorm.fuse` brings a real model: MiniLM as it was beside MiniLM fused, in inference and in training steps.

Each variant is a copy of the model with weights of its own; they are timed round by round. torch.compile's frontend, running the
graphs that it captured as they are, tells what is gained, or lost, without any fusing.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from addnorm import fuse
from addnorm.bench import frame, minilm
from addnorm.bench.frame import Document, Found, Progress, document
from addnorm.bench.summary import claim
from addnorm.bench.timing import ROUNDS, Row, interleaved, spread
from addnorm.fusion.benchmark import saved_bytes
from addnorm.fusion.result import Fusion
from addnorm.fusion.tolerance import Difference

__all__ = ["Cell", "by_cell", "cells", "measure", "ratio", "run", "summarize", "title"]

SCHEMA = 1
TARGET = 0.95
JOBS = {"inference": "inference", "training": "forward + backward"}
LINES = (
    ("inference", 1, 16),
    ("inference", 8, 128),
    ("inference", 32, 128),
    ("training", 8, 128),
)  # job, batch, tokens
DTYPES = ("float32", "bfloat16")
INDUCTOR = (("inference", 8, 128, "float32"),)  # it compiles for a minute
SECONDS = 30.0  # of a cell: a step takes long, and a few per cent are to be seen

Given = Mapping[str, Any]
MAKE: dict[str, Callable[[nn.Module, Given], Fusion | None]] = {
    "plain": lambda model, given: None,
    "fused": lambda model, given: fuse(model, **given),
    "frontend": lambda model, given: model.compile(backend="eager"),
    "inductor": lambda model, given: model.compile(),
    "fused, inductor": lambda model, given: fuse(model, compile=True, **given),
}  # fmt: skip


class Cell(NamedTuple):
    """A job on a batch of real text."""

    job: str
    batch: int
    tokens: int
    dtype: str
    threads: int


def cells(*, threads: int | None = None) -> list[Cell]:
    """The matrix; threads None is what torch has."""
    threads = threads or torch.get_num_threads()
    return [Cell(*line, dtype, threads) for line, dtype in itertools.product(LINES, DTYPES)]


def title(cell: Cell) -> str:
    """A cell in words."""
    return f"{JOBS[cell.job]}, {cell.batch} x {cell.tokens} tokens, {cell.dtype}"


def call(cell: Cell, model: nn.Module, given: Given) -> Callable[[], Tensor]:
    """What is timed."""
    if cell.job == "training":
        return minilm.step(model, given)

    def infer() -> Tensor:
        with torch.no_grad():
            y: Tensor = model(**given).last_hidden_state
        return y

    return infer


def measure(cell: Cell, *, rounds: int = ROUNDS, inductor: bool = True) -> Found:
    """A row for each variant; how each fused model was made; and the variants that could not be made, with the error."""
    torch.compiler.reset()  # this cell's graphs alone, without the guards of those before it
    torch.manual_seed(0)  # the masks of dropout that the proof is of
    loaded = minilm.loaded(cell, cell.dtype)
    loaded.model.train(cell.job == "training")
    given = loaded.kwargs
    models: dict[str, nn.Module] = {}
    share: float | None = None
    found: Found = {"fusions": [], "failures": [], "rows": []}
    for name, make in MAKE.items():
        if "inductor" in name and not (inductor and cell[:4] in INDUCTOR):
            continue
        model, start = copy.deepcopy(loaded.model), time.perf_counter()
        try:
            fusion = make(model, given)
            seconds = time.perf_counter() - start
            call(cell, model, given)()  # captures, and compiles
        except Exception as error:  # of what it is beside the model as it was; a fused one may be VerificationError
            if name == "plain":
                raise
            found["failures"].append({**told(cell, name), "error": f"{type(error).__name__}: {error}"[:300]})
            continue
        models[name] = model
        if fusion is not None:
            share = fusion.share if name == "fused" else share
            found["fusions"].append({**told(cell, name), "seconds": seconds, **facts(fusion)})
    calls = {name: call(cell, model, given) for name, model in models.items()}
    for name, (samples, repeats) in interleaved(calls, [], rounds, cell_seconds=SECONDS).items():
        row: Row = {**told(cell, name), **spread(samples), "repeats": repeats}
        if cell.job == "training":
            row["saved_bytes"] = saved_bytes(lambda model=models[name]: model(**given), models[name], given)  # type: ignore[misc]
        if name == "plain":
            row["share"] = share
        found["rows"].append(row)
    return found


def told(cell: Cell, variant: str) -> Row:
    """Which row it is."""
    return {**cell._asdict(), "variant": variant}


def facts(fusion: Fusion) -> Row:
    """How many Add & Norms were fused, why others were not, and the proof."""
    proof = fusion.proof
    return {
        "graphs": fusion.num_graphs, "fused": len(fusion.fused), "left": [one.reason for one in fusion.unfused],
        "oracle": proof.oracle, "mode": proof.mode, "outputs": worst(proof.outputs), "gradients": worst(proof.gradients),
    }  # fmt: skip


def worst(differences: Sequence[Difference]) -> Row | None:
    """The largest difference over eager's own error, and of which tensor."""
    most = max((one for one in differences if one.eager_error), key=times_error, default=None)
    return None if most is None else {"times_error": times_error(most), **most.to_dict()}


def times_error(one: Difference) -> float:
    """A difference over eager's own error."""
    return one.max_abs / one.eager_error if one.eager_error else 0.0


def by_cell(rows: Sequence[Row]) -> dict[Cell, dict[str, Row]]:
    """The rows of a document: cell -> variant -> row."""
    return frame.by_cell(rows, Cell)


def ratio(variants: Mapping[str, Row], variant: str = "fused") -> float | None:
    """How many times as fast as the model as it was; None if it was not measured."""
    return float(variants["plain"]["median_us"] / variants[variant]["median_us"]) if variant in variants else None


def summarize(rows: Sequence[Row]) -> list[Row]:
    """Each cell next to its target; and whether in each there was a fused model, which is one that is proven."""
    table = by_cell(rows)
    summary = [
        claim(f"fused, {title(cell)}: times as fast as the model as it was", None, ratio(found), ">=", TARGET)
        for cell, found in table.items()
    ]
    proven = sum("fused" in found for found in table.values())
    return [*summary, claim("cells in which the fused model is proven", None, proven, "==", len(table))]


def run(
    chosen: Sequence[Cell] | None = None, *, rounds: int = ROUNDS, inductor: bool = True, progress: Progress | None = None
) -> Document:  # fmt: skip
    """Measures the cells (None: all) and returns the document; an interrupt ends it early, `complete` is then False."""
    return document(
        cells() if chosen is None else chosen,
        lambda cell: measure(cell, rounds=rounds, inductor=inductor),
        lambda found: summarize(found["rows"]),
        parts=("fusions", "failures", "rows"),
        protocol={
            "rounds": rounds, "cell_seconds": SECONDS, "model": minilm.MODEL, "text": minilm.TEXT, "inductor": inductor,
        },
        schema=SCHEMA,
        title=title,
        progress=progress,
    )  # fmt: skip
