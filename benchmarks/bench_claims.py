"""Measurements of the claims about Add & Norm. Writes results/claims.json, from which table.py makes tables of docs/claims.md.

Untrained stacks are the toy model of the theory (`addnorm.lab.toy_model`), trained ones the character models of
`addnorm.lab.compare`. The criteria are in claims.py; the verdicts are computed. One thread; a few minutes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import claims
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import addnorm
from addnorm import ResidualStack, Wiring, wirings
from addnorm.bench import timing
from addnorm.bench.case import Case, Document, Results, Row, grid
from addnorm.bench.harness import Benchmark, main
from addnorm.bench.operation import variants
from addnorm.bench.pages import headline, markdown
from addnorm.lab import Protocol, compare, python_docs
from addnorm.lab.measure import relative_change
from addnorm.lab.results import Group
from addnorm.lab.streams import StreamsRecorder
from addnorm.lab.toy_model import ToyModel, geometric_mean
from addnorm.nn import block

DEPTHS = (2, 4, 8, 16, 32, 64)
SEEDS, TRAINED_SEEDS = (0, 1, 2, 3), (0, 1)
D, EPS = 64, 1e-5
COST_D, COST_TOKENS = (256, 768), 512
# Settings of the trainings. One step, the first, is recorded.
SETTINGS: dict[str, Any] = {"steps": 300, "d_model": D, "nhead": 4, "tokens": 32, "batch": 8, "every": 300}
WARM_UP = 100
TRAININGS = (
    (("pre_ln", "post_ln"), Protocol((6,), (3e-4, 1e-3, 3e-3), (0, WARM_UP), seeds=TRAINED_SEEDS, **SETTINGS)),
    (
        (*claims.COMPLETE, "no_residual", "no_norm"),
        Protocol((12,), (3e-4, 1e-3), (0,), seeds=TRAINED_SEEDS, **SETTINGS),
    ),
)

WIRINGS = {
    **{name: wirings.get(name) for name in (*claims.COMPLETE, "no_norm", "no_residual")},
    "no_residual, no norm": wirings.no_residual(norm=False),
}


def depth() -> Iterator[Row]:
    """Yield stream and gradient of untrained stacks by depth: geometric means over the seeds, arithmetic means of cosines."""
    for name, wiring in WIRINGS.items():
        for n in DEPTHS:
            models = [ToyModel(n, wiring, seed, sequences=4, init=name == "deepnorm") for seed in SEEDS]
            recorders = [model.record() for model in models]
            results = [recorder.statistics() for recorder in recorders]
            row = {
                "wiring": name, "num_layers": n,
                "scale": geometric_mean(one["stream"][-1] for one in results),
                "gradient": gradient_ratio([one["gradient"] for one in results]),
                "similarity": statistics.fmean(one["similarity"][-1] for one in results),
                "memory": statistics.fmean(map(input_similarity, recorders)),
            }  # fmt: skip
            if not name.startswith("no_residual"):  # without a residual nothing passes along it
                alone = [detach_sublayers(model).record().statistics()["gradient"] for model in models]
                row["gradient_residual_alone"] = gradient_ratio(alone)
            yield row


def input_similarity(recorder: StreamsRecorder) -> float:
    """Return the mean cosine of a token's x_L and its x_0."""
    return float(F.cosine_similarity(recorder.states[0][0], recorder.states[-1][0], dim=-1).mean().detach())


def detach_sublayers(model: ToyModel) -> ToyModel:
    """Return the model with its sublayers' outputs detached: the gradient flows only along the residual and its norms."""
    for connection in model.stack.connections:
        sublayer: Any = connection.sublayer
        sublayer.register_forward_hook(lambda module, args, y: y.detach())
    return model


def trained(entropy: float) -> Results:
    """Return a row for each setting of the trainings, and the effect of removing sublayers from trained models."""
    groups = [
        group
        for names, protocol in TRAININGS
        for arm in compare(names, protocol, at_init=False, progress=Console(stderr=True)).arms
        for group in arm.groups
    ]
    rows = [
        {
            "wiring": group.wiring, "num_layers": group.num_layers, "lr": group.lr, "warm_up": group.warm_up,
            "loss": group.loss(), "losses": group.losses(),
            "gradient_before": gradient_ratio([run["recorded"]["gradient"][0] for run in group.runs]),
            "gradient_after": gradient_ratio([run["after"]["gradient"] for run in group.runs if "after" in run]),
        }
        for group in groups
    ]  # fmt: skip
    return {"training": rows, "removal": [*removal(groups, entropy)]}


def gradient_ratio(runs: list[list[float]]) -> float:
    """Return the gradient at x_0 over that at x_L, a geometric mean over the runs; infinity if all have diverged."""
    return geometric_mean(first / last for first, *_, last in runs) if runs else math.inf


