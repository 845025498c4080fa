"""Measurements of the claims about Add & Norm. Writes results/claims.json, from which table.py makes tables of docs/claims.md.

python benchmarks/bench_claims.py            measure, and judge
python benchmarks/bench_claims.py --judge    judge the stored numbers again, after a criterion has changed

Untrained stacks are the toy model of the theory (`addnorm.lab.toy_model`), trained ones the character models of the lab
(`addnorm.lab.train`). The criteria are in claims.py; the verdicts are computed. One thread; a few minutes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import claims
import exact_numbers
import torch
from harness import RESULTS, Document, markdown, read, right
from torch import Tensor

import addnorm
from addnorm import ResidualStack, Wiring, wirings
from addnorm._util.numbers import format_number
from addnorm.bench import environment
from addnorm.bench.cases import expressions
from addnorm.bench.harness import Run as Measured
from addnorm.bench.harness import header, write
from addnorm.bench.timing import interleaved
from addnorm.lab import Run, Text, measure, python_docs
from addnorm.lab.models import CharLM
from addnorm.lab.toy_model import StreamMeasurement, ToyModel, geometric_mean, measure_stream, token_similarity
from addnorm.lab.train import Training
from addnorm.nn import block

SCHEMA = 1
DEPTHS = (2, 4, 8, 16, 32, 64)
SEEDS = tuple(range(4))
TRAINED_SEEDS = (0, 1)
STEPS, WARM_UP = 300, 100
RATES = {6: (3e-4, 1e-3, 3e-3), 12: (3e-4, 1e-3)}
D = 64
HEADS, TOKENS, BATCH = 4, 32, 8  # of the trained stacks
PROBED = 32  # sequences of the test part on which a trained model's gradient is taken
STAR = r"\*"  # marks a best rate at the edge of the grid
EDGE = f" {STAR}: the best rate is at the edge of the grid; a better one may lie outside."
DIVERGED = 1e30  # in place of a loss that is not finite

WIRINGS: dict[str, Wiring] = {
    "pre_ln": wirings.pre_ln(), "post_ln": wirings.post_ln(), "deepnorm": wirings.deepnorm(), "no_norm": wirings.no_norm(),
    "no_residual": wirings.no_residual(), "no_residual, no norm": wirings.no_residual(norm=False),
}  # fmt: skip

Row = dict[str, Any]


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
            made = [Training(run_of(name, n, seed, rate, warm_up), text) for seed in TRAINED_SEEDS]
            models = [one.model for one in made]
            before = geometric_mean(through(model, text).gradient_ratio() for model in models)
            for one in made:
                one.finish()
            results = [finite(held_out(model, text)) for model in models]
            yield {
                "wiring": name, "num_layers": n, "lr": rate, "warm_up": warm_up, "loss": statistics.fmean(results),
                "losses": results, "gradient_before": before,
                "gradient_after": finite(geometric_mean(through(model, text).gradient_ratio() for model in models)),
            }, models  # fmt: skip


def run_of(name: str, num_layers: int, seed: int = 0, lr: float = 1e-3, warm_up: int = 0) -> Run:
    """Return a training of the lab without recording. As everywhere in the lab, queries, keys and values are one matrix."""
    return Run(WIRINGS[name], num_layers, D, HEADS, TOKENS, BATCH, STEPS, lr, warm_up, seed, every=0)


@torch.no_grad()
def held_out(model: CharLM, text: Text, stack: ResidualStack | None = None) -> float:
    """Return the loss on held-out text; with `stack`, of another stack in place of the model's own."""
    read, following = text.held_out("test", measure.EVALUATED, TOKENS)
    return float(measure.cross_entropy(model.head((stack or model.decoder.stack)(model.embed(read))), following))


def through(model: CharLM, text: Text) -> StreamMeasurement:
    """Return the stream of a model and its gradient at every sublayer, on the same sequences for all models."""
    read, following = text.held_out("test", PROBED, TOKENS)
    return measure_stream(
        model.decoder.stack, model.embed(read), lambda y: measure.cross_entropy(model.head(y), following)
    )


def finite(value: float) -> float:
    """Return the number, or DIVERGED if it is not finite."""
    return value if math.isfinite(value) else DIVERGED


def moves(wiring: Wiring) -> float:
    """Return how far an untrained output moves without one sublayer: 1 is as far as another input would move it."""
    results = []
    for seed in SEEDS:
        model = ToyModel(12, wiring, seed, sequences=4)
        modules: list[Any] = [connection.sublayer for connection in model.stack.connections]
        for i in range(len(modules)):
            rest = ResidualStack(
                modules[:i] + modules[i + 1 :], D, wiring, sublayers_per_layer=1, elementwise_affine=False
            )
            results.append(moved(model, rest))
    return statistics.fmean(results)


