"""Whole stacks: a fused encoder against the same sublayers in a plain loop, and against torch.nn.TransformerEncoder.

All three have equal weights. `plain` is what everyone writes, x = x + f(norm(x)) or x = norm(x + f(x)) with torch.nn.LayerNorm
over addnorm's own attention and feed-forward: what differs from it is the Add & Norm and nothing else. `torch` is PyTorch's
module, in inference with its fused path.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from statistics import geometric_mean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from addnorm import nn as ours
from addnorm.bench import frame
from addnorm.bench.frame import Document, Progress, document
from addnorm.bench.summary import claim
from addnorm.bench.timing import ROUNDS, Row, interleaved, spread

__all__ = ["JOBS", "TARGET", "Cell", "cells", "measure", "run", "summarize"]

SCHEMA = 1
LAYERS = 4
HEAD = 64  # features a head
TARGET = 0.95
PEERS = {"plain": "plain PyTorch", "torch": "torch.nn.TransformerEncoder"}
JOBS = {"inference": "inference", "training": "forward + backward"}
WIRINGS = ("pre_ln", "post_ln")
WIDTHS = (64, 256, 768)
TOKENS = ((1, 1), (1, 128), (16, 128))  # batch, tokens


class Cell(NamedTuple):
    """One line of the matrix: an encoder of `LAYERS` layers over `(batch, tokens, d)`."""

    wiring: str
    job: str
    batch: int
    tokens: int
    d: int
    threads: int


def cells(
    wirings: Sequence[str] = WIRINGS,
    jobs: Sequence[str] = tuple(JOBS),
    widths: Sequence[int] = WIDTHS,
    *,
    threads: int | None = None,
) -> list[Cell]:
    """The matrix; threads None is what torch has."""
    threads = threads or torch.get_num_threads()
    lines = itertools.product(wirings, jobs, widths, TOKENS)
    return [Cell(wiring, job, batch, tokens, d, threads) for wiring, job, d, (batch, tokens) in lines]


class Plain(nn.Module):
    """The sublayers of an encoder as everyone writes them, with norms of torch's own."""

    def __init__(self, encoder: ours.Encoder) -> None:
        super().__init__()
        stack = encoder.stack
        connections: Any = stack.connections
        self.sublayers = nn.ModuleList(here.sublayer for here in connections)
        self.pre = stack.wiring.name == "pre_ln"
        norms = [here.norm_in if self.pre else here.norm_out for here in connections]
        self.norms = nn.ModuleList(_torchs(norm) for norm in norms)
        self.final = _torchs(stack.norm_final) if self.pre else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The stream through all of them."""
        if self.pre:
            for sublayer, norm in zip(self.sublayers, self.norms, strict=True):
                x = x + sublayer(norm(x))
        else:
            for sublayer, norm in zip(self.sublayers, self.norms, strict=True):
                x = norm(x + sublayer(x))
        y: Tensor = self.final(x)
        return y


def _torchs(norm: Any) -> nn.LayerNorm:
    made = nn.LayerNorm(norm.normalized_shape, norm.eps)
    made.weight, made.bias = norm.weight, norm.bias
    return made


def variants(cell: Cell) -> tuple[dict[str, nn.Module], Tensor, Tensor]:
    """The three modules, an input, and a gradient of the output."""
    torch.manual_seed(0)
    pre = cell.wiring == "pre_ln"
    layer = nn.TransformerEncoderLayer(
        cell.d, cell.d // HEAD, 4 * cell.d, dropout=0.0, batch_first=True, norm_first=pre
    )
    final = nn.LayerNorm(cell.d) if pre else None
    theirs = nn.TransformerEncoder(layer, LAYERS, final, enable_nested_tensor=False)
    encoder = ours.from_torch(theirs)
    assert isinstance(encoder, ours.Encoder)
    # Each with weights in memory of its own: of two that shared them the second would find them in the cache.
    modules = {"addnorm": encoder, "plain": Plain(copy.deepcopy(encoder)), "torch": theirs}
    for module in modules.values():
        module.train(cell.job == "training")
    x = torch.randn(cell.batch, cell.tokens, cell.d, requires_grad=cell.job == "training")
    return modules, x, torch.randn(cell.batch, cell.tokens, cell.d)


def _call(module: nn.Module, job: str, dy: Tensor) -> Callable[..., Any]:
    if job == "inference":

        def infer(x: Tensor) -> Tensor:
            with torch.no_grad():
                y: Tensor = module(x)
            return y

        return infer
    parameters = list(module.parameters())

    def train(x: Tensor) -> Any:
        return torch.autograd.grad(module(x), [x, *parameters], dy)

    return train


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """What autograd keeps for the backward besides the parameters and the input."""
    saved: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        saved[storage.data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        kept = module(x)  # alive while it is counted
    own = {t.untyped_storage().data_ptr() for t in (x, *module.parameters())}
    found = sum(t.untyped_storage().nbytes() for pointer, t in saved.items() if pointer not in own)
    del kept
    return found


def measure(cell: Cell, *, rounds: int = ROUNDS) -> list[Row]:
    """The rows of one cell, one a variant; where the outputs differ by more than roundings, an error."""
    modules, x, dy = variants(cell)
    with torch.no_grad():
        outputs = {name: module(x) for name, module in modules.items()}
    for name in PEERS:
        torch.testing.assert_close(outputs["addnorm"], outputs[name], rtol=1e-4, atol=1e-4)
    calls = {name: _call(module, cell.job, dy) for name, module in modules.items()}
    times = interleaved(calls, [x], rounds)
    rows = []
    for name, (samples, repeats) in times.items():
        row: Row = {**cell._asdict(), "variant": name, **spread(samples), "repeats": repeats}
        if cell.job == "training":
            row["saved_bytes"] = saved_bytes(modules[name], x)
        rows.append(row)
    return rows


def by_cell(rows: Sequence[Row]) -> dict[Cell, dict[str, Row]]:
    """The rows of a document: cell -> variant -> row."""
    return frame.by_cell(rows, Cell)


def ratio(variants: dict[str, Row], peer: str) -> float:
    """How many times as fast as a peer."""
    return float(variants[peer]["median_us"] / variants["addnorm"]["median_us"])


def summarize(rows: Sequence[Row]) -> list[Row]:
    """For each job and peer the lowest ratio, which has a target, the mean, and the lowest share of saved bytes."""
    table, summary = by_cell(rows), []
    for job, peer in itertools.product(JOBS, PEERS):
        of_job = {cell: found for cell, found in table.items() if cell.job == job}
        if not of_job:
            continue
        ratios = [ratio(found, peer) for found in of_job.values()]
        more = {"job": job, "peer": peer, "cells": len(ratios)}
        met = sum(value >= TARGET for value in ratios)
        summary += [
            claim(
                f"{JOBS[job]}: lowest, against {PEERS[peer]}", None, min(ratios), ">=", TARGET, **more, cells_met=met
            ),
            claim(f"{JOBS[job]}: mean, against {PEERS[peer]}", None, geometric_mean(ratios), ">=", None, **more),
        ]
        if job == "training":
            share = max(f["addnorm"]["saved_bytes"] / f[peer]["saved_bytes"] for f in of_job.values())
            summary.append(claim(f"saved bytes: highest share of {PEERS[peer]}'s", None, share, "<=", None, **more))
    return summary


def run(chosen: Sequence[Cell] | None = None, *, rounds: int = ROUNDS, progress: Progress | None = None) -> Document:
    """Measures the cells (None: all) and returns the document; an interrupt ends it early, `complete` is then False."""
    return document(
        cells() if chosen is None else chosen,
        lambda cell: {"rows": measure(cell, rounds=rounds)},
        lambda found: summarize(found["rows"]),
        parts=("rows",),
        protocol={
            "rounds": rounds, "layers": LAYERS, "head_dim": HEAD, "dim_feedforward": "4 d", "dropout": 0.0, "dtype": "float32",
        },
        schema=SCHEMA,
        title=lambda cell: f"{cell.wiring} {JOBS[cell.job]}, {cell.batch} x {cell.tokens} x {cell.d}",
        progress=progress,
    )  # fmt: skip