def moves(wiring: Wiring, change: Callable[[ResidualStack], Iterator[ResidualStack]]) -> float:
    """Return how far an untrained output moves when its stack changes: 1 is as far as another input would move it."""
    results: list[float] = []
    for seed in SEEDS:
        model = ToyModel(12, wiring, seed, sequences=4)
        with torch.no_grad():
            y = model.stack(model.x)
            distance = (y.roll(1, 0) - y).norm()
            results += [float((changed(model.x) - y).norm() / distance) for changed in change(model.stack)]
    return statistics.fmean(results)


def with_one_louder(stack: ResidualStack) -> Iterator[ResidualStack]:
    """Yield the stack with the output of one sublayer in the middle a hundred times as large."""
    connection: Any = stack.connections[11]
    connection.sublayer.register_forward_hook(lambda module, args, output: 100.0 * output)
    yield stack


def removal(groups: list[Group], entropy: float) -> Iterator[Row]:
    """Yield the effect of removing one sublayer: on an untrained stack, and on the loss of the best models that have learned."""
    for name in (*claims.COMPLETE, "no_residual"):
        learned = [group for group in groups if group.wiring == name and claims.has_learned(group.loss(), entropy)]
        runs = min(learned, key=Group.loss).runs if learned else ()
        rises = [[one["rise"] for one in run["ablation"]] for run in runs]
        every = [rise for one in rises for rise in one]
        broken = sum(rise > 0.5 * (entropy - run["test"]) for one, run in zip(rises, runs, strict=True) for rise in one)
        moved = moves(WIRINGS[name], lambda stack: map(stack.without, range(len(stack.connections))))
        row: Row = {"wiring": name, "moves": moved, "of": len(every), "broken": broken}
        if runs:
            row |= {
                "num_layers": len(rises[0]) // 2, "loss": statistics.fmean(run["test"] for run in runs), "rises": rises,
                "median_rise": statistics.median(every), "largest_rise": max(every),
            }  # fmt: skip
        yield row


def cost(rounds: int) -> Iterator[Row]:
    """Yield the share of Add & Norm in an encoder block: of the parameters, and of the time of a forward and backward.

    One Add & Norm, which counts twice, and the two sublayers are timed separately, interleaved.
    """
    for d in COST_D:
        torch.manual_seed(0)
        case = Case(norm="layer", job="forward_backward", rows=COST_TOKENS, d=d, dtype="float32")
        sublayers = nn.Sequential(*block(d, d // 64, causal=True, activation="gelu"))
        x, cotangent = torch.randn(1, COST_TOKENS, d, requires_grad=True), torch.randn(1, COST_TOKENS, d)
        parameters = [*sublayers.parameters()]
        makers: dict[str, Any] = {
            **variants(case),
            "sublayers": partial(timing.step, sublayers, [x], cotangent, [x, *parameters]),
        }
        ms = {row["variant"]: row["median_us"] / 1e3 for row in timing.compare(case, makers, rounds)["rows"]}
        own, others = 4 * d, sum(parameter.numel() for parameter in parameters)
        yield {
            "d": d, "tokens": COST_TOKENS, "rounds": rounds, "parameters": own / (own + others),
            **{name: 2 * ms[name] / (2 * ms[name] + ms["sublayers"]) for name in ("eager", "addnorm")},
        }  # fmt: skip


def measure_exactly() -> Iterator[Row]:
    """Yield one row, the numbers by name."""
    torch.manual_seed(0)
    x = torch.randn(4, 32, D)
    linears = [nn.Sequential(nn.Linear(D, D), nn.GELU()) for _ in range(24)]

    detached: list[Any] = [lambda read, f=f: f(read).detach() for f in linears]
    start, cotangent = x.clone().requires_grad_(), torch.randn_like(x)
    (gradient,) = torch.autograd.grad(ResidualStack(detached, D, "pre_ln", final_norm=False)(start), start, cotangent)
    rows, norm = torch.randn(256, D), nn.BatchNorm1d(D)
    with torch.no_grad():
        x_0, writes, x_L, _ = ResidualStack(linears, D, "pre_ln").unroll(x)
        added_to = 3 * x + 1
        zeros = {
            f"change by zeros, {name}": relative_change(
                added_to, ResidualStack([torch.zeros_like] * 24, D, wiring, final_norm=False)(added_to)
            )
            for name, wiring in (("pre-LN", "pre_ln"), ("post-LN", "post_ln"))
        }
        # In training mode, in which BatchNorm takes its statistics from the batch; it refuses a single row.
        parts: dict[str, Any] = {"LayerNorm": (addnorm.layer_norm, rows.split(1)), "BatchNorm": (norm, rows.chunk(2))}
        by_batch = {
            f"tokens changed by their batch, {name}": changed(torch.cat([*map(f, some)]), f(rows), rows=True)
            for name, (f, some) in parts.items()
        }

    token = F.layer_norm(torch.randn(D, dtype=torch.float64), (D,), eps=0.0)
    known, small = 2 + token, 2 + 1e-5**0.5 * token
    constant = torch.full((1, D), 3.0)
    wrong = [x[..., :-1], x[:, :-1], x[:-1], x[None], x[:, :1], x[..., :1]]
    yield {
        "bits changed along pre-LN's residual": changed(gradient, cotangent),
        "closure of pre-LN": relative_change(sum(write.double() for write in writes) + x_0, x_L),
        **zeros,
        "mean after the norm": float(addnorm.layer_norm(token + 3).mean()),
        "variance after the norm": {
            f"1e-{k}": float(addnorm.layer_norm(10 ** (-k / 2) * token).var(correction=0)) for k in range(8)
        },
        "undone, sqrt(var + eps)": undone(small, small, EPS),
        "undone, sqrt(var), variance 1": undone(known, known, 0.0),
        "undone, sqrt(var), variance 1e-5": undone(small, small, 0.0),
        "undone, two tokens": undone(known, 3 * token - 1, EPS),
        **by_batch,
        "tokens": len(rows),
        "numbers not finite with eps": int((~addnorm.layer_norm(constant).isfinite()).sum()),
        "numbers not finite without eps": int((~F.layer_norm(constant, (D,), eps=0.0).isfinite()).sum()),
        "wrong shapes": len(wrong), "wrong shapes refused": sum(refused(x, branch) for branch in wrong),
        **{f"distorted, {name}": moves(wirings.get(name), with_one_louder) for name in (*claims.NORMED, "no_norm")},
    }  # fmt: skip


def changed(one: Tensor, other: Tensor, *, rows: bool = False) -> int:
    """Return how many numbers (or rows) differ in a bit."""
    differ = one.view(torch.int32) != other.view(torch.int32)
    return int((differ.any(-1) if rows else differ).sum())


def undone(known: Tensor, token: Tensor, eps: float) -> float:
    """Return the error of the norm of `token` with gamma and beta that undo the norm of `known`, over the token's spread."""
    gamma, beta = (known.var(correction=0) + eps).sqrt().repeat(D), known.mean().repeat(D)
    back = addnorm.layer_norm(token, gamma, beta, EPS)
    return float((back - token).norm() / (token - token.mean()).norm())


def refused(x: Tensor, branch: Tensor) -> bool:
    """Return whether the operation refuses the shapes."""
    try:
        addnorm.add_layer_norm(x, branch)
    except ValueError:
        return True
    return False


def measure_part(case: Case, *, rounds: int) -> Results:
    """Return the raw numbers of a part."""
    parts: dict[str, Any] = {"exact": measure_exactly, "cost": partial(cost, rounds), "depth": depth}
    return {case.part: [*parts[case.part]()]} if case.part in parts else trained(python_docs().entropy)


def finish(results: Results, head: Document) -> Document:
    """Return the raw numbers, which are judged once all parts are measured."""
    if not all(results.values()):
        return results
    numbers = {"unigram": python_docs().entropy, **results, "exact": results["exact"][0]}
    return {"load_of_others": None, "results": numbers}


# ------------------------------------------------------------------------------------------------ tables of the pages


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
         **{f"L = {row['num_layers']}": claims.in_short(row[key]) for row in rows if row["wiring"] == wiring}}
        for key, title in titles.items() for wiring in dict.fromkeys(row["wiring"] for row in rows if key in row)
    )  # fmt: skip


