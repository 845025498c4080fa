"""Statistics of untrained stacks by depth: the stream and its gradient under a wiring before training.

The stacks are the toy transformer (`addnorm.lab.toy_model`) and take seconds. Each stack is an independent job:

    statistics = [measure_init(stack) for stack in init_stacks()]        in any order, in any process
    rows = summarize(statistics)                                         one per wiring and depth, over the seeds
    check_published(rows)                                                `addnorm.lab.published`: comparison with the papers

All results are plain numbers and lists, as in JSON, with NaN and infinity where a stack overflows.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from addnorm import wirings
from addnorm.lab.run import wiring_label
from addnorm.lab.streams import Numbers, StreamsRecorder, amax_gains, largest_gain, norm, rms
from addnorm.lab.toy_model import ToyModel, geometric_mean
from addnorm.nn import Wiring
from addnorm.wirings.coefficients import HyperConnection, ManifoldConnection

DEPTHS = (2, 4, 8, 16, 24, 32, 64)
SEEDS = 8
# Four sequences halve the scatter of the first layers' numbers. The scatter of the last layer's comes from the weights.
SEQUENCES = 4
TOKENS = 32
SPREAD = 1.0  # standard deviation of the random logits of mHC; of hyper-connections' random entries it is SPREAD / n
STREAM_WIRINGS = ("hyper_connections", "mhc", "attention_residuals", "denseformer", "muddformer")
STREAM_DEPTHS = (4, 16)  # layers
WIRINGS = ("post_ln", "pre_ln", "deepnorm", "layernorm_scaling", "peri_ln", "no_norm", "no_residual")

# Wirings whose factors require their own initialization; the others get N(0, 1/d), so that only the wiring differs.
OWN_INIT = ("deepnorm", "admin")

# The first step of torch.optim.SGD(lr=0.1) and of torch.optim.Adam(lr=1e-3). Adam's first step divides the gradient by its
# absolute value: both moments are unbiased, m / (1 - beta_1) = g and v / (1 - beta_2) = g^2.
STEPS: dict[str, Any] = {"step_sgd": lambda g: 0.1 * g, "step_adam": lambda g: 1e-3 * g / (g.abs() + 1e-8)}


class InitStack(NamedTuple):
    """Untrained stack to measure.

    Attributes:
        wiring: a wiring without parallel sublayers.
        num_layers: number of layers, each an attention and a feed-forward sublayer.
        seed: seed of the weights and the data.
    """

    wiring: Wiring
    num_layers: int
    seed: int

    @property
    def own_init(self) -> bool:
        """Whether the wiring's own rule draws the weights, instead of N(0, 1/d)."""
        return self.wiring.name in OWN_INIT


def init_stacks(
    which: Iterable[Wiring | str] = WIRINGS, depths: Iterable[int] = DEPTHS, seeds: Iterable[int] = range(SEEDS)
) -> list[InitStack]:
    """Return a stack for each wiring, depth and seed. DeepNorm and Admin use their own initialization."""
    return [InitStack(*stack) for stack in itertools.product(map(wirings.as_wiring, which), depths, seeds)]


