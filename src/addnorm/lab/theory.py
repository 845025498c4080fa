"""What a wiring does to stream and gradient before training, by depth: the figures of the papers, as data.

Measured on the toy transformer of the theory (`addnorm.lab.toy_model`), in seconds. The work is cut into jobs that stand alone:

    found = [at_init(job) for job in jobs()]        in any order, in any process
    rows = summary(found)                           one for each wiring and depth, over the seeds
    checks(rows)                                    `addnorm.lab.published`: what the papers say of them

All of it is plain numbers and lists, as JSON has them (and NaN and infinity, where a stack overflows).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from addnorm import wirings
from addnorm.lab.toy_model import Toy, Wired, geometric_mean, likeness
from addnorm.nn import Wiring

__all__ = ["DEPTHS", "SEEDS", "WIRINGS", "AtInit", "at_init", "jobs", "label", "one_step", "summary", "write"]

Numbers = dict[str, Any]

DEPTHS = (2, 4, 8, 16, 24, 32, 64)
SEEDS = 8
SEQUENCES = (
    4  # halve the scatter of the first layers' figures; that of the last is the weights', and only more seeds help
)
WIRINGS = ("post_ln", "pre_ln", "deepnorm", "layernorm_scaling", "peri_ln", "no_norm", "no_residual")

# Wirings whose factors and weights belong together; the others get N(0, 1/d), so that only the wiring differs.
OWN_INIT = ("deepnorm", "admin")

# One step from rest, by the gradient: torch.optim.SGD(lr=0.1), and torch.optim.Adam(lr=1e-3), whose first step divides the
# gradient by its own absolute value (both moments are unbiased: m / (1 - beta_1) = g, v / (1 - beta_2) = g^2).
STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "sgd": lambda g: 0.1 * g,
    "adam": lambda g: 1e-3 * g / (g.abs() + 1e-8),
}


@dataclass(frozen=True)
class AtInit:
    """One stack to measure: small, independent of all others, and as picklable as its wiring.

    Args:
        wiring: one whose sublayers each have a row of their own.
        num_layers: each an attention and a feed-forward block.
        seed: of weights and data.
        own_init: weights by the wiring's own rule, instead of N(0, 1/d).
    """

    wiring: Wiring
    num_layers: int
    seed: int
    own_init: bool = False

    def __post_init__(self) -> None:
        if self.wiring.flow != "rows":
            raise ValueError(
                f"wiring is {self.wiring.name!r}, expected one whose sublayers each have a row of their own: what is measured is "
                "the one stream between them."
            )


def jobs(
    which: Iterable[Wired] = WIRINGS, depths: Iterable[int] = DEPTHS, seeds: Iterable[int] = range(SEEDS)
) -> list[AtInit]:
    """Every wiring at every depth with every seed; DeepNorm and Admin with their own initialization, which is part of them."""
    given, depths, seeds = [wirings.as_wiring(one) for one in which], list(depths), list(seeds)
    return [AtInit(one, n, seed, one.name in OWN_INIT) for one in given for n in depths for seed in seeds]


def label(wiring: Wiring) -> str:
    """What a wiring is called in the figures: its name, with the options that are not at their default.

    Example:
        >>> from addnorm import wirings
        >>> label(wirings.no_residual()), label(wirings.no_residual(norm=False))
        ('no_residual', 'no_residual(norm=False)')
    """
    text = repr(wiring).removesuffix("()")
    return text if text.partition("(")[0] == wiring.name else wiring.name


def at_init(job: AtInit) -> Numbers:
    """The figures of one stack of L layers, before training. i counts sublayers, 2L of them; x_i is the stream after i.

    The loss is that of the first of `SEQUENCES` sequences: in a mean over several their gradients cancel, the less so the more
    alike they have become, which is another story. The others are there for the figures of the stream.

    Returns:
        A dict with the job's `wiring` (its `label`), `num_layers`, `seed`, and
        `variance`: E|x_i|^2 / d for i = 0 .. 2L.
        `before_norm`: the same of a x_i + write_i, before a norm that stands on the stream, for i = 0 .. 2L - 1.
        `likeness`: the mean cosine of two tokens of a sequence in x_i.
        `write_ratio`: |write_i| / |x_i|.
        `gradient`: the norm of the loss's gradient at x_i.
        `gradient_ratio`: that at x_0 over that at x_2L.
        `weight_gradient`: the norm of the gradient of W_2, by layer.
        `last_move`: 1 - the mean cosine of a token before and after the last layer.
        `step_sgd`, `step_adam`: see `one_step`.
    """
    model = _toy(job)
    found = model.passed()
    x = found.streams
    connections: list[Any] = list(model.stack.connections)
    with torch.no_grad():
        writes = [write(here, stream) for here, stream in zip(connections, x[:-1], strict=True)]
        summed = [here.a * stream + one for here, stream, one in zip(connections, x[:-1], writes, strict=True)]
    return {
        "wiring": label(job.wiring), "num_layers": job.num_layers, "seed": job.seed,
        "variance": found.variances(),
        "before_norm": [float(one.double().square().mean()) for one in summed],
        "likeness": [likeness(one.double()) for one in x],
        "write_ratio": [norm(one) / norm(stream) for one, stream in zip(writes, x[:-1], strict=True)],
        "gradient": [norm(one) for one in found.gradients],
        "gradient_ratio": found.gradient_ratio(),
        "weight_gradient": model.feed_forward_gradients(),
        "last_move": 1 - float(F.cosine_similarity(x[-3].double(), x[-1].double(), dim=-1).mean()),
        **{f"step_{name}": value for name, value in _stepped(model.mix("none")).items()},
    }  # fmt: skip


def norm(x: Tensor) -> float:
    """Of all elements, in float64."""
    return float(x.double().norm())


def write(here: Any, x: Tensor) -> Tensor:
    """What a `SublayerConnection` adds to the stream x: b * N_branch(f(c * N_in(x)))."""
    read = x if here.norm_in is None else here.norm_in(x)
    raw = here.sublayer(here.c * read)
    wrote: Tensor = here.b * (raw if here.norm_branch is None else here.norm_branch(raw))
    return wrote


def one_step(job: AtInit) -> dict[str, float]:
    """|logits' - logits| / |logits| by one step of each of `STEPS`, on the sequence that it was made with.

    All weights step, the head's too. The tokens are not mixed, so that each is an example of its own. Infinity where the logits
    overflow.
    """
    return _stepped(_toy(job).mix("none"))


def _toy(job: AtInit) -> Toy:
    tokens = 32
    return Toy(
        job.num_layers, job.wiring, job.seed, init=job.own_init, sequences=SEQUENCES, tokens=tokens, judged=tokens
    )


def _stepped(model: Toy) -> dict[str, float]:
    """`one_step`; the model's weights are not what they were."""
    x = model.x[:1]
    weights = list(model.parameters())
    y = model.stack(x)
    gradients = torch.autograd.grad(model.loss(y), weights)
    found = {}
    with torch.no_grad():
        before, start = model.head(y), [weight.clone() for weight in weights]
        for name, step in STEPS.items():
            for weight, at, gradient in zip(weights, start, gradients, strict=True):
                weight.copy_(at - step(gradient))
            moved = norm(model.head(model.stack(x)) - before) / norm(before)
            found[name] = math.inf if math.isnan(moved) else moved
    return found


