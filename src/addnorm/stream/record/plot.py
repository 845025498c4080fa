"""Drawings of a recording by depth. Each returns its Axes; none calls `show`.

A drawing of two quantities has one Axes for each, one above the other with the same depths on the x axis, and returns the upper.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from addnorm._util.optional import require
from addnorm.stream.record import axes
from addnorm.stream.record.axes import Depths, Line
from addnorm.stream.record.measurements import Measurements
from addnorm.stream.record.schema import RecordedSite, suggest

if TYPE_CHECKING:  # matplotlib is optional
    from matplotlib.axes import Axes

__all__ = ["Plots"]

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
        self,
        ax: Axes | None = None,
        *,
        label: str = "",
        step: int | None = None,
        stream: str | None = None,
        **line: Any,
    ) -> Axes:
        """Draw the stream after each sublayer: root mean square and largest magnitude."""
        step = self._step(step, ("out", "rms"), ("out", "max"))
        lines = [(name, self._stream(name, step, stream)) for name in ("rms", "max")]
        depths = self._depths(stream, "the stream", FORWARD, *(values for _, values in lines))
        ax = axes.new_axes(ax, 4.0)
        for name, values in lines:
            self._add(ax, depths, f"{label}: {name}" if label else name, values, line)
        title = self._title("The residual stream by depth", step)
        axes.finish(ax, title, "magnitude of the stream's elements", legend=True)
        return ax

    def gradients(
        self,
        ax: Axes | None = None,
        *,
        label: str = "",
        step: int | None = None,
        stream: str | None = None,
        **line: Any,
    ) -> Axes:
        """Draw the backward by depth: gradient at the stream, and of each sublayer's parameters."""
        step = self._step(step, ("grad", "l2"), ("params", "grad_l2"))
        at_stream = self._values("grad", "l2", step, stream)
        of_parameters = self._values("params", "grad_l2", step, stream)
        depths = self._depths(stream, "gradients", GRADIENTS, at_stream, of_parameters)
        title = self._title("Gradient of the loss by depth", step)
        panels = [("‖∂loss / ∂stream‖", at_stream), ("‖∂loss / ∂parameters‖", of_parameters)]
        return self._draw_panels(ax, depths, title, label, [(y, values, None) for y, values in panels], line)

    def writes(
        self,
        ax: Axes | None = None,
        *,
        label: str = "",
        step: int | None = None,
        stream: str | None = None,
        **line: Any,
    ) -> Axes:
        """Draw each sublayer's write: its norm relative to the stream's, and its cosine with the stream."""
        step = self._step(step, ("write", "ratio"), ("write", "cosine"))
        ratio, cosine = self._values("write", "ratio", step, stream), self._values("write", "cosine", step, stream)
        depths = self._depths(stream, "writes", FORWARD, ratio, cosine)
        title = self._title("Writes of the sublayers relative to the stream", step)
        panels: list[tuple[str, Values, Limits]] = [
            ("‖write‖ / ‖stream‖", ratio, None),
            ("cos(write, stream)", cosine, (-1, 1)),
        ]
        return self._draw_panels(ax, depths, title, label, panels, line)

    def similarity(
        self,
        ax: Axes | None = None,
        *,
        label: str = "",
        step: int | None = None,
        stream: str | None = None,
        **line: Any,
    ) -> Axes:
        """Draw the similarity of the tokens after each sublayer, and the norms' denominators sigma."""
        step = self._step(step, ("out", "similarity"), ("scale", "sigma"))
        cosines = self._values("out", "similarity", step, stream)
        sigmas = {name: self._values(name, "sigma", step, stream) for name in NORMS}
        sigmas = {name: values for name, values in sigmas.items() if values}
        last = self._values("norm_final", "sigma", step, stream)
        order = {site.id: place for place, site in enumerate(self.recording.sites)}
        for name in [*sigmas][:1] or ["norm_in"] * bool(last):  # the final norm is drawn with the first
            sigmas[name] = sorted([*sigmas.get(name, []), *last], key=lambda pair: order[pair[0].id])
        depths = self._depths(stream, "token similarities or norms", FORWARD, cosines, *sigmas.values())
        title = self._title("Similarity of the tokens by depth", step)
        panels: list[Panel] = [("cos(token, token)", cosines, (0.0, 1.0))]
        ax = self._draw_panels(ax, depths, title, label, panels, line, more=1 if sigmas else 0)
        if sigmas:
            lower = axes.add_lower_axes(ax, "sigma", depths) if cosines else ax
            several = len(sigmas) > 1
            for name, values in sigmas.items():
                self._add(lower, depths, f"{label} {NORMS[name]}".strip() if several else label, values, line)
            title = self._title("Denominator of the norms, σ = √(variance + ε)", step)
            axes.finish(lower, title[:1] if cosines else title, "σ", legend=several or not cosines)
        return ax

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
        chosen = {
            name: memory_map
            for name, memory_map in maps.items()
            if stream in (None, name) and memory_map[1] and memory_map[0]
        }
        if not chosen:
            raise ValueError(
                f"{self.recording!r} has no memory map: there is one where the writes add up to the stream."
            )
        require("matplotlib", "draw")
        ax = axes.new_axes(ax, 5.0 * len(chosen))
        panel = ax
        for place, (name, (sources, shares)) in enumerate(chosen.items()):
            if place:
                panel = axes.add_lower_axes(ax, name, Depths(()), share=False, height=1.0)
            of = f" ({name})" if len(maps) > 1 else ""
            steps = self.recording.steps
            title = self._title(f"Shares of the sources in the stream{of}, by depth", steps[-1] if steps else None)
            _draw_map(panel, sources, shares, ", ".join(filter(None, title)), mesh)
        return ax

    # Shared parts.

    def _step(self, step: int | None, *statistics: tuple[str, str]) -> int | None:
        return self.recording.last_step(*statistics) if step is None else step

    def _values(self, name: str, statistic: str, step: int | None, stream: str | None) -> Values:
        return self.recording.series(name, statistic, step, stream)

    def _stream(self, statistic: str, step: int | None, stream: str | None) -> Values:
        """Return a statistic of the stream by depth. x_0 without one has that of the first sublayer's input."""
        after = self._values("out", statistic, step, stream)
        measured = {site.id for site, _ in after}
        before: Values = []
        sites = self.recording.sites
        entering = {site.id: value for site, value in self._values("in", statistic, step, stream)}
        for start, first in itertools.pairwise(sites):
            if (
                start.kind == "start"
                and start.id not in measured
                and start.stream == first.stream
                and first.id in entering
            ):
                before.append((start, entering[first.id]))
        order = {site.id: place for place, site in enumerate(sites)}
        return sorted([*before, *after], key=lambda pair: order[pair[0].id])

    def _depths(self, stream: str | None, what: str, remedy: str, *series: Values) -> Depths:
        """Return the positions of the sites of some series; an error if all are empty."""
        if not any(series):
            raise ValueError(f"{self.recording!r} has no values of {what}: {remedy}.")
        require("matplotlib", "draw")
        drawn = {site.id for values in series for site, _ in values}
        sites = [site for site in self.recording.sites if stream in (None, site.stream)]
        return Depths([site for site in sites if site.kind != "final" or site.id in drawn])

    def _title(self, what: str, step: int | None) -> list[str]:
        return [what, str(self.recording.metadata.get("model", "")), "" if step is None else f"step {step}"]

    def _add(self, ax: Axes, depths: Depths, label: str, values: Values, line: dict[str, Any]) -> None:
        if values:
            name = str(self.recording.metadata.get("model", "recording"))
            axes.add_line(ax, depths, Line(label or name, values, line, has_user_label=bool(label)))

    def _draw_panels(
        self,
        ax: Axes | None,
        depths: Depths,
        title: list[str],
        label: str,
        panels: Sequence[Panel],
        line: dict[str, Any],
        more: int = 0,
    ) -> Axes:
        """Draw a panel for each quantity with values, title and legend above the first; leave room for `more` panels."""
        panels = [panel for panel in panels if panel[1]]
        ax = axes.new_axes(ax, 2.6 + 1.3 * (len(panels) + more))
        for place, (ylabel, values, limits) in enumerate(panels):
            panel = axes.add_lower_axes(ax, ylabel, depths) if place else ax
            self._add(panel, depths, label, values, line)
            axes.finish(panel, [] if place else title, ylabel, limits, legend=not place)
        return ax


Limits = tuple[float, float] | None
Panel = tuple[str, Values, Limits]


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