def measure_init(job: InitStack) -> Numbers:
    """Return the statistics of one untrained stack of L layers.

    i counts the 2L sublayers; x_i is the stream after sublayer i. The loss is that of the first of `SEQUENCES` sequences: in a
    mean over several sequences their gradients cancel, the less so the more similar they are. The other sequences serve the
    statistics of the stream.

    Returns:
        A dict with the stack's `wiring` (its label), `num_layers`, `seed`, and
        `variance`: E|x_i|^2 / d for i = 0 .. 2L.
        `before_norm`: the same of a x_i + write_i, before a norm on the stream, for i = 0 .. 2L - 1.
        `similarity`: the mean cosine of two tokens of a sequence in x_i.
        `write_ratio`: |write_i| / |x_i|.
        `gradient`: the norm of the loss's gradient at x_i.
        `gradient_ratio`: the gradient at x_0 divided by the gradient at x_2L.
        `weight_gradient`: the norm of the gradient of W_2, by layer.
        `last_move`: 1 - the mean cosine of a token before and after the last layer.
        `step_sgd`, `step_adam`: the relative change of the logits by one step of SGD and of Adam, without mixing of tokens.
        With several streams instead of these the statistics of `measure_streams_init`.
    """
    if not job.wiring.has_rows:
        return {"wiring": wiring_label(job.wiring), **measure_streams_init(job.wiring, job.num_layers, job.seed)}
    model = ToyModel(
        job.num_layers, job.wiring, job.seed, init=job.own_init, sequences=SEQUENCES, tokens=TOKENS, loss_tokens=TOKENS
    )
    recorder = model.record()
    by_depth, x = recorder.statistics(), [state.detach() for (state,) in recorder.states]
    sums = [after if site.total is None else site.total[0] for site, after in zip(recorder.sites, x[1:], strict=True)]
    layers: list[Any] = [*model.stack.layers]
    return {
        "wiring": wiring_label(job.wiring), "num_layers": job.num_layers, "seed": job.seed,
        "variance": [size**2 for size in by_depth["stream"]],
        "before_norm": [rms(total.detach()) ** 2 for total in sums],
        "similarity": by_depth["similarity"],
        "write_ratio": by_depth["ratio"][1:],
        "gradient": by_depth["gradient"],
        "gradient_ratio": by_depth["gradient"][0] / by_depth["gradient"][-1],
        "weight_gradient": [norm(layer.connections[-1].sublayer[-1].weight.grad) for layer in layers],
        "last_move": 1 - float(F.cosine_similarity(x[-3].double(), x[-1].double(), dim=-1).mean()),
        **_first_steps(model),
    }  # fmt: skip


def _first_steps(model: ToyModel) -> dict[str, float]:
    """Return |logits' - logits| / |logits| after one step of each optimizer in `STEPS`, on the first sequence.

    The step changes all weights of `model`, including the head's. Tokens are not mixed, so that each token is a separate example.
    The result is infinite if the logits overflow.
    """
    x = model.x[0].unsqueeze(1)  # as many sequences of one token
    weights = list(model.parameters())
    y = model.stack(x)
    gradients = torch.autograd.grad(model.loss(y), weights)
    changes = {}
    with torch.no_grad():
        before, starts = model.head(y), [weight.clone() for weight in weights]
        for name, step in STEPS.items():
            for weight, start, gradient in zip(weights, starts, gradients, strict=True):
                weight.copy_(start - step(gradient))
            change = norm(model.head(model.stack(x)) - before) / norm(before)
            changes[name] = math.inf if math.isnan(change) else change
    return changes


def measure_streams_init(wiring: Wiring, num_layers: int, seed: int) -> Numbers:
    """Return the statistics of one untrained stack of several streams.

    Returns:
        A dict with `num_layers`, `seed`, and
        `difference`: |y - y_pre| / |y_pre| for the output y and the output y_pre of pre-LN with the same weights.
        `read`: the root mean square of C X, the sublayer's input before its norm, by sublayer, divided by that of x_0.
        `pre_read`: the same in pre-LN.
        `gain`: the largest forward or backward gain of the product of all A (`amax_gains`) with random coefficients; None
            if the streams do not mix.
        `from_mean`: the largest |n p_j - 1| over all reads, the head's included, and their n sources, for the weights p of the
            sources averaged over the tokens: 0 for a mean of the sources. None if no sublayer appends a source.
        `from_newest`: the largest |p_j - 1| of the newest source and |p_j| of the others, likewise: 0 for a read of the newest.
    """
    model = ToyModel(num_layers, wiring, seed, tokens=TOKENS)
    plain = ToyModel(num_layers, wirings.pre_ln(), seed, tokens=TOKENS)
    for own, other in zip(plain.stack.connections, model.stack.connections, strict=True):
        own.sublayer = other.sublayer
    start, recorder = rms(model.x), model.record()
    reads = [[size / start for size in one.statistics()["reads"][:-1]] for one in (recorder, plain.record())]
    with torch.no_grad():
        y, y_pre = model.stack(model.x), plain.stack(model.x)
    return {
        "num_layers": num_layers, "seed": seed,
        "difference": float((y - y_pre).norm() / y_pre.norm()),
        "read": reads[0], "pre_read": reads[1],
        **_compare_weights(recorder),
        "gain": _random_gain(model, seed),
    }  # fmt: skip