# How the seeds are put together: what multiplies from layer to layer by its logarithm, the others as they are.
MEANS: dict[str, Callable[[Sequence[float]], float]] = {
    "variance": statistics.fmean, "before_norm": statistics.fmean, "likeness": statistics.fmean, "last_move": statistics.fmean,
    "write_ratio": geometric_mean, "gradient": geometric_mean, "gradient_ratio": geometric_mean,
    "weight_gradient": geometric_mean, "step_sgd": geometric_mean, "step_adam": geometric_mean,
}  # fmt: skip


def summary(found: Iterable[Numbers]) -> list[Numbers]:
    """One row for each wiring and depth, over its seeds: geometric means of norms and ratios, plain ones of the rest.

    A row has the keys of `at_init`, with `seeds` for `seed`. Rows and seeds come sorted, and the means are of exact sums: nothing
    depends on the order of what was found, to the bit.

    Raises:
        ValueError: the same wiring, depth and seed came twice: two wirings of one name, or one job that ran twice.
    """
    groups: dict[tuple[str, int], dict[int, Numbers]] = defaultdict(dict)
    for one in found:
        group = groups[one["wiring"], one["num_layers"]]
        if one["seed"] in group:
            raise ValueError(
                f"{one['wiring']}, {one['num_layers']} layers, seed {one['seed']} came twice, expected once: give wirings that "
                "differ different names."
            )
        group[one["seed"]] = one
    rows = []
    for (wiring, num_layers), group in sorted(groups.items()):
        members = [group[seed] for seed in sorted(group)]
        row: Numbers = {"wiring": wiring, "num_layers": num_layers, "seeds": sorted(group)}
        for key, mean in MEANS.items():
            values = [member[key] for member in members]
            row[key] = [mean(at) for at in zip(*values, strict=True)] if isinstance(values[0], list) else mean(values)
        rows.append(row)
    return rows
