"""Numbers by step, site, role and statistic, and spikes in their series.

- Memory: 16 bytes a number; nothing else grows with the number of steps.
- A step has each number once: a later value of the same step replaces the earlier one.
- NaN and infinity are values like any other.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from addnorm.stream.record.schema import (
    STATISTICS,
    Balance,
    Measurement,
    MemoryMap,
    RecordedSite,
    Selection,
    find_statistic,
    order_statistic,
    resolve_name,
    suggest,
)

ROUND_OFF = 1e-6  # relative to the mean: a smaller spread is round-off of float32
CHUNK = 4096  # windows at once: 4 MB


class Series(NamedTuple):
    """Values of one statistic at one site, by step."""

    steps: array[int]
    values: array[float]

    def at(self, step: int) -> float | None:
        """Return the value of a step; None if there is none."""
        place = bisect_left(self.steps, step)
        return self.values[place] if place < len(self.steps) and self.steps[place] == step else None


class Spike(NamedTuple):
    """Value far above the values before it.

    `mean` and `sd` are the mean and the standard deviation of those values; NaN where there were too few.
    """

    step: int
    site: str
    layer: int | None
    role: str
    statistic: str
    value: float
    mean: float
    sd: float

    def __str__(self) -> str:
        text = f"step {self.step}, {self.site}: {self.role} {self.statistic} is {self.value:.4g}"
        return text if math.isnan(self.mean) else f"{text}, after {self.mean:.4g} ± {self.sd:.2g}"


def do_nothing() -> None:
    """Do nothing: maps and balances that are complete need no update. A recording with a lambda would not pickle."""


class Measurements:
    """Numbers of a recording with the sites they belong to. `Recording` adds files, drawings and tables.

    Args:
        sites: sites in order of depth, one stream after the other.
        metadata: how the recording was made, by name.
        memory_maps: memory map of each stream.
        balances: balance sheet of each stream.
    """

    def __init__(
        self,
        sites: Iterable[RecordedSite] = (),
        metadata: Mapping[str, Any] | None = None,
        memory_maps: Mapping[str, MemoryMap] | None = None,
        balances: Mapping[str, Balance] | None = None,
    ) -> None:
        self.sites = tuple(sites)
        self.metadata: dict[str, Any] = dict(metadata or {})
        self._memory_maps: dict[str, MemoryMap] = dict(memory_maps or {})
        self._balances: dict[str, Balance] = dict(balances or {})
        self._update_maps: Callable[[], None] = do_nothing  # called before maps and balances are read
        self._series: dict[tuple[int, str, str], Series] = {}
        self._steps: dict[int, None] = {}

    @property
    def sites(self) -> tuple[RecordedSite, ...]:
        """Sites in order of depth, one stream after the other. Sites may be appended; `add` uses their indices."""
        return self._sites

    @sites.setter
    def sites(self, sites: Iterable[RecordedSite]) -> None:
        self._sites = tuple(sites)
        for name, count in Counter(site.id for site in self._sites).items():
            if count > 1:
                raise ValueError(
                    f"{count} sites have the id {name!r}, expected an id for each: '{name}#2' for the second use."
                )

    @property
    def memory_maps(self) -> dict[str, MemoryMap]:
        """Memory map of each stream at the last recorded step: the sources, and for each depth their shares (sum 1)."""
        self._update_maps()
        return self._memory_maps

    @memory_maps.setter
    def memory_maps(self, maps: Mapping[str, MemoryMap]) -> None:
        self._memory_maps = dict(maps)

    @property
    def balances(self) -> dict[str, Balance]:
        """Balance sheet of each stream at the last recorded step."""
        self._update_maps()
        return self._balances

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams."""
        return tuple(dict.fromkeys(site.stream for site in self.sites))

    @property
    def steps(self) -> tuple[int, ...]:
        """Recorded steps."""
        return tuple(sorted(self._steps))

    def add(self, step: int, site: int, role: str, statistic: str, value: float) -> None:
        """Store a number.

        Args:
            step: usually the last one or the next.
            site: index in `sites`.
            role: one of `ROLES`.
            statistic: one of the recorded `STATISTICS` of the role.
            value: replaces an earlier value of the same step.

        Raises:
            ValueError: there is no such site, or the statistic is not recorded.
        """
        series = self._series.get((site, role, statistic))
        if series is None:
            if not 0 <= site < len(self.sites):
                raise ValueError(
                    f"site is {site}, expected a number from 0 to {len(self.sites) - 1}: its place in `sites`."
                )
            entry = find_statistic(role, statistic)
            if entry is None or entry.reciprocal_of:
                names = [f"{known.role} {known.name}" for known in STATISTICS if not known.reciprocal_of]
                raise ValueError(
                    f"{role} {statistic} is not recorded, expected {suggest(f'{role} {statistic}', names)}."
                )
            series = self._series[site, role, statistic] = Series(array("q"), array("d"))
        steps, values = series
        place = len(steps) if not steps or step > steps[-1] else bisect_left(steps, step)  # a backward may run late
        if place < len(steps) and steps[place] == step:
            values[place] = value
            return
        number = float(value)  # first: if it fails, the step must not be inserted
        steps.insert(place, step)
        values.insert(place, number)
        self._steps[step] = None

    def iter_series(self) -> Iterator[tuple[int, str, str, Series]]:
        """Yield every series with its site's index, role and statistic, by depth and in the order of `STATISTICS`."""
        for site, role, statistic in sorted(self._series, key=lambda key: (key[0], order_statistic(*key[1:]))):
            if (series := self._series[site, role, statistic]).steps:
                yield site, role, statistic, series

    def table(self) -> list[Measurement]:
        """Return all numbers as a tidy table: by step, then by depth, then in the order of `STATISTICS`."""
        rows = [
            Measurement(step, self.sites[site].id, self.sites[site].layer, role, statistic, value)
            for site, role, statistic, series in self.iter_series()
            for step, value in zip(series.steps, series.values, strict=True)
        ]
        return sorted(rows, key=lambda row: row.step)  # stable: the order within a step stays

    def series(
        self, name: str, statistic: str, step: int | None = None, stream: str | None = None
    ) -> list[tuple[RecordedSite, float]]:
        """Return a statistic by depth, as pairs of a site and a value; empty if it was not recorded.

        Args:
            name: a role, or a name of TransformerLens.
            statistic: a statistic of the role.
            step: a recorded step; the last one that has the statistic by default.
            stream: name of one stream; all streams by default.

        Raises:
            ValueError: there is no such name, statistic, step or stream.
        """
        selection = resolve_name(name, statistic)
        if stream is not None and stream not in self.streams:
            raise ValueError(f"stream is {stream!r}, expected {suggest(stream, self.streams)}.")
        chosen = [
            (site, series)
            for place, site in enumerate(self.sites)
            if stream in (None, site.stream) and selection.matches(site) and (series := self._select(place, selection))
        ]
        if step is None:
            step = max((series.steps[-1] for _, series in chosen), default=None)
        elif step not in self._steps:
            texts = [*map(str, self.steps)]
            shown = [*texts[:6], "...", texts[-1]] if len(texts) > 8 else texts or ["there is none yet"]
            raise ValueError(f"step is {step!r}, expected a recorded one: {', '.join(shown)}.")
        if step is None:
            return []
        values = ((site, series.at(step)) for site, series in chosen)
        return [(site, selection.convert(value)) for site, value in values if value is not None]

    def last_step(self, *statistics: tuple[str, str]) -> int | None:
        """Return the last step that has one of these pairs of a name and a statistic; None if no step has one."""
        selections = [resolve_name(*pair) for pair in statistics]
        candidates = (self._select(place, selection) for place in range(len(self.sites)) for selection in selections)
        return max((series.steps[-1] for series in candidates if series), default=None)

    def over_time(self, site: str | int | RecordedSite, name: str, statistic: str) -> list[tuple[int, float]]:
        """Return a statistic of one site by step, as pairs of a step and a value; empty if it was not recorded.

        Args:
            site: its id, its index in `sites`, or the site.
            name: a role, or a name of TransformerLens.
            statistic: a statistic of the role.

        Raises:
            ValueError: there is no such site, name or statistic, or the name is for sites of another kind.
        """
        place = self._place(site)
        selection, chosen = resolve_name(name, statistic), self.sites[place]
        if not selection.matches(chosen):
            where = " of ".join(
                filter(None, [selection.kind, "" if selection.layer is None else f"layer {selection.layer}"])
            )
            raise ValueError(
                f"{chosen.id} has no {name!r}, which is for {where}: use {selection.roles[0]!r} at this site."
            )
        series = self._select(place, selection)
        return [(step, selection.convert(value)) for step, value in zip(*series, strict=True)] if series else []

    def _place(self, site: str | int | RecordedSite) -> int:
        if isinstance(site, int):
            if not -len(self.sites) <= site < len(self.sites):
                raise ValueError(f"site is {site}, expected a number from 0 to {len(self.sites) - 1}, or an id.")
            return range(len(self.sites))[site]
        name = site.id if isinstance(site, RecordedSite) else site
        ids = [recorded_site.id for recorded_site in self.sites]
        if name not in ids:
            raise ValueError(f"site is {name!r}, expected {suggest(name, ids)}.")
        return ids.index(name)

    def _select(self, place: int, selection: Selection) -> Series | None:
        """Return the series of the first of the selection's roles that the site has."""
        candidates = (self._series.get((place, role, selection.statistic)) for role in selection.roles)
        return next((series for series in candidates if series and series.steps), None)

    def spikes(self, window: int = 128, sd: float = 6.0, min_count: int = 32) -> list[Spike]:
        """Return the spikes of all series, by step: value > mean + sd standard deviations of the `window` values before.

        NaN and infinity are always spikes. A series that varies by round-off only has none.

        Args:
            window: number of earlier values.
            sd: number of standard deviations.
            min_count: number of earlier values without which a finite value is no spike; fewer give false alarms.

        Raises:
            ValueError: not 2 <= min_count <= window.

        Source: the stability monitor of OLMo-core.
        """
        if not 2 <= min_count <= window:
            raise ValueError(f"min_count is {min_count} and window {window}, expected 2 <= min_count <= window.")
        spikes = [
            Spike(
                series.steps[place], self.sites[site].id, self.sites[site].layer, role, name, series.values[place], mean,
                spread,
            )
            for site, role, name, series in self.iter_series()
            for place, mean, spread in find_spikes(series.values, window, sd, min_count)
        ]  # fmt: skip
        return sorted(spikes, key=lambda spike: spike.step)