def distorted(wiring: Wiring, factor: float = 100.0) -> float:
    """Return the same distance when the output of a sublayer in the middle is `factor` times as large."""
    results = []
    for seed in SEEDS:
        model = ToyModel(12, wiring, seed, sequences=4)
        modules: list[Any] = [connection.sublayer for connection in model.stack.connections]
        louder = modules[11]
        modules[11] = lambda x, louder=louder: factor * louder(x)
        results.append(moved(model, ResidualStack(modules, D, wiring, elementwise_affine=False)))
    return statistics.fmean(results)


@torch.no_grad()
def moved(model: ToyModel, other: ResidualStack) -> float:
    """Return the distance of another stack's output, in distances between the outputs of two inputs."""
    y = model.stack(model.x)
    return float((other(model.x) - y).norm() / (y.roll(1, 0) - y).norm())


def removal(trained: dict[str, list[CharLM]], text: Text) -> Iterator[Row]:
    """Yield the effect of removing one sublayer: on an untrained stack, and on the loss of a trained model."""
    for name, wiring in WIRINGS.items():
        if name in ("no_norm", "no_residual, no norm"):
            continue
        row: Row = {"wiring": name, "moves": moves(wiring), "num_layers": None, "of": 0, "broken": 0, "loss": None,
                    "median_rise": None, "largest_rise": None}  # fmt: skip
        if name in trained:
            losses = [held_out(model, text) for model in trained[name]]
            rises = [
                [held_out(model, text, stack.without(i)) - loss for i in range(len(stack.connections))]
                for model, loss in zip(trained[name], losses, strict=True)
                for stack in [model.decoder.stack]
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


def cost(rounds: int = 21, tokens: int = 512) -> Iterator[Row]:
    """Yield the share of Add & Norm in an encoder block: of the parameters, and of the time of a forward and backward.

    The two Add & Norms and the two sublayers are timed separately, interleaved.
    """
    for d in (256, 768):
        torch.manual_seed(0)
        sublayers = block(d, d // 64, causal=True, activation="gelu")
        norms = [addnorm.LayerNorm(d) for _ in sublayers]
        x, branch, cotangent = (torch.randn(1, tokens, d, requires_grad=True) for _ in range(3))

        def step(calls: list[Any], cotangent: Tensor = cotangent) -> None:
            for call, arguments, wanted in calls:
                torch.autograd.grad(call(*arguments), wanted, cotangent)

        runs: dict[str, list[Any]] = {
            "sublayers": [(sublayer, (x,), [x, *sublayer.parameters()]) for sublayer in sublayers],
            **{
                name: [(op, tensors := (x, branch, norm.weight, norm.bias), tensors) for norm in norms]
                for name, op in expressions("layer", "forward", d).items()
            },
        }
        times = interleaved({name: partial(step, calls) for name, calls in runs.items()}, [], rounds)
        ms = {name: row["median_us"] / 1e3 for name, row in times.items()}
        own = count(norms)
        yield {
            "d": d, "tokens": tokens, "rounds": rounds, "parameters": own / (own + count(sublayers)),
            "eager": ms["eager"] / (ms["eager"] + ms["sublayers"]),
            "addnorm": ms["addnorm"] / (ms["addnorm"] + ms["sublayers"]),
            "milliseconds": ms,
        }  # fmt: skip


def count(modules: list[Any]) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def measured(say: Callable[[str], None]) -> claims.Results:
    """Return all raw numbers."""
    text = python_docs()
    results: claims.Results = {"unigram": text.entropy, "training": []}
    say("single numbers, and the share of time")
    results["exact"] = exact_numbers.measure(D)
    for name in ("pre_ln", "post_ln", "reordered", "no_norm"):
        results["exact"][f"distorted, {name}"] = distorted(wirings.get(name))
    results["cost"] = list(cost())
    say("untrained stacks")
    results["depth"] = list(depth())
    trained: dict[str, tuple[float, list[CharLM]]] = {}
    for row, models in training(text):
        say(
            f"trained {row['wiring']}, {row['num_layers']} layers, lr {row['lr']:g}, warm-up {row['warm_up']}: {row['loss']:.3f}"
        )
        results["training"].append(row)
        known = row["loss"] < results["unigram"] - claims.LEARNED
        if known and row["loss"] < trained.get(row["wiring"], (float("inf"),))[0]:
            trained[row["wiring"]] = row["loss"], models
    say("taking sublayers out")
    results["removal"] = list(removal({name: models for name, (_, models) in trained.items()}, text))
    return results


def main() -> int:
    """Measure, judge, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--judge", action="store_true", help="judge the stored numbers without measuring again")
    path = RESULTS / "claims.json"
    if parser.parse_args().judge:
        stored = read(path)
        write({**stored, "claims": claims.judge_all(stored["results"])}, path)
        return 0
    begin = time.monotonic()
    torch.set_num_threads(1)
    where, meter = environment.describe(), environment.LoadMeter()

    def say(what: str) -> None:
        print(f"{time.monotonic() - begin:5.0f} s  {what}", flush=True)

    results = measured(say)
    document = {
        **header(SCHEMA, Measured({}, ended="done")),
        **where,
        "threads": 1,
        **meter.columns(),
        "protocol": {
            "depths": DEPTHS, "seeds": SEEDS, "trained_seeds": TRAINED_SEEDS, "steps": STEPS, "warm_up": WARM_UP,
            "rates": RATES, "d": D, "nhead": HEADS, "tokens": TOKENS, "batch": BATCH, "text": "pydoc_data.topics",
            "init": "the wiring's own rule; where that is plain Xavier, queries, keys and values as one matrix",
            "seconds": round(time.monotonic() - begin),
        },
        "claims": claims.judge_all(results),
        "results": results,
    }  # fmt: skip
    for one in document["claims"]:
        print(f"{one['claim']}\n    {one['verdict']}")
    print(f"Written: {write(document, path)}")
    return 0


# ------------------------------------------------------------------------------------------------ tables of the pages


def claims_section(document: Document) -> str:
    """Return the table of the claims: criterion, measured numbers, verdict."""
    lines = [
        [f"{one['claim']} ({one['lesson'].replace('; ', ' / ')})", one["criterion"], numbers(one["measured"]),
         f"**{one['verdict']}**"]
        for one in document["claims"]
    ]  # fmt: skip
    commit = document["commit"]
    at = f"commit {commit[:10]}{' with changes' if document['dirty'] else ''}" if commit else ""
    versions = f"torch {document['versions']['torch']}, Python {document['versions']['python']}"
    load = f"load {document['load']:.1f} before it began"  # the shares of time in the last claim depend on it
    where = ", ".join(
        filter(None, [document["machine"]["cpu"], "one thread", versions, at, document["date"][:10], load])
    )
    return f"{markdown(['claim', 'criterion', 'measured', 'verdict'], lines)}\n\n{where}."


def depth_section(document: Document) -> str:
    """Return the table of untrained stacks: a line a wiring and number, a column a depth."""
    titles = {
        "scale": "size of x_L (root mean square)", "gradient": "gradient at x_0 over that at x_L",
        "gradient_residual_alone": "the same, along the residual alone", "similarity": "cosine of two tokens of x_L",
        "memory": "cosine of a token's x_L and x_0",
    }  # fmt: skip
    rows = document["results"]["depth"]
    depths = list(dict.fromkeys(row["num_layers"] for row in rows))
    lines = []
    for key, title in titles.items():
        for wiring in dict.fromkeys(row["wiring"] for row in rows if key in row):
            values = {row["num_layers"]: row[key] for row in rows if row["wiring"] == wiring}
            lines.append([title, f"`{wiring}`", *(short(values[n]) for n in depths)])
    return markdown(["number", "wiring", *right(*(f"L = {n}" for n in depths))], lines)


def training_section(document: Document) -> str:
    """Return the table of trained stacks: a line a run; the best rate of a setting in bold, with a star at the grid's edge."""
    rows, lines = document["results"]["training"], []
    for row in rows:
        setting = [one for one in rows if all(one[key] == row[key] for key in ("wiring", "num_layers", "warm_up"))]
        loss = f"{row['loss']:.3f}"
        if row is claims.best_of(setting):
            loss = f"**{loss}{STAR if claims.is_at_edge(row, setting) else ''}**"
        lines.append([
            f"`{row['wiring']}`", f"{row['num_layers']}", f"{row['lr']:g}", f"{row['warm_up']}", loss,
            short(row["gradient_before"]), short(row["gradient_after"]),
        ])  # fmt: skip
    head = right("L", "learning rate", "warm-up", "loss", "gradient at x_0 over x_L: before", "after")
    steps, seeds = document["protocol"]["steps"], len(document["protocol"]["trained_seeds"])
    baseline = f"a model that knows only how often each character occurs has {document['results']['unigram']:.3f}"
    return (
        f"{markdown(['wiring', *head], lines)}\n\nLoss in nats a character after {steps} steps, the mean of {seeds} seeds; "
        f"{baseline}. Bold: the best rate of a setting.{EDGE if any(STAR in line[4] for line in lines) else ''}"
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


if __name__ == "__main__":
    raise SystemExit(main())
