"""Drawings of a recording by depth. Each returns its Axes; none calls `show`.

A drawing of two quantities has one Axes for each, one above the other with the same depths on the x axis, and returns the upper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from addnorm._util.charts import Map, Panel, depth_axis, depth_series
from addnorm._util.optional import require
from addnorm.stream.record import axes
from addnorm.stream.record.measurements import Measurements
from addnorm.stream.record.schema import RecordedSite, suggest

if TYPE_CHECKING:  # matplotlib is optional
    from matplotlib.axes import Axes

Values = list[tuple[RecordedSite, float]]
GRADIENTS = "record with grads=True, and call loss.backward() while recording"
FORWARD = "run the model while recording"
LEVELS = 48  # colours of a map; matplotlib rasterizes colour bars of 50 and more
DARK_CELL = 0.5  # fraction of the largest magnitude above which a cell's number has the background's colour
LABELLED_CELLS = 16  # a map with at most so many sources and depths shows its numbers
LABELLED_SOURCES = 26  # most sources of a map that all have labels: those of 12 layers, x_0 and the biases of the norms


class Quantity(NamedTuple):
    """Content of a panel.

    Attributes:
        label: the quantity.
        lines: role and statistic of each line, by its name, which is shown if there are several.
        least: range that the axis covers at least.
        title: title of the panel if that of the drawing does not name it.
    """

    label: str
    lines: Mapping[str, tuple[str, str]]
    least: tuple[float, float] | None = None
    title: str = ""


class Drawing(NamedTuple):
    """Drawing by depth, with a panel for each quantity.

    If a recording has no values for it, the error says that `what` is missing and recommends the `remedy`.
    """

    title: str
    quantities: tuple[Quantity, ...]
    what: str
    remedy: str


FINAL = "of the stream at the end"  # drawn as the last point of the line of the first other norm
DRAWINGS = {
    "stream": Drawing(
        "The residual stream by depth",
        (Quantity("magnitude of the stream's elements", {"rms": ("out", "rms"), "max": ("out", "max")}),),
        "the stream", FORWARD,
    ),
    "gradients": Drawing(
        "Gradient of the loss by depth",
        (
            Quantity("‖∂loss / ∂stream‖", {"": ("grad", "l2")}),
            Quantity("‖∂loss / ∂parameters‖", {"": ("params", "grad_l2")}),
        ),
        "gradients", GRADIENTS,
    ),
    "writes": Drawing(
        "Writes of the sublayers relative to the stream",
        (
            Quantity("‖write‖ / ‖stream‖", {"": ("write", "ratio")}),
            Quantity("cos(write, stream)", {"": ("write", "cosine")}, (-1.0, 1.0)),
        ),
        "writes", FORWARD,
    ),
    "similarity": Drawing(
        "Similarity of the tokens by depth",
        (
            Quantity("cos(token, token)", {"": ("out", "similarity")}, (0.0, 1.0)),
            Quantity("σ", {
                "of the input": ("norm_in", "sigma"), "of the stream after the add": ("norm_out", "sigma"),
                "of the output": ("norm_branch", "sigma"), FINAL: ("norm_final", "sigma"),
            }, title="Denominator of the norms, σ = √(variance + ε)"),
        ),
        "token similarities or norms", FORWARD,
    ),
}  # fmt: skip


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
        return self._draw("stream", ax, label, step, stream, line)

    def gradients(
        self, ax: Axes | None = None, *, label: str = "", step: int | None = None, stream: str | None = None, **line: Any
    ) -> Axes:  # fmt: skip
        """Draw the backward by depth: gradient at the stream, and of each sublayer's parameters."""
        return self._draw("gradients", ax, label, step, stream, line)

    def writes(
        self, ax: Axes | None = None, *, label: str = "", step: int | None = None, stream: str | None = None, **line: Any
    ) -> Axes:  # fmt: skip
        """Draw each sublayer's write: its norm relative to the stream's, and its cosine with the stream."""
        return self._draw("writes", ax, label, step, stream, line)

    def similarity(
        self, ax: Axes | None = None, *, label: str = "", step: int | None = None, stream: str | None = None, **line: Any
    ) -> Axes:  # fmt: skip
        """Draw the similarity of the tokens after each sublayer, and the norms' denominators sigma."""
        return self._draw("similarity", ax, label, step, stream, line)

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
            _draw_map(
                panel, Map(name, sources, shares), ", ".join(filter(None, _title(what, self.recording, step))), mesh
            )
        return ax

    def _draw(
        self, name: str, ax: Axes | None, label: str, step: int | None, stream: str | None, line: Mapping[str, Any]
    ) -> Axes:
        """Draw a panel for each quantity that has values, title and legend above the first; raise if none has any."""
        recording, drawing = self.recording, DRAWINGS[name]
        panels, step = read_drawing(recording, drawing, step, stream)
        if not panels:
            raise ValueError(f"{recording!r} has no values of {drawing.what}: {drawing.remedy}.")
        require("matplotlib", "draw")
        for _, lines in panels:
            if FINAL in lines and len(lines) > 1:
                first, *_ = lines
                lines[first] += lines.pop(FINAL)
        drawn = {site.id for _, lines in panels for values in lines.values() for site, _ in values}
        sites = [site for site in recording.sites if stream in (None, site.stream)]
        axis, places = depth_axis([site for site in sites if site.kind != "final" or site.id in drawn])
        model = str(recording.metadata.get("model", "recording"))
        ax = axes.new_axes(ax, 2.6 + 1.3 * len(panels))
        for number, (quantity, lines) in enumerate(panels):
            several = len(lines) > 1
            names = [": ".join(filter(None, (label, name if several else ""))) or model for name in lines]
            series = [
                one
                for name, values in zip(names, lines.values(), strict=True)
                for one in depth_series(name, values, places)
            ]
            axes.draw_panel(
                axes.add_lower_axes(ax, quantity.label) if number else ax,
                Panel(quantity.label, series, least=quantity.least), axis,
                [quantity.title] if number else _title(quantity.title or drawing.title, recording, step), line,
                labelled=bool(label) or several, has_series=not number or several, has_kinds=not number,
            )  # fmt: skip
        return ax


