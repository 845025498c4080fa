"""Drawings of a recording by depth; each returns its Axes, and none calls `show`.

Where a drawing has two quantities they stand one above the other, with the same depths on the x axis; the upper Axes is returned.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from addnorm.stream.record import axes
from addnorm.stream.record.axes import Depths, Line
from addnorm.stream.record.optional import need
from addnorm.stream.record.schema import RecordedSite, expected

if TYPE_CHECKING:  # matplotlib is imported where it is used; recording.py stands on this file
    from matplotlib.axes import Axes

    from addnorm.stream.record.recording import Recording

__all__ = ["Plots"]

Values = list[tuple[RecordedSite, float]]
GRADIENTS = "record with grads=True, and call loss.backward() while recording"
FORWARD = "run the model while recording"
NORMS = {"norm_in": "of what is read", "norm_out": "of the stream after the add", "norm_branch": "of what is written"}
MAP_WITH_NUMBERS = 10  # a map of so many sources has its numbers written into it


class Plots:
    """Draws a recording.

    Every function takes and returns `ax`, and takes `label` (a name for the recording where several share an Axes), `step`
    (by default the last that has the numbers), `stream` (by default all, one after the other), and the keywords of
    matplotlib's lines. Without `ax` the figure is a new one of pyplot's.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from addnorm.stream.record.recording import RecordedSite, Recording
        >>> rec = Recording([RecordedSite("attn", "attn", "attention", 0), RecordedSite("mlp", "mlp", "feed-forward", 0)])
        >>> rec.add(0, 0, "out", "rms", 1.5)
        >>> rec.add(0, 1, "out", "rms", 2.0)
        >>> ax = rec.plot.stream(ax=Figure().add_subplot(), label="before")
        >>> ax.get_title(loc="left")
        'The residual stream by depth, step 0'
    """

    def __init__(self, recording: Recording) -> None:
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
        """The stream after each sublayer: root mean square and largest magnitude."""
        step = self._step(step, ("out", "rms"), ("out", "max"))
        found = [(name, self._stream(name, step, stream)) for name in ("rms", "max")]
        depths = self._depths(stream, "the stream", FORWARD, *(values for _, values in found))
        ax = axes.new_axes(ax, 4.0)
        for name, values in found:
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
        """The backward on the depths of the forward: the gradient at the stream, and of each sublayer's parameters."""
        step = self._step(step, ("grad", "l2"), ("params", "grad_l2"))
        at_stream, of_parameters = (
            self._values("grad", "l2", step, stream),
            self._values("params", "grad_l2", step, stream),
        )
        depths = self._depths(stream, "gradients", GRADIENTS, at_stream, of_parameters)
        title = self._title("Gradient of the loss by depth", step)
        panels = [("‖∂loss / ∂stream‖", at_stream), ("‖∂loss / ∂parameters‖", of_parameters)]
        return self._one_above_the_other(ax, depths, title, label, [(y, values, None) for y, values in panels], line)

    def writes(
        self,
        ax: Axes | None = None,
        *,
        label: str = "",
        step: int | None = None,
        stream: str | None = None,
        **line: Any,
    ) -> Axes:
        """What each sublayer adds: its length over that of the stream, and its cosine with the stream."""
        step = self._step(step, ("write", "ratio"), ("write", "cosine"))
        ratio, cosine = self._values("write", "ratio", step, stream), self._values("write", "cosine", step, stream)
        depths = self._depths(stream, "writes", FORWARD, ratio, cosine)
        title = self._title("What each sublayer writes, against the stream", step)
        panels: list[tuple[str, Values, Limits]] = [
            ("‖write‖ / ‖stream‖", ratio, None),
            ("cos(write, stream)", cosine, (-1, 1)),
        ]
        return self._one_above_the_other(ax, depths, title, label, panels, line)

    def similarity(
        self,
        ax: Axes | None = None,
        *,
        label: str = "",
        step: int | None = None,
        stream: str | None = None,
        **line: Any,
    ) -> Axes:
        """How alike the tokens are after each sublayer, and the norms' denominators sigma."""
        step = self._step(step, ("out", "similarity"), ("scale", "sigma"))
        alike = self._values("out", "similarity", step, stream)
        sigmas = {name: self._values(name, "sigma", step, stream) for name in NORMS}
        sigmas = {name: values for name, values in sigmas.items() if values}
        last = self._values("norm_final", "sigma", step, stream)
        order = {site.id: place for place, site in enumerate(self.recording.sites)}
        for name in [*sigmas][:1] or ["norm_in"] * bool(last):  # the final norm goes with the first
            sigmas[name] = sorted([*sigmas.get(name, []), *last], key=lambda one: order[one[0].id])
        depths = self._depths(stream, "token similarities or norms", FORWARD, alike, *sigmas.values())
        title = self._title("How alike the tokens are, by depth", step)
        panels: list[Panel] = [("cos(token, token)", alike, (0.0, 1.0))]
        ax = self._one_above_the_other(ax, depths, title, label, panels, line, more=1 if sigmas else 0)
        if sigmas:
            lower = axes.below(ax, "sigma", depths) if alike else ax
            several = len(sigmas) > 1
            for name, values in sigmas.items():
                self._add(lower, depths, f"{label} {NORMS[name]}".strip() if several else label, values, line)
            title = self._title("Denominator of the norms, σ = √(variance + ε)", step)
            axes.finish(lower, title[:1] if alike else title, "σ", legend=several or not alike)
        return ax

    def memory_map(self, ax: Axes | None = None, *, stream: str | None = None, **mesh: Any) -> Axes:
        """Of what the stream is made at each depth: the share of each source, at the last recorded step.

        Args:
            ax: the Axes; several streams stand below one another.
            stream: one of them.
            mesh: keywords of matplotlib's `pcolormesh`.
        """
        maps = self.recording.maps
        if stream is not None and stream not in maps and maps:
            raise ValueError(f"stream is {stream!r}, expected {expected(stream, maps)}.")
        chosen = {name: one for name, one in maps.items() if stream in (None, name) and one[1] and one[0]}
        if not chosen:
            raise ValueError(
                f"{self.recording!r} has no memory map: there is one where the writes add up to the stream."
            )
        need("matplotlib", "draw")
        ax = axes.new_axes(ax, 5.0 * len(chosen))
        where = ax
        for place, (name, (sources, shares)) in enumerate(chosen.items()):
            if place:
                where = axes.below(ax, name, Depths(()), share=False, height=1.0)
            of = f" ({name})" if len(maps) > 1 else ""
            steps = self.recording.steps
            title = self._title(f"What the stream{of} is made of, by depth", steps[-1] if steps else None)
            _map(where, sources, shares, ", ".join(filter(None, title)), mesh)
        return ax

    # What they share.

    def _step(self, step: int | None, *wanted: tuple[str, str]) -> int | None:
        return self.recording.last_step(*wanted) if step is None else step

    def _values(self, name: str, statistic: str, step: int | None, stream: str | None) -> Values:
        return self.recording.series(name, statistic, step, stream)

    def _stream(self, statistic: str, step: int | None, stream: str | None) -> Values:
        """The stream by depth: where it starts is what enters its first sublayer, if nobody measured it there."""
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
        return sorted([*before, *after], key=lambda one: order[one[0].id])

    def _depths(self, stream: str | None, what: str, remedy: str, *found: Values) -> Depths:
        """The depths of what is drawn; a sentence if there is nothing to draw."""
        if not any(found):
            raise ValueError(f"{self.recording!r} has nothing of {what}: {remedy}.")
        need("matplotlib", "draw")
        drawn = {site.id for values in found for site, _ in values}
        sites = [site for site in self.recording.sites if stream in (None, site.stream)]
        return Depths([site for site in sites if site.kind != "final" or site.id in drawn])

    def _title(self, what: str, step: int | None) -> list[str]:
        return [what, str(self.recording.facts.get("model", "")), "" if step is None else f"step {step}"]

    def _add(self, ax: Axes, depths: Depths, label: str, values: Values, line: dict[str, Any]) -> None:
        if values:
            name = str(self.recording.facts.get("model", "recording"))
            axes.add(ax, depths, Line(label or name, values, line, named=bool(label)))

    def _one_above_the_other(
        self,
        ax: Axes | None,
        depths: Depths,
        title: list[str],
        label: str,
        panels: Sequence[Panel],
        line: dict[str, Any],
        more: int = 0,
    ) -> Axes:
        """A panel for each quantity that was recorded, title and legend above the first; there will be `more`."""
        panels = [panel for panel in panels if panel[1]]
        ax = axes.new_axes(ax, 2.6 + 1.3 * (len(panels) + more))
        for place, (ylabel, values, limits) in enumerate(panels):
            where = axes.below(ax, ylabel, depths) if place else ax
            self._add(where, depths, label, values, line)
            axes.finish(where, [] if place else title, ylabel, limits, legend=not place)
        return ax


