"""Numbers of the figure of several_streams.md: untrained stacks of several streams by depth, from `addnorm.lab.StreamsProbe`.

All wirings of a seed have the same sublayers and tokens. Each number is a mean over the seeds; gains multiply, so their mean is
geometric.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from addnorm.lab import StreamsProbe

SUBLAYERS, SEEDS = 32, range(4)
MOVED = 0.5  # scale of the noise on the parameters of A, B and C
MIXED = {"hyper_connections": "hyper-connections", "mhc": "mHC"}
READS = {"pre_ln": "pre-LN", "attention_residuals": "attention residuals"}


class Course(NamedTuple):
    """Numbers of one wiring by depth."""

    name: str
    values: list[float]


class StreamsByDepth(NamedTuple):
    """The curves of the figure, by wiring: x_0 first, then one number for each sublayer."""

    cosine: dict[str, Course]  # of two streams of a token, coefficients moved
    gain: dict[str, Course]  # the largest row sum of A_l ... A_1, coefficients moved; 1 at x_0
    read: dict[
        str, Course
    ]  # root mean square of what a sublayer reads before its norm, before training; the head's last


def streams_by_depth() -> StreamsByDepth:
    """Return the curves of the figure."""

    def courses(number: str, names: dict[str, str], moved: float, mean: Callable[[Any], float]) -> dict[str, Course]:
        measured = {wiring: [_measure(wiring, moved, seed)[number] for seed in SEEDS] for wiring in names}
        return {
            wiring: Course(names[wiring], [mean(values) for values in zip(*curves, strict=True)])
            for wiring, curves in measured.items()
        }

    return StreamsByDepth(
        courses("cosine", MIXED, MOVED, statistics.fmean),
        courses("gain", MIXED, MOVED, statistics.geometric_mean),
        courses("reads", READS, 0.0, statistics.fmean),
    )


def stream_cosine(streams: Tensor) -> float:
    """Return the mean cosine of two different streams of a token; `streams` is `(*, n, d_model)`."""
    unit, n = F.normalize(streams.detach().double(), dim=-1), streams.shape[-2]
    cosines = unit @ unit.mT
    return float((cosines.sum((-1, -2)) - n).mean()) / (n * (n - 1))


@cache
def _measure(wiring: str, perturbation: float, seed: int) -> dict[str, Any]:
    """Return the curves of one stack."""
    model = StreamsProbe(wiring, sublayers=SUBLAYERS, perturbation=perturbation, seed=seed).build()
    with torch.enable_grad():
        recorder = model.record()
    gains = recorder.coefficients()["gains"] if wiring in MIXED else None
    return {
        "cosine": [stream_cosine(state) for (state,) in recorder.states] if wiring in MIXED else None,
        "gain": gains and [1.0, *gains["forward"]],
        "reads": recorder.statistics()["reads"],
    }