def read_drawing(
    recording: Measurements, drawing: Drawing, step: int | None = None, stream: str | None = None
) -> tuple[list[tuple[Quantity, dict[str, Values]]], int | None]:
    """Return the quantities that have values, each with the values of its lines, and the step of these values.

    By default this is the last step with a value of the drawing.
    """
    if step is None:
        step = recording.last_step(*(pair for quantity in drawing.quantities for pair in quantity.lines.values()))
    panels = []
    for quantity in drawing.quantities:
        read = ((name, recording.series(*pair, step, stream)) for name, pair in quantity.lines.items())
        lines = {name: values for name, values in read if values}
        if lines:
            panels.append((quantity, lines))
    return panels, step


def _title(what: str, recording: Measurements, step: int | None) -> list[str]:
    return [what, str(recording.metadata.get("model", "")), "" if step is None else f"step {step}"]


def _draw_map(ax: Axes, panel: Map, title: str, mesh: dict[str, Any]) -> None:
    """Draw a heat map: sources upwards, depths to the right. Cells before a source's write are blank.

    The opacity of the first colour is the square root of the share, as in the explorer; negative shares have the second colour.
    Shares in a deep stream are small and of either sign, except that of x_0 at the start.
    """
    from matplotlib import rcParams
    from matplotlib.colors import FuncNorm, ListedColormap

    cells, sources, depths = panel.cells, panel.sources, len(panel.shares)
    finite = [value for row in cells for value in row if math.isfinite(value)]
    mesh = dict(mesh)
    low, high = mesh.pop("vmin", min([*finite, 0.0])), mesh.pop("vmax", max([*finite, 0.0]) or 1.0)
    own: dict[str, Any] = (
        {} if "norm" in mesh else {"norm": FuncNorm((_root, lambda root: abs(root) * root), low, high)}
    )
    style = {"cmap": ListedColormap(_share_colours(low, high)), **own, **mesh}
    drawn = ax.pcolormesh(*([k - 0.5 for k in range(n + 1)] for n in (depths, len(sources))), cells, **style)
    paper = ax.get_facecolor()
    root = " (opacity: its square root)" if own else ""
    bar = ax.figure.colorbar(drawn, ax=ax, pad=0.02)
    bar.set_label(f"share of the stream{root}", fontsize="small")
    bar.ax.tick_params(labelsize="small")
    bar.outline.set_visible(False)
    if max(depths, len(sources)) <= LABELLED_CELLS:
        for source, row in enumerate(cells):
            for depth, value in enumerate(row):
                if math.isfinite(value):
                    ink = paper if abs(value) > DARK_CELL * max(high, -low) else rcParams["text.color"]
                    ax.text(depth, source, f"{value:.2f}", ha="center", va="center", fontsize="x-small", color=ink)
    columns = range(0, depths, -(-depths // 13))
    begins_with_x_0 = any(math.isnan(row[0]) for row in cells)  # sources write later
    ax.set_xticks(columns, labels=["x_0" if not k and begins_with_x_0 else str(k) for k in columns], fontsize="small")
    rows = range(0, len(sources), -(-len(sources) // LABELLED_SOURCES))
    names = (sources[k] for k in rows)
    short = [name if len(name) <= 26 else f"…{name[-25:]}" for name in names]  # the end: "…layer.3.attention"
    ax.set_yticks(rows, labels=short, fontsize="small")
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
