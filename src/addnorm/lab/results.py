"""Results of a comparison: its runs, its stacks at init, and each wiring at its best setting.

Everything here is computed from finished runs; nothing is trained.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from addnorm.lab import theory
from addnorm.lab.measure import Numbers
from addnorm.lab.protocol import Protocol
from addnorm.lab.published import Check, checks

__all__ = ["Arm", "Group", "Results"]


@dataclass(frozen=True)
class Group:
    """The runs of one setting, a seed each.

    Attributes:
        wiring, num_layers, lr, warm_up: what they have in common.
        runs: in the order of the seeds.
    """

    wiring: str
    num_layers: int
    lr: float
    warm_up: int
    runs: tuple[Numbers, ...] = field(repr=False)

    @property
    def diverged(self) -> int:
        """How many runs ended in no number, or well above their first loss and above that of knowing nothing."""
        return sum(run["diverged"] for run in self.runs)

    def loss(self, part: str = "test") -> float:
        """The mean over the seeds; infinite if one diverged: a setting that fails once in a while is no good one."""
        return math.inf if self.diverged else statistics.fmean(run[part] for run in self.runs)

    def losses(self, part: str = "test") -> list[float]:
        """By seed; infinite where it diverged."""
        return [math.inf if run["diverged"] else run[part] for run in self.runs]

    def mean(self, value: Callable[[Numbers], float | None]) -> float:
        """Of a number of each run, over those that have it; NaN if none has."""
        found = [x for run in self.runs if (x := value(run)) is not None]
        return statistics.fmean(found) if found else math.nan


@dataclass(frozen=True)
class Arm:
    """A wiring at a depth: every setting that was tried, and the one it is judged by.

    The setting is chosen by the loss on the validation part, and judged by that on the test part.
    """

    wiring: str
    num_layers: int
    groups: tuple[Group, ...]

    @property
    def best(self) -> Group:
        """The setting with the least validation loss."""
        return min(self.groups, key=lambda group: group.loss("validation"))

    def best_where(self, which: Callable[[Group], bool]) -> Group | None:
        """The best of some settings."""
        return min(filter(which, self.groups), key=lambda group: group.loss("validation"), default=None)

    @property
    def at_the_edge(self) -> bool:
        """Whether the best rate is the smallest or the largest that was tried, so that a better one may lie beyond."""
        rates = sorted({group.lr for group in self.groups})
        return len(rates) > 1 and self.best.lr in (rates[0], rates[-1]) and math.isfinite(self.best.loss("validation"))


@dataclass(frozen=True)
class Results:
    """Runs of a comparison and the stacks at init, grouped by setting.

    Attributes:
        compared: the wirings, by name.
        protocol: which runs were made.
        runs: what each left behind (`addnorm.lab.train`), in the order of the protocol.
        stacks: the figures of single stacks at init (`addnorm.lab.theory.at_init`).
        text: what was learned: its name, size, and the losses of knowing nothing (`uniform`) and of knowing only how often each
            character occurs (`entropy`).
    """

    compared: tuple[str, ...]
    protocol: Protocol
    runs: Sequence[Numbers] = field(repr=False)
    stacks: Sequence[Numbers] = field(repr=False)
    text: Numbers = field(repr=False)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The runs by what differs but the seed."""
        found: dict[tuple[Any, ...], list[Numbers]] = {}
        for run in self.runs:
            of = run["settings"]
            found.setdefault((of["wiring"], of["num_layers"], of["lr"], of["warm_up"]), []).append(run)
        return tuple(Group(key[0], key[1], key[2], key[3], tuple(runs)) for key, runs in found.items())

    @cached_property
    def arms(self) -> tuple[Arm, ...]:
        """Each wiring at each depth, depth by depth."""
        keys = dict.fromkeys((group.num_layers, group.wiring) for group in self.groups)
        return tuple(
            Arm(wiring, n, tuple(g for g in self.groups if (g.num_layers, g.wiring) == (n, wiring)))
            for n, wiring in sorted(keys, key=lambda key: (key[0], self.compared.index(key[1])))
        )

    def by_depth(self) -> Iterator[tuple[int, tuple[Arm, ...]]]:
        """The arms of each depth, from the shallowest."""
        for n in sorted({arm.num_layers for arm in self.arms}):
            yield n, tuple(arm for arm in self.arms if arm.num_layers == n)

    @cached_property
    def at_init(self) -> list[Numbers]:
        """The figures at init by wiring and depth, over the seeds."""
        return theory.summary(self.stacks)

    @cached_property
    def checks(self) -> list[Check]:
        """What the papers say of wirings at init, beside what was measured."""
        return checks(self.at_init)
