"""What was measured of a model's residual stream: a number for each step, site, role and statistic.

What it guarantees:

- Memory is 16 bytes a number and nothing else that grows with the steps.
- Of one step each number is there once: what comes later in a step replaces what came before.
- NaN and inf are values like others, also in files.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from addnorm.stream.record import format, store
from addnorm.stream.record.balance import Balance
from addnorm.stream.record.optional import need
from addnorm.stream.record.schema import (
    BY_NAME,
    ORDER,
    ROLES,
    STATISTICS,
    Entry,
    RecordedSite,
    Selection,
    expected,
    select,
)
from addnorm.stream.record.spikes import Spike, spikes_of

if TYPE_CHECKING:  # rich is imported where it is used
    from rich.console import Console, ConsoleOptions, RenderResult

    from addnorm.stream.record.plot import Plots

__all__ = ["ROLES", "STATISTICS", "Balance", "Entry", "RecordedSite", "Recording", "Spike"]

Map = tuple[list[str], list[list[float]]]


class Series(NamedTuple):
    """The values of one statistic at one site, by step."""

    steps: array[int]
    values: array[float]

    def at(self, step: int) -> float | None:
        """The value of that step, None if there is none."""
        place = bisect_left(self.steps, step)
        return self.values[place] if place < len(self.steps) and self.steps[place] == step else None


class Recording:
    """What was measured, by step and site; `rec.plot` draws it, `rec.save` keeps it, `rec.table()` has every number.

    `STATISTICS` in this module says what there is. Wherever a role is asked for, TransformerLens' names do as well:
    resid_pre, attn_out, resid_mid, mlp_out, resid_post, scale, and "3_attn_out" for layer 3 alone.

    Args:
        sites: in order of depth, streams one after the other.
        facts: what was recorded: class of the model, version of torch, dtype, mode, notes; of each of its "streams" the
            wiring and how well every equation closes.
        maps: of each stream, at the last recorded step: the sources, and for each depth their shares, which sum to one.
        balances: of each stream, at the last recorded step: what each source has in it in the end, or why that is not known.

    Example:
        >>> from addnorm.stream.record.recording import RecordedSite, Recording
        >>> rec = Recording([RecordedSite("layers.0.attn", "layers.0.attn", "attention", 0)], {"model": "Toy"})
        >>> rec.add(0, 0, "write", "rms", 0.5)
        >>> rec.add(1, 0, "write", "rms", 0.75)
        >>> rec
        <Recording of Toy: 1 sublayer, 2 steps 0 ... 1>
        >>> [(site.layer, value) for site, value in rec.series("attn_out", "rms")]
        [(0, 0.75)]
        >>> rec.over_time("layers.0.attn", "write", "rms")
        [(0, 0.5), (1, 0.75)]
    """

    def __init__(
        self,
        sites: Iterable[RecordedSite] = (),
        facts: Mapping[str, Any] | None = None,
        maps: Mapping[str, Map] | None = None,
        balances: Mapping[str, Balance] | None = None,
    ) -> None:
        self.sites = tuple(sites)
        self.facts: dict[str, Any] = dict(facts or {})
        self._maps: dict[str, Map] = dict(maps or {})
        self._balances: dict[str, Balance] = dict(balances or {})
        # Makes the maps and the balances of the last step when they are asked for.
        self.mapper: Callable[[], Mapping[str, tuple[Map | None, Balance]]] | None = None
        self._series: dict[tuple[int, str, str], Series] = {}
        self._steps: dict[int, None] = {}

    @property
    def sites(self) -> tuple[RecordedSite, ...]:
        """In order of depth, streams one after the other. Who records may append to them; `add` counts them from 0."""
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
    def maps(self) -> dict[str, Map]:
        """Of each stream, at the last recorded step: the sources, and for each depth their shares, which sum to one."""
        self._make()
        return self._maps

    @maps.setter
    def maps(self, maps: Mapping[str, Map]) -> None:
        self._maps = dict(maps)

    @property
    def balances(self) -> dict[str, Balance]:
        """Of each stream, at the last recorded step: what each source has in it in the end, or why that is not known."""
        self._make()
        return self._balances

    def _make(self) -> None:
        """What the last step has; of one whose components do not add up, an earlier step's map does not stand for it."""
        for stream, (found, balance) in (self.mapper() if self.mapper is not None else {}).items():
            self._balances[stream] = balance
            self._maps.pop(stream, None)
            if found is not None:
                self._maps[stream] = found

    @property
    def streams(self) -> tuple[str, ...]:
        """The names of the streams."""
        return tuple(dict.fromkeys(site.stream for site in self.sites))

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that were recorded."""
        return tuple(sorted(self._steps))

    def add(self, step: int, site: int, role: str, statistic: str, value: float) -> None:
        """Keeps a number.

        Args:
            step: usually the last one or the next.
            site: its place in `sites`.
            role: one of `ROLES`.
            statistic: one of that role's `STATISTICS`.
            value: replaces what the same step had.
        """
        series = self._series.get((site, role, statistic))
        if series is None:
            series = self._begin(site, role, statistic)
        steps, values = series
        if steps and step <= steps[-1]:  # of the last step, or of an earlier one whose backward comes late
            place = bisect_left(steps, step)
            if steps[place] == step:
                values[place] = value
            else:
                steps.insert(place, step)
                values.insert(place, float(value))
                self._steps[step] = None
            return
        number = float(value)  # first: what is no number must not leave a step without one
        steps.append(step)
        values.append(number)
        self._steps[step] = None

    def _begin(self, site: int, role: str, statistic: str) -> Series:
        if not 0 <= site < len(self.sites):
            raise ValueError(
                f"site is {site}, expected a number from 0 to {len(self.sites) - 1}: its place in `sites`."
            )
        found = BY_NAME.get((role, statistic))
        if found is None or found.derived_from:
            names = [f"{one.role} {one.name}" for one in STATISTICS if not one.derived_from]
            raise ValueError(f"{role} {statistic} is not recorded, expected {expected(f'{role} {statistic}', names)}.")
        return self._series.setdefault((site, role, statistic), Series(array("q"), array("d")))

    def each_series(self) -> Iterator[tuple[int, str, str, Series]]:
        """Every series with its site, role and statistic, by depth and in the order of `STATISTICS`."""
        for site, role, statistic in sorted(self._series, key=lambda key: (key[0], ORDER[key[1:]])):
            if (series := self._series[site, role, statistic]).steps:
                yield site, role, statistic, series

    def table(self) -> list[Entry]:
        """Every number, tidy: by step, then by depth, then in the order of `STATISTICS`."""
        entries = [
            Entry(step, self.sites[site].id, self.sites[site].layer, role, statistic, value)
            for site, role, statistic, series in self.each_series()
            for step, value in zip(series.steps, series.values, strict=True)
        ]
        return sorted(entries, key=lambda entry: entry.step)  # which leaves the order within a step

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame; `layer` is Int64, NA at the stream's ends."""
        frame = need("pandas", "make a DataFrame").DataFrame(self.table(), columns=Entry._fields)
        return frame.astype({"step": "int64", "layer": "Int64", "value": "float64"})

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON types: what `save` writes. NaN and inf, which JSON lacks, are "NaN", "Infinity", "-Infinity"."""
        return store.to_dict(self)

    def save(self, path: str | Path) -> Path:
        """Writes a file, whole or not at all; `Recording.load` reads it.

        Args:
            path: ends in .json, or in .parquet for a tidy table that other tools read; that needs `addnorm[data]`.
        """
        return store.save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """A recording that was saved; a file that is no recording is refused with a ValueError."""
        return store.load(Path(path), cls)

    def series(
        self, name: str, statistic: str, step: int | None = None, stream: str | None = None
    ) -> list[tuple[RecordedSite, float]]:
        """A statistic by depth; empty where it was not recorded.

        Args:
            name: a role, or one of TransformerLens' names.
            statistic: one of the role's.
            step: by default the last that has it.
            stream: by default all, one after the other.
        """
        selection = select(name, statistic)
        if stream is not None and stream not in self.streams:
            raise ValueError(f"stream is {stream!r}, expected {expected(stream, self.streams)}.")
        chosen = [
            (site, series)
            for place, site in enumerate(self.sites)
            if stream in (None, site.stream)
            and selection.takes(site.kind, site.layer)
            and (series := self._find(place, selection))
        ]
        if step is None:
            step = max((series.steps[-1] for _, series in chosen), default=None)
        elif step not in self._steps:
            raise ValueError(f"step is {step!r}, expected a recorded one: {_listed(self.steps)}.")
        if step is None:
            return []
        values = ((site, series.at(step)) for site, series in chosen)
        return [(site, selection.value(value)) for site, value in values if value is not None]

    def last_step(self, *wanted: tuple[str, str]) -> int | None:
        """The last step that has one of these names and statistics; None where none has."""
        selections = [select(*one) for one in wanted]
        found = (self._find(place, one) for place in range(len(self.sites)) for one in selections)
        return max((series.steps[-1] for series in found if series), default=None)

    def over_time(self, site: str | int | RecordedSite, name: str, statistic: str) -> list[tuple[int, float]]:
        """A statistic of one site by step; empty where it was not recorded.

        Args:
            site: its id, its place in `sites`, or itself.
            name: a role, or one of TransformerLens' names.
            statistic: one of the role's.
        """
        place = self._place(site)
        selection, found = select(name, statistic), self.sites[place]
        if not selection.takes(found.kind, found.layer):
            where = " of ".join(
                filter(None, [selection.kind, "" if selection.layer is None else f"layer {selection.layer}"])
            )
            raise ValueError(
                f"{found.id} has no {name!r}, which is for {where}: ask for {selection.roles[0]!r} of this site."
            )
        series = self._find(place, selection)
        return [(step, selection.value(value)) for step, value in zip(*series, strict=True)] if series else []

    def _place(self, site: str | int | RecordedSite) -> int:
        if isinstance(site, int):
            if not -len(self.sites) <= site < len(self.sites):
                raise ValueError(f"site is {site}, expected a number from 0 to {len(self.sites) - 1}, or an id.")
            return range(len(self.sites))[site]
        name = site.id if isinstance(site, RecordedSite) else site
        ids = [one.id for one in self.sites]
        if name not in ids:
            raise ValueError(f"site is {name!r}, expected {expected(name, ids)}.")
        return ids.index(name)

    def _find(self, place: int, selection: Selection) -> Series | None:
        """Of the first of the selection's roles that the site has."""
        found = (self._series.get((place, role, selection.statistic)) for role in selection.roles)
        return next((series for series in found if series and series.steps), None)

    def spikes(self, window: int = 128, sd: float = 6.0, least: int = 32) -> list[Spike]:
        """Values far above those before them, by step: value > mean + sd standard deviations of the last `window` values.

        The value itself is not in its window, NaN and inf are always told, and a series that only rounding moves has none.

        Args:
            window: how many values back.
            sd: how many standard deviations.
            least: how many values there must be before the rule speaks; fewer give false alarms.
        """
        if not 2 <= least <= window:
            raise ValueError(f"least is {least} and window {window}, expected 2 <= least <= window.")
        found = [
            Spike(
                series.steps[at],
                self.sites[site].id,
                self.sites[site].layer,
                role,
                name,
                series.values[at],
                mean,
                spread,
            )
            for site, role, name, series in self.each_series()
            for at, mean, spread in spikes_of(series.values, window, sd, least)
        ]
        return sorted(found, key=lambda spike: spike.step)

    @property
    def plot(self) -> Plots:
        """Draws it: `rec.plot.stream(ax=ax)`; needs `addnorm[plot]`."""
        from addnorm.stream.record.plot import Plots  # plot.py stands on this file

        return Plots(self)

    def __repr__(self) -> str:
        sublayers = sum(site.kind not in ("start", "final") for site in self.sites)
        streams = f" in {len(self.streams)} streams" if len(self.streams) > 1 else ""
        what = f"{sublayers} sublayer{'s' * (sublayers != 1)}{streams}, {_steps_text(self.steps)}"
        gradients = ", with gradients" if any(role == "grad" for _, role, _ in self._series) else ""
        of = f" of {self.facts['model']}" if self.facts.get("model") else ""
        return f"<Recording{of}: {what}{gradients}>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield format.rich_table(self, options.max_width)

    def _repr_html_(self) -> str:
        return format.html(self)


def _steps_text(steps: tuple[int, ...]) -> str:
    ends = f" {steps[0]} ... {steps[-1]}" if len(steps) > 1 else f" {steps[0]}" if steps else ""
    return f"{len(steps) or 'no'} step{'s' * (len(steps) != 1)}{ends}"


def _listed(steps: tuple[int, ...]) -> str:
    shown = [*map(str, steps)]
    return ", ".join([*shown[:6], "...", shown[-1]] if len(shown) > 8 else shown) or "there is none yet"
