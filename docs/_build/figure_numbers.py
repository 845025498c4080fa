"""Numbers of the figures of add_norm.md: each function computes those of one figure.

All come from the library: worked examples from `addnorm.trace`, stacks from the toy model (`addnorm.lab.toy_model`), the
layer from `addnorm.nn.Encoder`. Random numbers have a seed, and torch's own generator is left as it was.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from page import document
from torch import Tensor

import addnorm
from addnorm.lab import Comparison, Protocol
from addnorm.lab.toy_model import ToyModel
from addnorm.trace import PRESETS, Trace, show

TRAINED = {"pre_ln": "pre-LN", "post_ln": "post-LN", "no_norm": "no norm", "rezero": "ReZero"}
LAYERS, SEEDS = 16, range(4)
STACKS = {
    "pre_ln": "pre-LN", "post_ln": "post-LN", "no_residual": "norm, no residual", "no_norm": "residual, no norm",
}  # fmt: skip
TOKEN_SIZES = (0.5, 1.0, 2.0, 4.0, 1.0)
WIDTH = 12
MINUS = "−"


class Depth(NamedTuple):
    """Numbers of one stack by depth in sublayers, x_0 first."""

    name: str
    cosine: list[float]  # of a token's x_l and its x_0, mean over tokens and seeds
    rms: list[float]  # root mean square of the stream, mean over the seeds


class Stage(NamedTuple):
    """Step of the workflow: its title, and its numbers in the worked example."""

    title: str
    numbers: str


class Course(NamedTuple):
    """Course of a training at the best learning rate, by recorded step."""

    name: str
    steps: list[int]
    loss: list[float]  # on held-out text
    size: list[float]  # largest factor by which the size of what a sublayer reads has changed
    shift: list[float]  # largest distance of the features' means from the first ones, in standard deviations


class Flow(NamedTuple):
    """Tensors of an encoder layer, `(tokens, d)` each, in the order of computation."""

    x: Tensor
    attention: Tensor
    z: Tensor
    y: Tensor
    feed_forward: Tensor
    z_2: Tensor
    y_2: Tensor


def comparison() -> Comparison:
    """Return the default comparison in benchmarks/results/compare.json."""
    compared = document("compare")
    results = compared["comparison"]
    fields = results["protocol"].items()
    protocol: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields}
    return Comparison(tuple(results["compared"]), Protocol(**protocol), compared["rows"], [], results["text"])


def training(num_layers: int) -> dict[str, Course]:
    """Return the best training of each wiring in benchmarks/results/norms.json, by wiring."""
    norms = document("norms")
    results, courses = norms["results"], {}
    for wiring, name in TRAINED.items():
        rows = (row for row in results["rows"] if (row["wiring"], row["num_layers"]) == (wiring, num_layers))
        best = min(rows, key=lambda row: row["loss"])
        steps = [k * norms["protocol"]["every"] for k in range(len(best["losses"]))]
        courses[wiring] = Course(f"{name}, rate {best['lr']:g}", steps, best["losses"], best["resized"], best["moved"])
    return courses


def unigram() -> float:
    """Return the loss of a model that knows only how often each character occurs."""
    return float(document("norms")["results"]["unigram"])


def by_depth() -> dict[str, Depth]:
    """Return untrained stacks with the same random weights: only the wiring differs."""
    return {wiring: _stack(wiring, name) for wiring, name in STACKS.items()}


def _stack(wiring: str, name: str) -> Depth:
    results = [[x.detach() for (x,) in ToyModel(LAYERS, wiring, seed).record().states] for seed in SEEDS]
    places = range(2 * LAYERS + 1)

    def mean(of: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
        return [statistics.fmean(float(of(streams[0], streams[place])) for streams in results) for place in places]

    cosine = mean(lambda x_0, x: F.cosine_similarity(x_0, x, dim=-1).mean())
    return Depth(name, cosine, mean(lambda _, x: x.square().mean().sqrt()))


def example() -> Trace:
    """Return the worked example: x = [1, 2, 3], Sublayer(x) = [0.5, -1, 1.5]."""
    return PRESETS["lesson-000"].trace()


def workflow() -> list[Stage]:
    """Return the seven steps with the numbers of the worked example."""
    t = example()

    def shown(name: str) -> str:
        return places(t[name].value)

    return [
        Stage("Start with a token vector x", f"x = {shown('x')}"),
        Stage("Pass it through the sublayer", "attention, or feed-forward"),
        Stage("Get what the sublayer returned", f"Sublayer(x) = {shown('sublayer')}"),
        Stage("Add: z = x + Sublayer(x)", f"z = {shown('z')}"),
        Stage(
            "Normalize over the features",
            f"μ = {shown('mean')}, σ² = {shown('variance')}, √(σ² + ε) = {shown('root')}\n"
            f"(z − μ) / √(σ² + ε) = {shown('normalized')}",
        ),
        Stage("Scale and shift by γ and β", f"γ = {show(t.weight)}, β = {show(t.bias)}"),
        Stage("Send y to the next block", f"y = {shown('shifted')}"),
    ]


def places(value: float | tuple[float, ...]) -> str:
    """Return a number or a vector with two decimals; without decimals, if a vector needs at most one."""
    if isinstance(value, tuple):
        exact = all(round(one, 1) == one for one in value)
        return f"[{', '.join(f'{one:g}' if exact else f'{one:.2f}' for one in value)}]".replace("-", MINUS)
    return f"{value:.2f}".replace("-", MINUS)


@torch.no_grad()
def encoder_layer() -> Flow:
    """Return one post-LN layer of `addnorm.nn.Encoder`, applied to tokens of different sizes."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        encoder = addnorm.nn.Encoder(1, WIDTH, 2, wiring="post_ln").eval()
        x = torch.randn(1, len(TOKEN_SIZES), WIDTH) * torch.tensor(TOKEN_SIZES)[:, None]
    writes, streams = [], [x]
    for connection in encoder.stack.connections:
        sublayer: Any = connection.sublayer
        hook = sublayer.register_forward_hook(lambda module, args, output: writes.append(output.clone()))
        streams.append(connection(streams[-1]))
        hook.remove()
    sums = [stream + write for stream, write in zip(streams[:-1], writes, strict=True)]
    return Flow(*(one[0] for one in (x, writes[0], sums[0], streams[1], writes[1], sums[1], streams[2])))


def token_rms(x: Tensor) -> list[float]:
    """Return the root mean square of each token."""
    return [float(one) for one in x.square().mean(-1).sqrt()]