def _compare_weights(recorder: StreamsRecorder) -> Numbers:
    """Return `from_mean` and `from_newest` of `measure_streams_init`, or None for both if no sublayer appends a source."""
    if len(recorder.states[0]) == len(recorder.states[-1]):
        return {"from_mean": None, "from_newest": None}
    coefficients = recorder.coefficients()
    rows = [*(row for site in coefficients["sites"] for row in site["collapse"]), coefficients["head"]]
    weights = [torch.tensor(row, dtype=torch.float64) for row in rows]
    return {
        "from_mean": float(torch.cat([len(row) * row - 1 for row in weights]).abs().max()),
        "from_newest": float(torch.cat([row - torch.eye(len(row))[-1] for row in weights]).abs().max()),
    }


def _random_gain(model: ToyModel, seed: int) -> float | None:
    """Return the larger gain, forward or backward, of the product of all A with random coefficients (see `SPREAD`), or None."""
    connections: list[Any] = model.stack.connections
    modules = [connection.coefficients for connection in connections]
    if not all(isinstance(module, HyperConnection | ManifoldConnection) for module in modules):
        return None
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in modules:  # noise of standard deviation `SPREAD` on the logits of A, or SPREAD / n on its entries
            if isinstance(module, ManifoldConnection):
                bias = module.bias[2 * module.n :]
                bias.copy_(SPREAD * torch.randn(bias.shape, generator=generator))
            else:
                module.mix.add_(SPREAD / module.n * torch.randn(module.mix.shape, generator=generator))
        streams = (torch.randn(TOKENS, module.n, model.stack.d_model, generator=generator) for module in modules)
        mixes = [module(x).mix for module, x in zip(modules, streams, strict=True)]
    return largest_gain(amax_gains(mixes))


def largest(values: Sequence[float]) -> float:
    """Return the largest value, or NaN if any value is NaN (`max` can ignore NaN)."""
    return math.nan if any(map(math.isnan, values)) else max(values)


# How the seeds are combined: a geometric mean of numbers that multiply from layer to layer, the largest deviation, else a mean.
MEANS: dict[str, Callable[[Sequence[float]], float]] = {
    **dict.fromkeys(("variance", "before_norm", "similarity", "last_move"), statistics.fmean),
    **dict.fromkeys(("write_ratio", "gradient", "gradient_ratio", "weight_gradient", *STEPS), geometric_mean),
    **dict.fromkeys(("difference", "from_mean", "from_newest"), largest),
    **dict.fromkeys(("read", "pre_read", "gain"), geometric_mean),
}  # fmt: skip


def summarize(results: Iterable[Numbers]) -> list[Numbers]:
    """Return one dict per wiring and depth, over the seeds: geometric means of norms and ratios, arithmetic means of the rest.

    `difference`, `from_mean` and `from_newest` are the largest of the seeds.

    A dict has the keys of `measure_init`, with `seeds` instead of `seed`. Wirings and seeds are sorted and sums are exact, so the
    result does not depend on the order of the input, to the bit.

    Raises:
        ValueError: a wiring, depth and seed occurs twice: two wirings have one name, or a job ran twice.
    """
    groups: dict[tuple[str, int], dict[int, Numbers]] = defaultdict(dict)
    for result in results:
        group = groups[result["wiring"], result["num_layers"]]
        if result["seed"] in group:
            raise ValueError(
                f"{result['wiring']}, {result['num_layers']} layers, seed {result['seed']} occurs twice, expected once: "
                "give different wirings different names."
            )
        group[result["seed"]] = result
    rows = []
    for (wiring, num_layers), group in sorted(groups.items()):
        members = [group[seed] for seed in sorted(group)]
        row: Numbers = {"wiring": wiring, "num_layers": num_layers, "seeds": sorted(group)}
        for key, mean in MEANS.items():
            values: list[Any] = [member.get(key) for member in members]
            if None in values:
                continue  # a statistic of stacks of another kind
            row[key] = [mean(at) for at in zip(*values, strict=True)] if isinstance(values[0], list) else mean(values)
        rows.append(row)
    return rows