def training_section(document: Document) -> str:
    """Return the table of trained stacks: a line a run; the best rate of a setting in bold, with a star at the grid's edge."""
    rows = document["results"]["training"]
    table = markdown(
        {
            "wiring": f"`{row['wiring']}`", "L": f"{row['num_layers']}", "learning rate": f"{row['lr']:g}",
            "warm-up": f"{row['warm_up']}", "loss": claims.mark_best(f"{row['loss']:.3f}", row, setting),
            "gradient at x_0 over x_L: before": claims.in_short(row["gradient_before"]),
            "after": claims.in_short(row["gradient_after"]),
        }
        for row in rows
        for setting in [claims.rows_of(rows, **{key: row[key] for key in ("wiring", "num_layers", "warm_up")})]
    )  # fmt: skip
    steps, seeds = document["protocol"]["steps"], len(document["protocol"]["trained_seeds"])
    text = f"Loss in nats a character after {steps} steps, the mean of {seeds} seeds; {claims.explain_losses(document)}"
    return f"{table}\n\n{text}"


BENCHMARK = Benchmark(
    "claims", grid(part=("exact", "cost", "depth", "trained")), measure_part,
    parts=("training", "exact", "cost", "depth", "removal"),
    protocol={
        "depths": DEPTHS, "seeds": SEEDS, "trained_seeds": TRAINED_SEEDS, **SETTINGS, "warm_up": WARM_UP,
        "rates": {n: protocol.rates for _, protocol in TRAININGS for n in protocol.num_layers}, "text": "pydoc_data.topics",
        "init": "the wiring's own rule; where that is plain Xavier, queries, keys and values as one matrix",
    },
    finish=finish, verdicts=partial(claims.judge_all, claims.CLAIMS), threads=1, idle=False,
    sections={
        "docs/claims.md#claims": lambda document: f"{claims.table(document)}\n\n{headline(document)}.",
        "docs/claims.md#claims-by-depth": depth_section,
        "docs/claims.md#claims-trained": training_section,
    },
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
