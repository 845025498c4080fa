"""Drawings of a recording by depth. Each returns its Axes; none calls `show`.

A drawing of two quantities has one Axes for each, one above the other with the same depths on the x axis, and returns the upper.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from addnorm._util.charts import Panel, Series, depth_axis
from addnorm._util.optional import require
from addnorm.stream.record import axes
from addnorm.stream.record.measurements import Measurements
from addnorm.stream.record.schema import AXIS_LABELS, LIMITS, RecordedSite, suggest

if TYPE_CHECKING:  # matplotlib is optional
    from matplotlib.axes import Axes

Values = list[tuple[RecordedSite, float]]
GRADIENTS = "record with grads=True, and call loss.backward() while recording"
FORWARD = "run the model while recording"
NORMS = {"norm_in": "of the input", "norm_out": "of the stream after the add", "norm_branch": "of the output"}
LEVELS = 48  # colours of a map; matplotlib rasterizes colour bars of 50 and more
DARK_CELL = 0.5  # share of the largest from which on the number in a cell has the colour of the paper
LABELLED_CELLS = 16  # a map with at most so many sources and depths shows its numbers
LABELLED_SOURCES = 26  # of a map: 12 layers, x_0 and the biases of the norms; of more sources not every one has a label


class Plots:
    """Drawings of a recording.

    Every function takes and returns `ax`; without it, it draws on a new figure of pyplot. It also takes `label` (a name for the
    recording where several share an Axes), `step` (the last that has the numbers by default), `stream` (all by default, one
    after the other), and the keywords of matplotlib's lines.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from addnorm.stream.record.schema import RecordedSite
        >>> sites = [RecordedSite("attn", "attn", "attention", 0), RecordedSite("mlp", "mlp", "feed-forward", 0)]
        >>> rec = addnorm.stream.Recording(sites)
        >>> rec.add(0, 0, "out", "rms", 1.5)
        >>> rec.add(0, 1, "out", "rms", 2.0)
        >>> ax = rec.plot.stream(ax=Figure().add_subplot(), label="before")
        >>> ax.get_title(loc="left")
        'The residual stream by depth, step 0'
    """

    def __init__(self, recording: Measurements) -> None:
        self.recording = recording

    def __repr__(self) -> str:
        return f"<plots of {self.recording!r}: stream, gradients, writes, similarity, memory_map>"

    def stream(
        self, ax: Axes | None = None, *, label: str = "", step: int | None = None, stream: str | None = None, **line: Any
    ) -> Axes:  # fmt: skip
        """Draw the stream after each sublayer: root mean square and largest magnitude."""
        drawing = _Drawing(self.recording, label, step, stream, line)
        drawing.select_step(("out", "rms"), ("out", "max"))
        series = {name: drawing.values_from_x_0(name) for name in ("rms", "max")}
        panels = [_Quantity("magnitude of the stream's elements", series)]
        return drawing.draw(ax, "The residual stream by depth", panels, "the stream", FORWARD)

    def gradients(
        self, ax: Axes | None = None, *, label: str = "", step: int | None = None, stream: str | None = None, **line: Any
    ) -> Axes:  # fmt: skip
        """Draw the backward by depth: gradient at the stream, and of each sublayer's parameters."""
        drawing = _Drawing(self.recording, label, step, stream, line)
        panels = drawing.panels(("grad", "l2"), ("params", "grad_l2"))
        return drawing.draw(ax, "Gradient of the loss by depth", panels, "gradients", GRADIENTS)

    def writes(
        self, ax: Axes | None = None, *, label: str = "", step: int | None = None, stream: str | None = None, **line: Any
    ) -> Axes:  # fmt: skip
        """Draw each sublayer's write: its norm relative to the stream's, and its cosine with the stream."""
        drawing = _Drawing(self.recording, label, step, stream, line)
        panels = drawing.panels(("write", "ratio"), ("write", "cosine"))
        return drawing.draw(ax, "Writes of the sublayers relative to the stream", panels, "writes", FORWARD)

    def similarity(
        self, ax: Axes | None = None, *, label: str = "", step: int | None = None, stream: str | None = None, **line: Any
    ) -> Axes:  # fmt: skip
        """Draw the similarity of the tokens after each sublayer, and the norms' denominators sigma."""
        drawing = _Drawing(self.recording, label, step, stream, line)
        drawing.select_step(("out", "similarity"), ("scale", "sigma"))
        sigmas = {text: values for role, text in NORMS.items() if (values := drawing.values(role, "sigma"))}
        last = drawing.values("norm_final", "sigma")
        for name in [*sigmas][:1] or [NORMS["norm_in"]] * bool(last):  # the final norm is drawn with the first
            sigmas[name] = drawing.sort([*sigmas.get(name, []), *last])
        series = dict(zip(sigmas if len(sigmas) > 1 else [""], sigmas.values(), strict=False))
        sigma = _Quantity("σ", series, title="Denominator of the norms, σ = √(variance + ε)")
        panels = [*drawing.panels(("out", "similarity")), sigma]
        return drawing.draw(ax, "Similarity of the tokens by depth", panels, "token similarities or norms", FORWARD)

    def memory_map(self, ax: Axes | None = None, *, stream: str | None = None, **mesh: Any) -> Axes:
        """Draw the share of each source in the stream at each depth, at the last recorded step.

        Args:
            ax: the Axes; several streams are drawn below one another.
            stream: name of one stream; all by default.
            mesh: keywords of matplotlib's `pcolormesh`.

        Raises:
            ValueError: there is no such stream, or the recording has no memory map.
        """
        maps = self.recording.memory_maps
        if stream is not None and stream not in maps and maps:
            raise ValueError(f"stream is {stream!r}, expected {suggest(stream, maps)}.")
        chosen = {name: one for name, one in maps.items() if stream in (None, name) and all(one)}
        if not chosen:
            raise ValueError(
                f"{self.recording!r} has no memory map: there is one where the writes add up to the stream."
            )
        require("matplotlib", "draw")
        ax = panel = axes.new_axes(ax, 5.0 * len(chosen))
        for place, (name, (sources, shares)) in enumerate(chosen.items()):
            if place:
                panel = axes.add_lower_axes(ax, name, share=False, height=1.0)
            of = f" ({name})" if len(maps) > 1 else ""
            what = f"Shares of the sources in the stream{of}, by depth"
            step = max(self.recording.steps, default=None)
            _draw_map(panel, sources, shares, ", ".join(filter(None, _title(what, self.recording, step))), mesh)
        return ax


