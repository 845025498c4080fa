"""Results of a comparison: runs grouped by setting, each wiring at its best setting, paired differences of losses.

Everything here is computed from finished runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import groupby
from typing import Any

from addnorm.lab import theory
from addnorm.lab.published import PublishedResult, check_published
from addnorm.lab.run import Protocol
from addnorm.lab.streams import Numbers

SETTING = ("wiring", "num_layers", "lr", "warm_up")  # of a `Group`
MARGIN = 0.1  # nats: four seeds differed by at most 0.075 (post-LN without warm-up, 12 layers, 200 steps)
LEVEL = 0.05  # probability of a false positive among all differences that are judged together
SMALLEST = 0.01  # nats: a smaller difference does not matter, even if it is significant


@dataclass(frozen=True)
class Group:
    """Runs of one setting, one per seed.

    Attributes:
        wiring, num_layers, lr, warm_up: the setting.
        runs: the results, in the order of the seeds.
    """

    wiring: str
    num_layers: int
    lr: float
    warm_up: int
    runs: tuple[Numbers, ...] = field(repr=False)

    @property
    def diverged(self) -> int:
        """Number of runs whose loss is not finite, or well above both their first loss and the loss of a uniform guess."""
        return sum(run["diverged"] for run in self.runs)

    def loss(self, part: str = "test") -> float:
        """Return the mean loss over the seeds, or infinity if a run diverged: a setting that sometimes fails is not good."""
        return math.inf if self.diverged else statistics.fmean(run[part] for run in self.runs)

    def losses(self) -> list[float]:
        """Return the test loss of each seed. The loss of a diverged run is infinity."""
        return [math.inf if run["diverged"] else run["test"] for run in self.runs]

    def mean(self, value: Callable[[Numbers], float | None]) -> float:
        """Return the mean of `value(run)` over the runs for which it is not None, or NaN if there are none."""
        values = [x for run in self.runs if (x := value(run)) is not None]
        return statistics.fmean(values) if values else math.nan


@dataclass(frozen=True)
class Arm:
    """Results of one wiring at one depth: a `Group` of runs for each setting, such as the learning rate.

    The best setting is chosen by the loss on the validation part and judged by the loss on the test part.
    """

    wiring: str
    num_layers: int
    groups: tuple[Group, ...]

    @property
    def best(self) -> Group:
        """Setting with the lowest validation loss."""
        return min(self.groups, key=lambda group: group.loss("validation"))

    def best_with(self, warm_up: bool) -> Group | None:
        """Return the setting with the lowest validation loss among those with, or without, warm-up; None if there are none."""
        groups = (group for group in self.groups if bool(group.warm_up) == warm_up)
        return min(groups, key=lambda group: group.loss("validation"), default=None)

    @property
    def at_the_edge(self) -> bool:
        """Whether the best learning rate is the smallest or the largest of the grid."""
        rates = sorted({group.lr for group in self.groups})
        return len(rates) > 1 and self.best.lr in (rates[0], rates[-1]) and math.isfinite(self.best.loss("validation"))


@dataclass(frozen=True)
class Results:
    """Runs of a comparison and its untrained stacks, grouped by setting.

    Attributes:
        compared: names of the wirings.
        protocol: the runs' settings.
        runs: results of the runs (see `addnorm.lab.train`), in the order of the protocol.
        stacks: statistics of untrained stacks (see `addnorm.lab.theory.measure_init`).
        text: name and size of the text, the loss of a uniform guess (`uniform`), and the entropy of its single characters
            (`entropy`), both in nats.
    """

    compared: tuple[str, ...]
    protocol: Protocol
    runs: Sequence[Numbers] = field(repr=False)
    stacks: Sequence[Numbers] = field(repr=False)
    text: Numbers = field(repr=False)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """A `Group` of runs for each setting. Its runs differ in the seed only."""
        runs: dict[Any, list[Numbers]] = {}
        for run in self.runs:
            runs.setdefault(tuple((name, run["settings"][name]) for name in SETTING), []).append(run)
        return tuple(Group(**dict(key), runs=tuple(some)) for key, some in runs.items())

    @cached_property
    def arms(self) -> tuple[Arm, ...]:
        """An `Arm` for each wiring and depth, from the shallowest."""
        groups: dict[tuple[int, int], list[Group]] = {}
        for group in self.groups:
            groups.setdefault((group.num_layers, self.compared.index(group.wiring)), []).append(group)
        return tuple(Arm(self.compared[k], n, tuple(some)) for (n, k), some in sorted(groups.items()))

    @cached_property
    def by_depth(self) -> dict[int, tuple[Arm, ...]]:
        """The `Arm`s by number of layers, from the shallowest."""
        return {n: tuple(arms) for n, arms in groupby(self.arms, key=lambda arm: arm.num_layers)}

    @cached_property
    def at_init(self) -> list[Numbers]:
        """Statistics of untrained stacks with one stream by wiring and depth, combined over the seeds."""
        return [row for row in self.untrained if "variance" in row]

    @cached_property
    def untrained(self) -> list[Numbers]:
        """Statistics of all untrained stacks by wiring and depth. Stacks with several streams have keys of their own."""
        return theory.summarize(self.stacks)

    @cached_property
    def checks(self) -> list[PublishedResult]:
        """Published results on untrained stacks, each compared with the measurement."""
        return check_published(self.untrained)


@dataclass(frozen=True)
class Difference:
    """Difference of two settings' losses: the mean of first minus second over the seeds with which both were trained.

    Attributes:
        mean: the mean difference; infinite if only one setting diverged with some seed, NaN if both did.
        error: standard error of the mean; NaN with fewer than three seeds.
        seeds: number of seeds.
        comparisons: number of differences that are judged together. They share the probability of a false positive.
    """

    mean: float
    error: float
    seeds: int
    comparisons: int = 1

    @property
    def is_clear(self) -> bool:
        """Whether the difference is larger than chance explains, by the rule in `criterion`."""
        # An infinite mean, whose half width is NaN, is larger than either bound. A mean of NaN is not.
        return abs(self.mean) > (MARGIN if self.seeds < 3 else max(SMALLEST, self.half_width))

    @property
    def errors(self) -> float:
        """Number of standard errors that the mean must exceed for `is_clear`."""
        return t_quantile(LEVEL / self.comparisons, self.seeds - 1)

    @property
    def half_width(self) -> float:
        """Half the width of the mean's confidence interval, or NaN with fewer than three seeds."""
        return self.errors * self.error if self.seeds > 2 else math.nan

    @property
    def criterion(self) -> str:
        """The rule behind `is_clear`, in words."""
        if not self.seeds:
            return "no seed trained under both settings"
        if math.isinf(self.mean):
            return "a setting that diverges with one seed is worse than one that never does"
        if self.seeds < 3:
            few = "one seed" if self.seeds == 1 else "two seeds"
            return f"with {few} a difference counts above {MARGIN:g} nats"
        together = f" for {self.comparisons} differences together" if self.comparisons > 1 else ""
        return (
            f"a difference counts above {self.errors:.3g} standard errors of the {self.seeds} paired differences (t-test, "
            f"{LEVEL:.0%}{together}), and above {SMALLEST:g} nats"
        )


