"""Measurements of the claims about Add & Norm. Writes results/claims.json, from which table.py makes tables of docs/claims.md.

Untrained stacks are the toy model of the theory (`addnorm.lab.toy_model`), trained ones the character models of the lab
(`addnorm.lab.train`). The criteria are in claims.py; the verdicts are computed. One thread; a few minutes.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import claims
import exact_numbers
import torch
from torch import nn

import addnorm
from addnorm import ResidualStack, Wiring, wirings
from addnorm._util.numbers import format_number
from addnorm.bench import timing
from addnorm.bench.case import Case, Document, Results, Row, grid
from addnorm.bench.harness import Benchmark
from addnorm.bench.jobs import eager, ours
from addnorm.bench.pages import headline, markdown
from addnorm.bench.script import main
from addnorm.lab import Run, Text, measure, python_docs
from addnorm.lab.models import CharLM
from addnorm.lab.toy_model import StreamMeasurement, ToyModel, geometric_mean, measure_stream, token_similarity
from addnorm.lab.train import Training
from addnorm.nn import block

DEPTHS = (2, 4, 8, 16, 32, 64)
SEEDS = tuple(range(4))
TRAINED_SEEDS = (0, 1)
STEPS, WARM_UP = 300, 100
RATES = {6: (3e-4, 1e-3, 3e-3), 12: (3e-4, 1e-3)}
D = 64
HEADS, TOKENS, BATCH = 4, 32, 8  # of the trained stacks
PROBED = 32  # sequences of the test part on which a trained model's gradient is taken
DIVERGED = 1e30  # in place of a loss that is not finite
COST_D, COST_TOKENS = (256, 768), 512

WIRINGS: dict[str, Wiring] = {
    "pre_ln": wirings.pre_ln(), "post_ln": wirings.post_ln(), "deepnorm": wirings.deepnorm(), "no_norm": wirings.no_norm(),
    "no_residual": wirings.no_residual(), "no_residual, no norm": wirings.no_residual(norm=False),
}  # fmt: skip


def depth() -> Iterator[Row]:
    """Yield stream and gradient of untrained stacks by depth: geometric means over the seeds, arithmetic means of cosines."""
    for name, wiring in WIRINGS.items():
        for n in DEPTHS:
            models = [ToyModel(n, wiring, seed, sequences=4, init=name == "deepnorm") for seed in SEEDS]
            results = [model.measure_stream() for model in models]
            row = {
                "wiring": name, "num_layers": n,
                "scale": geometric_mean(one.variances()[-1] ** 0.5 for one in results),
                "gradient": geometric_mean(one.gradient_ratio() for one in results),
                "similarity": statistics.fmean(token_similarity(one.streams[-1].double()) for one in results),
                "memory": statistics.fmean(one.input_similarity() for one in results),
            }  # fmt: skip
            if not name.startswith("no_residual"):  # without a residual nothing passes along it
                alone = (model.measure_stream(residual_alone=True).gradient_ratio() for model in models)
                row["gradient_residual_alone"] = geometric_mean(alone)
            yield row


def training(text: Text) -> Iterator[tuple[Row, list[CharLM]]]:
    """Yield a row for each wiring and learning rate, with the trained models."""
    runs = [(6, name, warm_up) for name in ("pre_ln", "post_ln") for warm_up in (0, WARM_UP)]
    runs += [(12, name, 0) for name in ("pre_ln", "post_ln", "deepnorm", "no_residual", "no_norm")]
    for n, name, warm_up in runs:
        for rate in RATES[n]:
            settings = (WIRINGS[name], n, D, HEADS, TOKENS, BATCH, STEPS, rate, warm_up)
            made = [Training(Run(*settings, seed, every=0), text) for seed in TRAINED_SEEDS]
            models = [one.model for one in made]
            before = geometric_mean(through(model, text).gradient_ratio() for model in models)
            for one in made:
                one.finish()
            results = [finite(measure.held_out_loss(model, text, "test", TOKENS)) for model in models]
            yield {
                "wiring": name, "num_layers": n, "lr": rate, "warm_up": warm_up, "loss": statistics.fmean(results),
                "losses": results, "gradient_before": before,
                "gradient_after": finite(geometric_mean(through(model, text).gradient_ratio() for model in models)),
            }, models  # fmt: skip


def through(model: CharLM, text: Text) -> StreamMeasurement:
    """Return the stream of a model and its gradient at every sublayer, on the same sequences for all models."""
    read, following = text.held_out("test", PROBED, TOKENS)
    return measure_stream(
        model.decoder.stack, model.embed(read), lambda y: measure.cross_entropy(model.head(y), following)
    )


def finite(value: float) -> float:
    """Return the number, or DIVERGED if it is not finite."""
    return value if math.isfinite(value) else DIVERGED


Change = Callable[[list[Any]], Iterator[list[Any]]]


def moves(wiring: Wiring, change: Change, **options: Any) -> float:
    """Return how far an untrained output moves when its sublayers change: 1 is as far as another input would move it."""
    results = []
    for seed in SEEDS:
        model = ToyModel(12, wiring, seed, sequences=4)
        sublayers: list[Any] = [connection.sublayer for connection in model.stack.connections]
        for changed in change(sublayers):
            other = ResidualStack(changed, D, wiring, elementwise_affine=False, **options)
            with torch.no_grad():
                y = model.stack(model.x)
                results.append(float((other(model.x) - y).norm() / (y.roll(1, 0) - y).norm()))
    return statistics.fmean(results)


def without_one(sublayers: list[Any]) -> Iterator[list[Any]]:
    """Yield the sublayers without one, for each."""
    return (sublayers[:i] + sublayers[i + 1 :] for i in range(len(sublayers)))


def with_one_louder(sublayers: list[Any]) -> Iterator[list[Any]]:
    """Yield the sublayers with the output of one in the middle a hundred times as large."""
    louder = sublayers[11]
    yield [*sublayers[:11], lambda x: 100.0 * louder(x), *sublayers[12:]]


def removal(trained: dict[str, list[CharLM]], text: Text) -> Iterator[Row]:
    """Yield the effect of removing one sublayer: on an untrained stack, and on the loss of a trained model."""
    for name, wiring in WIRINGS.items():
        if name in ("no_norm", "no_residual, no norm"):
            continue
        untrained = moves(wiring, without_one, sublayers_per_layer=1)
        row: Row = {"wiring": name, "moves": untrained, "num_layers": None, "of": 0, "broken": 0, "loss": None,
                    "median_rise": None, "largest_rise": None}  # fmt: skip
        if name in trained:
            losses = [measure.held_out_loss(model, text, "test", TOKENS) for model in trained[name]]
            rises = [
                [one["rise"] for one in measure.measure_ablation(model, text, TOKENS, measure.EVALUATED)]
                for model in trained[name]
            ]
            every = [rise for one in rises for rise in one]
            row |= {
                "num_layers": len(rises[0]) // 2, "of": len(every), "loss": statistics.fmean(losses),
                "median_rise": statistics.median(every), "largest_rise": max(every), "rises": rises,
                "broken": sum(
                    rise > 0.5 * (text.entropy - loss) for one, loss in zip(rises, losses, strict=True) for rise in one
                ),
            }  # fmt: skip
        yield row


def cost(rounds: int) -> Iterator[Row]:
    """Yield the share of Add & Norm in an encoder block: of the parameters, and of the time of a forward and backward.

    The two Add & Norms and the two sublayers are timed separately, interleaved.
    """
    for d in COST_D:
        torch.manual_seed(0)
        case = Case(norm="layer", job="forward", rows=COST_TOKENS, d=d, dtype="float32")
        sublayers = block(d, d // 64, causal=True, activation="gelu")
        norms = [addnorm.LayerNorm(d) for _ in sublayers]
        x, branch, cotangent = (torch.randn(1, COST_TOKENS, d, requires_grad=True) for _ in range(3))

        def step(calls: list[Any], cotangent: Any = cotangent) -> None:
            for call, arguments, wanted in calls:
                torch.autograd.grad(call(*arguments), wanted, cotangent)

        runs: dict[str, list[Any]] = {"sublayers": [(one, (x,), [x, *one.parameters()]) for one in sublayers]}
        for name, op in (("eager", eager(case)), ("addnorm", ours(case))):
            runs[name] = [(op, tensors := (x, branch, norm.weight, norm.bias), tensors) for norm in norms]
        times = timing.measure(case, {name: partial(step, calls) for name, calls in runs.items()}, rounds)["rows"]
        ms = {row["variant"]: row["median_us"] / 1e3 for row in times}
        own = count(norms)
        yield {
            "d": d, "tokens": COST_TOKENS, "rounds": rounds, "parameters": own / (own + count(sublayers)),
            **{name: ms[name] / (ms[name] + ms["sublayers"]) for name in ("eager", "addnorm")}, "milliseconds": ms,
        }  # fmt: skip


def count(modules: list[Any]) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in nn.ModuleList(modules).parameters())


def trained(text: Text) -> Results:
    """Return the rows of all trainings, and of removing sublayers from the best models."""
    rows, best = [], dict[str, tuple[float, list[CharLM]]]()
    for row, models in training(text):
        print(
            f"{row['wiring']}, {row['num_layers']} layers, lr {row['lr']:g}: {row['loss']:.3f}",
            file=sys.stderr,
            flush=True,
        )
        rows.append(row)
        learned = row["loss"] < text.entropy - claims.LEARNED
        if learned and row["loss"] < best.get(row["wiring"], (math.inf,))[0]:
            best[row["wiring"]] = row["loss"], models
    return {"training": rows, "removal": [*removal({name: models for name, (_, models) in best.items()}, text)]}


def measure_part(case: Case, *, rounds: int) -> Results:
    """Return the raw numbers of a part."""
    if case.part == "exact":
        distorted = {
            f"distorted, {name}": moves(wirings.get(name), with_one_louder)
            for name in ("pre_ln", "post_ln", "reordered", "no_norm")
        }
        return {"exact": [exact_numbers.measure(D) | distorted]}
    if case.part == "trained":
        return trained(python_docs())
    return {case.part: [*(depth() if case.part == "depth" else cost(rounds))]}


def finish(results: Results, head: Document) -> Document:
    """Return the raw numbers, which are judged once all parts are measured."""
    if not all(results.values()):
        return results
    (exact,) = results["exact"]
    return {"results": {"unigram": python_docs().entropy, **results, "exact": exact}}


# ------------------------------------------------------------------------------------------------ tables of the pages


def claims_section(document: Document) -> str:
    """Return the table of the claims: criterion, measured numbers, verdict."""
    return f"{claims.table(document, numbers)}\n\n{headline(document)}."


def depth_section(document: Document) -> str:
    """Return the table of untrained stacks: a line a wiring and number, a column a depth."""
    titles = {
        "scale": "size of x_L (root mean square)", "gradient": "gradient at x_0 over that at x_L",
        "gradient_residual_alone": "the same, along the residual alone", "similarity": "cosine of two tokens of x_L",
        "memory": "cosine of a token's x_L and x_0",
    }  # fmt: skip
    rows = document["results"]["depth"]
    return markdown(
        {"number": title, "wiring": f"`{wiring}`",
         **{f"L = {row['num_layers']}": short(row[key]) for row in rows if row["wiring"] == wiring}}
        for key, title in titles.items() for wiring in dict.fromkeys(row["wiring"] for row in rows if key in row)
    )  # fmt: skip


def training_section(document: Document) -> str:
    """Return the table of trained stacks: a line a run; the best rate of a setting in bold, with a star at the grid's edge."""
    rows, lines = document["results"]["training"], []
    for row in rows:
        setting = claims.rows_of(rows, **{key: row[key] for key in ("wiring", "num_layers", "warm_up")})
        lines.append({
            "wiring": f"`{row['wiring']}`", "L": f"{row['num_layers']}", "learning rate": f"{row['lr']:g}",
            "warm-up": f"{row['warm_up']}", "loss": claims.mark_best(f"{row['loss']:.3f}", row, setting),
            "gradient at x_0 over x_L: before": short(row["gradient_before"]), "after": short(row["gradient_after"]),
        })  # fmt: skip
    steps, seeds = document["protocol"]["steps"], len(document["protocol"]["trained_seeds"])
    table = markdown(lines)
    return (
        f"{table}\n\nLoss in nats a character after {steps} steps, the mean of {seeds} seeds; {claims.measured_where(document)}. "
        f"Bold: the best rate of a setting.{claims.EDGE if claims.STAR in table else ''}"
    )