Limits = tuple[float, float] | None
Panel = tuple[str, Values, Limits]


def _map(ax: Axes, sources: list[str], shares: list[list[float]], title: str, mesh: dict[str, Any]) -> None:
    """One heat map: sources from below upwards, depths from left to right; what is not yet written is left blank."""
    from matplotlib.colors import FuncNorm

    begins = [next((k for k, row in enumerate(shares) if row[source]), 0) for source in range(len(sources))]
    cells = [
        [math.nan if depth < begin else row[source] for depth, row in enumerate(shares)]
        for source, begin in enumerate(begins)
    ]
    finite = [value for row in cells for value in row if math.isfinite(value)]
    low, high = min([*finite, 0.0]), max([*finite, 0.0]) or 1.0
    # Shares of a deep stream are small, of either sign, but for x_0's where all begins.
    own = {} if "norm" in mesh else {"norm": FuncNorm((_root, _square), low, high)}
    style = {"cmap": "cividis", **own, **mesh}
    edges = ([k - 0.5 for k in range(n + 1)] for n in (len(shares), len(sources)))
    drawn = ax.pcolormesh(*edges, cells, **style)
    scale: Any = drawn.norm
    root = " (colours by its square root)" if own else ""
    bar = ax.figure.colorbar(drawn, ax=ax, pad=0.02)
    bar.set_label(f"share of the stream{root}", fontsize="small")
    bar.ax.tick_params(labelsize="small")
    bar.outline.set_visible(False)
    if max(len(shares), len(sources)) <= MAP_WITH_NUMBERS:
        for source, row in enumerate(cells):
            for depth, value in enumerate(row):
                if math.isfinite(value):
                    ink = "white" if scale(value) < 0.55 else "black"
                    ax.text(depth, source, f"{value:.2f}", ha="center", va="center", fontsize="small", color=ink)
    columns = [*range(0, len(shares), max(1, -(-len(shares) // 13)))]
    ax.set_xticks(columns, labels=["$x_0$" if not k and any(begins) else str(k) for k in columns], fontsize="small")
    rows = [*range(0, len(sources), max(1, -(-len(sources) // 25)))]
    ax.set_yticks(rows, labels=[_short(sources[k]) for k in rows], fontsize="small")
    ax.set_xlabel("depth in sublayers", fontsize="small")
    ax.set_ylabel("written by", fontsize="small")
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    ax.set_title(title, loc="left", fontsize="medium", fontweight="bold")


def _root(share: Any) -> Any:
    """The square root, with the sign of the share."""
    return abs(share) ** 0.5 * ((share > 0) * 2.0 - 1.0)


def _square(root: Any) -> Any:
    return abs(root) * root


def _short(name: str) -> str:
    """The end of a name, where it is long: "…layer.3.attention"."""
    return "$x_0$" if name == "x_0" else name if len(name) <= 26 else f"…{name[-25:]}"