def difference(first: Group, second: Group, comparisons: int = 1) -> Difference:
    """Return the difference of two groups' test losses, paired by seed: both trained on the same batches.

    Args:
        first, second: the groups.
        comparisons: number of differences that are judged together.
    """
    one, other = (
        {run["settings"]["seed"]: loss for run, loss in zip(group.runs, group.losses(), strict=True)}
        for group in (first, second)
    )
    pairs = [(loss, other[seed]) for seed, loss in one.items() if seed in other]
    if not pairs or all(any(map(math.isinf, losses)) for losses in zip(*pairs, strict=True)):
        return Difference(math.nan, math.nan, 0)
    differences = [loss - than for loss, than in pairs]
    finite = len(differences) > 2 and all(map(math.isfinite, differences))
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if finite else math.nan
    return Difference(statistics.fmean(differences), error, len(differences), comparisons)


@cache
def t_quantile(probability: float, freedom: int) -> float:
    """Return the number that |t| exceeds with `probability`, for Student's t with `freedom` degrees of freedom.

    Example:
        >>> from addnorm.lab.results import t_quantile
        >>> round(t_quantile(0.05, 2), 3), round(t_quantile(0.05 / 3, 9), 3)
        (4.303, 2.933)
    """
    low, high = 0.0, math.pi / 2  # bounds of the angle whose tangent is t / sqrt(freedom)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_tail(middle, freedom) > probability else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _t_tail(angle: float, freedom: int) -> float:
    """Return the probability that |t| exceeds sqrt(freedom) tan(angle): Abramowitz and Stegun 26.7.3 and 26.7.4."""
    term = math.cos(angle) if freedom % 2 else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + freedom % 2, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        total += term
    inside = math.sin(angle) * total
    return 1 - (2 * (angle + inside) / math.pi if freedom % 2 else inside)