class _Quantity(NamedTuple):
    """Content of a panel: values by depth of each line, by its name, and a title of its own if the drawing's does not name it."""

    label: str
    lines: Mapping[str, Values]
    least: tuple[float, float] | None = None
    title: str = ""


@dataclass
class _Drawing:
    """Drawing of lines by depth; its attributes are the arguments of the functions of `Plots`."""

    recording: Measurements
    label: str
    step: int | None
    stream: str | None
    line: dict[str, Any]

    def select_step(self, *statistics: tuple[str, str]) -> None:
        """Use the last step that has one of these statistics, unless the caller passed a step."""
        if self.step is None:
            self.step = self.recording.last_step(*statistics)

    def values(self, role: str, statistic: str) -> Values:
        """Return a statistic by depth."""
        return self.recording.series(role, statistic, self.step, self.stream)

    def sort(self, values: Values) -> Values:
        """Return values in the order of the sites."""
        order = {site.id: place for place, site in enumerate(self.recording.sites)}
        return sorted(values, key=lambda pair: order[pair[0].id])

    def values_from_x_0(self, statistic: str) -> Values:
        """Return a statistic of the stream by depth. x_0 without one has that of the first sublayer's input."""
        after = self.values("out", statistic)
        measured = {site.id for site, _ in after}
        entering = {site.id: value for site, value in self.values("in", statistic)}
        before = [
            (start, entering[first.id])
            for start, first in itertools.pairwise(self.recording.sites)
            if start.kind == "start"
            and start.id not in measured
            and start.stream == first.stream
            and first.id in entering
        ]
        return self.sort([*before, *after])

    def panels(self, *statistics: tuple[str, str]) -> list[_Quantity]:
        """Return the content of a panel for each of these pairs of a role and a statistic."""
        self.select_step(*statistics)
        return [_Quantity(AXIS_LABELS[pair], {"": self.values(*pair)}, LIMITS.get(pair)) for pair in statistics]

    def draw(self, ax: Axes | None, title: str, quantities: Sequence[_Quantity], what: str, remedy: str) -> Axes:
        """Draw a panel for each quantity with values, title and legend above the first; an error if there is none."""
        drawn = {site.id for quantity in quantities for values in quantity.lines.values() for site, _ in values}
        if not drawn:
            raise ValueError(f"{self.recording!r} has no values of {what}: {remedy}.")
        require("matplotlib", "draw")
        sites = [site for site in self.recording.sites if self.stream in (None, site.stream)]
        axis, places = depth_axis([site for site in sites if site.kind != "final" or site.id in drawn])
        quantities = [quantity for quantity in quantities if any(quantity.lines.values())]
        ax = axes.new_axes(ax, 2.6 + 1.3 * len(quantities))
        for number, quantity in enumerate(quantities):
            panel = Panel(quantity.label, [*self._list_series(quantity, places)], least=quantity.least)
            heading = [quantity.title] if number else _title(quantity.title or title, self.recording, self.step)
            several = len(quantity.lines) > 1
            axes.draw_panel(
                axes.add_lower_axes(ax, panel.label) if number else ax, panel, axis, heading, self.line,
                labelled=bool(self.label) or several, legend=not number or several,
            )  # fmt: skip
        return ax

    def _list_series(self, quantity: _Quantity, places: Mapping[str, float]) -> Iterator[Series]:
        """Yield the lines of a quantity, in parts by stream."""
        model = str(self.recording.metadata.get("model", "recording"))
        for name, values in quantity.lines.items():
            label = ": ".join(filter(None, (self.label, name))) or model
            for stream in dict.fromkeys(site.stream for site, _ in values):
                own = [(site, value) for site, value in values if site.stream == stream]
                yield Series(label, [(places[site.id], value) for site, value in own], [site.kind for site, _ in own])


