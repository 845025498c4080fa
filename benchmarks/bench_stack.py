"""Whole encoders: fused, in plain PyTorch, and as torch.nn.TransformerEncoder. Writes results/stack.json.

All three have equal weights. `plain` is what most people write, x = x + f(norm(x)) or x = norm(x + f(x)), with torch.nn.LayerNorm
over the very modules of addnorm's attention and feed-forward: it differs in the Add & Norm and in nothing else. `torch` is
PyTorch's module, in inference with its fast path. Ratios are taken round by round. README.md in this folder has the protocol.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from statistics import geometric_mean
from typing import Any

import harness
import torch
from harness import Case, Column, Document, Results, Row, by_case, digits, headline, markdown
from torch import Tensor, nn

from addnorm import nn as addnorm_nn
from addnorm._util.numbers import format_number
from addnorm.bench.targets import Target
from addnorm.bench.timing import interleaved
from addnorm.fusion.benchmark import saved_bytes

FIELDS = ("wiring", "job", "batch", "tokens", "d", "threads")
LAYERS = 4
HEAD_DIM = 64
LEAST = 0.95
SECONDS = 8.0  # of all rounds of a case
PEERS = {"plain": "plain PyTorch", "torch": "torch.nn.TransformerEncoder"}
JOBS = {"inference": "inference", "training": "forward + backward"}
WIRINGS = ("pre_ln", "post_ln")
WIDTHS = (64, 256, 768)
TOKENS = ((1, 1), (1, 128), (16, 128))  # batch, tokens


def cases(threads: int) -> list[Case]:
    """Return an encoder of `LAYERS` layers over `(batch, tokens, d)` for each combination."""
    return [
        Case(wiring=wiring, job=job, batch=batch, tokens=tokens, d=d, threads=threads)
        for wiring, job, d, (batch, tokens) in itertools.product(WIRINGS, JOBS, WIDTHS, TOKENS)
    ]


class Plain(nn.Module):
    """Sublayers of an encoder in the loop that most people write, with norms of torch's own."""

    def __init__(self, encoder: addnorm_nn.Encoder) -> None:
        super().__init__()
        stack = encoder.stack
        connections: Any = stack.connections
        self.sublayers = nn.ModuleList(one.sublayer for one in connections)
        self.pre = stack.wiring.name == "pre_ln"
        norms = [one.norm_in if self.pre else one.norm_out for one in connections]
        self.norms = nn.ModuleList(torch_norm(norm) for norm in norms)
        self.final = torch_norm(stack.norm_final) if self.pre else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after all sublayers."""
        if self.pre:
            for sublayer, norm in zip(self.sublayers, self.norms, strict=True):
                x = x + sublayer(norm(x))
        else:
            for sublayer, norm in zip(self.sublayers, self.norms, strict=True):
                x = norm(x + sublayer(x))
        y: Tensor = self.final(x)
        return y


def torch_norm(norm: Any) -> nn.LayerNorm:
    """Return torch's LayerNorm with the parameters of addnorm's."""
    made = nn.LayerNorm(norm.normalized_shape, norm.eps)
    made.weight, made.bias = norm.weight, norm.bias
    return made


def variants(case: Case) -> tuple[dict[str, nn.Module], Tensor, Tensor]:
    """Return the three modules, an input, and a gradient of the output."""
    torch.manual_seed(0)
    pre = case.wiring == "pre_ln"
    layer = nn.TransformerEncoderLayer(
        case.d, case.d // HEAD_DIM, 4 * case.d, dropout=0.0, batch_first=True, norm_first=pre
    )
    theirs = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(case.d) if pre else None, enable_nested_tensor=False)
    encoder = addnorm_nn.from_torch(theirs)
    assert isinstance(encoder, addnorm_nn.Encoder)
    # Copies of weights lie elsewhere in memory, which alone can make several per cent. A timed loop follows an untimed call of
    # the same variant, so weights that two variants share are in the cache for both.
    modules = {"addnorm": encoder, "plain": Plain(encoder), "torch": theirs}
    for module in modules.values():
        module.train(case.job == "training")
    shape = (case.batch, case.tokens, case.d)
    return modules, torch.randn(shape, requires_grad=case.job == "training"), torch.randn(shape)


def call_of(module: nn.Module, job: str, dy: Tensor) -> Callable[..., Any]:
    """Return the function that is timed."""
    if job == "inference":

        def infer(x: Tensor) -> Tensor:
            with torch.no_grad():
                y: Tensor = module(x)
            return y

        return infer
    parameters = list(module.parameters())
    return lambda x: torch.autograd.grad(module(x), [x, *parameters], dy)


def measure(case: Case, *, rounds: int) -> Results:
    """Return a row for each variant. Their outputs are compared first.

    Raises:
        AssertionError: the outputs differ by more than round-off.
    """
    modules, x, dy = variants(case)
    with torch.no_grad():
        outputs = {name: module(x) for name, module in modules.items()}
    for name in PEERS:
        torch.testing.assert_close(outputs["addnorm"], outputs[name], rtol=1e-4, atol=1e-4)
    calls = {name: call_of(module, case.job, dy) for name, module in modules.items()}
    times = interleaved(calls, [x], rounds, seconds=SECONDS, peer="addnorm")
    rows = []
    for name, row in times.items():
        if case.job == "training":
            row["saved_bytes"] = saved_bytes(partial(modules[name], x), modules[name], x)
        rows.append(case.row(variant=name, **row))
    return {"rows": rows}


def speed(row: Row) -> tuple[float, float, float]:
    """Return how many times as fast addnorm is as a variant, and the 95 % interval, from the variant's row."""
    return 1 / row["paired_ratio"], 1 / row["paired_high"], 1 / row["paired_low"]