def numbers(measured: Row) -> str:
    """Return the numbers of a claim, short: of a series by depth the first and the last."""
    parts = []
    for name, value in measured.items():
        if isinstance(value, dict) and all(key.isdigit() for key in value):
            first, *_, last = value
            parts.append(f"{name}: {short(value[first])} at L = {first}, {short(value[last])} at L = {last}")
        elif isinstance(value, dict):
            some = ", ".join(f"{key} {short(one)}" for key, one in value.items() if one is not None)
            parts.append(f"{name}: {some}")
        else:
            parts.append(f"{name}: {short(value)}")
    return "<br>".join(parts)


def short(value: float) -> str:
    """Return a number with three digits; what differs from zero by round-off only is zero."""
    return "0" if abs(value) < 1e-15 else format_number(value, 3, trim=True)


BENCHMARK = Benchmark(
    "claims", grid(part=("exact", "cost", "depth", "trained")), measure_part, lambda case: case.part,
    parts=("training", "exact", "cost", "depth", "removal"),
    protocol={
        "depths": DEPTHS, "seeds": SEEDS, "trained_seeds": TRAINED_SEEDS, "steps": STEPS, "warm_up": WARM_UP,
        "rates": RATES, "d": D, "nhead": HEADS, "tokens": TOKENS, "batch": BATCH, "text": "pydoc_data.topics",
        "init": "the wiring's own rule; where that is plain Xavier, queries, keys and values as one matrix",
    },
    finish=finish, verdicts=partial(claims.judge_all, claims.CLAIMS), report=claims.report, threads=1, idle=False,
    sections={
        "docs/claims.md#claims": claims_section, "docs/claims.md#claims-by-depth": depth_section,
        "docs/claims.md#claims-trained": training_section,
    },
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