def _title(what: str, recording: Measurements, step: int | None) -> list[str]:
    return [what, str(recording.metadata.get("model", "")), "" if step is None else f"step {step}"]


def _draw_map(ax: Axes, sources: list[str], shares: list[list[float]], title: str, mesh: dict[str, Any]) -> None:
    """Draw a heat map: sources upwards, depths to the right. Cells before a source's write are blank.

    The opacity of the first colour is the square root of the share, as in the explorer; negative shares have the second colour.
    Shares in a deep stream are small and of either sign, except that of x_0 at the start.
    """
    from matplotlib import rcParams
    from matplotlib.colors import FuncNorm, ListedColormap

    begins = [next((k for k, row in enumerate(shares) if row[source]), 0) for source in range(len(sources))]
    cells = [
        [math.nan if depth < begin else row[source] for depth, row in enumerate(shares)]
        for source, begin in enumerate(begins)
    ]
    finite = [value for row in cells for value in row if math.isfinite(value)]
    mesh = dict(mesh)
    low, high = mesh.pop("vmin", min([*finite, 0.0])), mesh.pop("vmax", max([*finite, 0.0]) or 1.0)
    own: dict[str, Any] = {} if "norm" in mesh else {"norm": FuncNorm((_root, _square), low, high)}
    style = {"cmap": ListedColormap(_share_colours(low, high)), **own, **mesh}
    edges = ([k - 0.5 for k in range(n + 1)] for n in (len(shares), len(sources)))
    drawn = ax.pcolormesh(*edges, cells, **style)
    paper = ax.get_facecolor()
    root = " (opacity: its square root)" if own else ""
    bar = ax.figure.colorbar(drawn, ax=ax, pad=0.02)
    bar.set_label(f"share of the stream{root}", fontsize="small")
    bar.ax.tick_params(labelsize="small")
    bar.outline.set_visible(False)
    if max(len(shares), len(sources)) <= LABELLED_CELLS:
        for source, row in enumerate(cells):
            for depth, value in enumerate(row):
                if math.isfinite(value):
                    ink = paper if abs(value) > DARK_CELL * max(high, -low) else rcParams["text.color"]
                    ax.text(depth, source, f"{value:.2f}", ha="center", va="center", fontsize="x-small", color=ink)
    columns = [*range(0, len(shares), max(1, -(-len(shares) // 13)))]
    ax.set_xticks(columns, labels=["x_0" if not k and any(begins) else str(k) for k in columns], fontsize="small")
    rows = [*range(0, len(sources), max(1, -(-len(sources) // LABELLED_SOURCES)))]
    ax.set_yticks(rows, labels=[_short(sources[k]) for k in rows], fontsize="small")
    ax.set_xlabel("depth in sublayers", fontsize="small")
    ax.set_ylabel("written by", fontsize="small")
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    ax.set_title(title, loc="left", fontsize="medium", fontweight="bold")


def _share_colours(low: float, high: float) -> list[tuple[float, float, float, float]]:
    """Return the colours of shares from `low` to `high`, at equal distances of their signed square roots."""
    from matplotlib.colors import to_rgb

    begin, end = float(_root(low)), float(_root(high))
    most = max(end, -begin)
    roots = [begin + (end - begin) * k / (LEVELS - 1) for k in range(LEVELS)]
    positive, negative = (to_rgb(colour) for colour in axes.COLOURS[:2])
    return [(*(negative if root < 0 else positive), 0.04 + 0.96 * abs(root) / most) for root in roots]


def _root(share: Any) -> Any:
    """Return the square root of the magnitude with the sign of the share."""
    return abs(share) ** 0.5 * ((share > 0) * 2.0 - 1.0)


def _square(root: Any) -> Any:
    return abs(root) * root


def _short(name: str) -> str:
    """Return a name, of a long one the end: "…layer.3.attention"."""
    return "x_0" if name == "x_0" else name if len(name) <= 26 else f"…{name[-25:]}"