def find_spikes(values: Sequence[float], window: int, sd: float, min_count: int) -> Iterator[tuple[int, float, float]]:
    """Yield the index of each spike of one series, with the mean and the standard deviation of the values before it.

    Values that are not finite are spikes and not part of any window: one NaN would hide all spikes of the next window.

    Example:
        >>> from addnorm.stream.record.measurements import find_spikes
        >>> [place for place, mean, sd in find_spikes([1.0, 2.0, 1.0, 2.0, 9.0, float("nan"), 1.0], 4, 6.0, min_count=4)]
        [4, 5]
    """
    series = torch.tensor(values, dtype=torch.float64, device="cpu")
    finite = series.isfinite()
    places = finite.nonzero()[:, 0]
    spikes = [(int(place), math.nan, math.nan) for place in (~finite).nonzero()[:, 0]]
    windows = torch.cat([series.new_full((window,), math.nan), series[finite]]).unfold(0, window, 1)
    for begin in range(0, len(places), CHUNK):
        chunk = places[begin : begin + CHUNK]
        before = windows[begin : begin + len(chunk)]
        mean = before.nanmean(1)
        deviation = (before - mean[:, None]).square().nanmean(1).sqrt()
        spread = torch.maximum(deviation, ROUND_OFF * mean.abs())
        high = (series[chunk] > mean + sd * spread) & (before.isfinite().sum(1) >= min_count)
        spikes += zip(chunk[high].tolist(), mean[high].tolist(), deviation[high].tolist(), strict=True)
    yield from sorted(spikes, key=lambda spike: spike[0])