def summarize(results: Results) -> list[Row]:
    """Return for each job and peer the lowest ratio, which has a target, the mean, and the highest share of saved bytes."""
    table, summary = by_case(results["rows"], FIELDS), []
    for job, peer in itertools.product(JOBS, PEERS):
        of_job = {case: rows for case, rows in table.items() if case.job == job}
        if not of_job:
            continue
        lowest = Target(f"{JOBS[job]}: lowest, against {PEERS[peer]}", ">=", LEAST)
        ratios = [speed(rows[peer])[0] for rows in of_job.values() if peer in rows]
        more: Row = {"job": job, "peer": peer, "cells": len(ratios)}
        mean = Target(f"{JOBS[job]}: mean, against {PEERS[peer]}", ">=", None)
        met = sum(map(bool, map(lowest.met, ratios)))
        summary += [lowest.row(min(ratios), **more, cells_met=met), mean.row(geometric_mean(ratios), **more)]
        if job == "training":
            share = max(rows["addnorm"]["saved_bytes"] / rows[peer]["saved_bytes"] for rows in of_job.values())
            summary.append(Target(f"saved bytes: highest share of {PEERS[peer]}'s", "<=", None).row(share, **more))
    return summary


def title(case: Case) -> str:
    """Return a case in words."""
    return f"{case.wiring} {JOBS[case.job]}, {case.batch} x {case.tokens} x {case.d}"


BENCHMARK = harness.Benchmark(
    "stack", "Whole encoders beside the same in plain PyTorch", FIELDS, cases, measure, summarize, title,
    protocol={"layers": LAYERS, "head_dim": HEAD_DIM, "dim_feedforward": "4 d", "dropout": 0.0, "dtype": "float32",
              "cell_seconds": SECONDS}, rounds=61,
)  # fmt: skip


def times_as_fast(rows: Mapping[str, Row], peer: str) -> str:
    """Return how many times as fast addnorm is as a peer, its interval, and both times; empty where it was not measured."""
    if peer not in rows:
        return ""
    ratio, low, high = (format_number(value, 3) for value in speed(rows[peer]))
    times = " / ".join(digits(rows[name]["median_us"]) for name in ("addnorm", peer))
    return f"**{ratio}** ({low} to {high}) ({times})"


def speed_section(document: Document) -> str:
    """Return the table of speeds: a line a size, a column a wiring and job."""
    results = by_case(document["rows"], FIELDS)
    columns = list(dict.fromkeys((case.wiring, case.job) for case in results))
    lines = []
    for size, (peer, name) in itertools.product(
        dict.fromkeys((case.batch, case.tokens, case.d) for case in results), PEERS.items()
    ):
        rows = {(c.wiring, c.job): row for c, row in results.items() if (c.batch, c.tokens, c.d) == size}
        lines.append([" x ".join(map(str, size)), name, *(times_as_fast(rows.get(one, {}), peer) for one in columns)])
    head: list[str | Column] = [*harness.right("batch x tokens x d"), "compared with"]
    titles = harness.right(*(f"{wiring}, {JOBS[job]}" for wiring, job in columns))
    return f"Times as fast (95 % interval; median microseconds: addnorm / the other):\n\n{markdown([*head, *titles], lines)}"


def targets_section(document: Document) -> str:
    """Return the table of targets."""
    lines = [[one["name"], harness.bound(one), judged(one)] for one in document["summary"]]
    table = markdown(["measured over the cases", "target", *harness.right("addnorm")], lines)
    return f"{table}\n\n{headline(document)}."


def judged(one: Row) -> str:
    """Return the number of a row of the summary, and how many cases reach the target if it is missed."""
    if one["value"] is None:
        return "not measured"
    met = f" (missed, {one['cells_met']} of {one['cells']} cases reach it)" if one["met"] is False else ""
    return f"{digits(one['value'])}{met}"


if __name__ == "__main__":
    raise SystemExit(harness.main(BENCHMARK))
