"""Values far above those before them: the rule of OLMo-core's stability monitor, for every series of a recording.

value > mean + 6 sd, of the 128 values before it (the standard deviation divided by their number). What is NaN or inf is always
a spike, and no value of a window: one NaN would make the rule deaf for 128 steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

__all__ = ["Spike", "spikes_of"]

ROUNDING = 1e-6  # of the mean: what moves less is constant, as measured in float32
CHUNK = 4096  # windows at once, 4 MB of them


class Spike(NamedTuple):
    """A value far above those before it; mean and sd are theirs, NaN where there were too few."""

    step: int
    site: str
    layer: int | None
    role: str
    statistic: str
    value: float
    mean: float
    sd: float

    def __str__(self) -> str:
        what = f"step {self.step}, {self.site}: {self.role} {self.statistic} is {self.value:.4g}"
        return what if math.isnan(self.mean) else f"{what}, after {self.mean:.4g} ± {self.sd:.2g}"


def spikes_of(values: Sequence[float], window: int, sd: float, least: int) -> Iterator[tuple[int, float, float]]:
    """The places of the spikes of one series, and the mean and standard deviation of the values before.

    Example:
        >>> from addnorm.stream.record.spikes import spikes_of
        >>> [place for place, mean, sd in spikes_of([1.0, 2.0, 1.0, 2.0, 9.0, float("nan"), 1.0], 4, 6.0, least=4)]
        [4, 5]
    """
    every = torch.tensor(values, dtype=torch.float64, device="cpu")
    finite = every.isfinite()
    places = finite.nonzero()[:, 0]
    found = [(int(place), math.nan, math.nan) for place in (~finite).nonzero()[:, 0]]
    windows = torch.cat([every.new_zeros(window), every[finite]]).unfold(0, window, 1)
    present = torch.cat([every.new_zeros(window), every.new_ones(len(places))]).unfold(0, window, 1)
    for begin in range(0, len(places), CHUNK):
        at = places[begin : begin + CHUNK]
        before, there = (rows[begin : begin + len(at)] for rows in (windows, present))
        count = there.sum(1)
        mean = before.sum(1) / count
        deviation = (((before - mean[:, None]) * there).square().sum(1) / count).sqrt()
        spread = torch.maximum(deviation, ROUNDING * mean.abs())
        high = (every[at] > mean + sd * spread) & (count >= least)
        found += zip(at[high].tolist(), mean[high].tolist(), deviation[high].tolist(), strict=True)
    yield from sorted(found, key=lambda one: one[0])
