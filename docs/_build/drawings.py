"""Drawings of the docs that show no measured numbers: the stream as a bus, and the axes over which norms compute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from addnorm.stream.record.axes import COLOURS, GREY

if TYPE_CHECKING:  # matplotlib is imported where it is used
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, PALE = "#222222", "#F3F4F6"
BLUE, ORANGE = COLOURS[:2]
WIDTH, STEP = 0.62, 2.7  # of a norm's box, and from one sublayer to the next
HEIGHT = 1.25  # of a sublayer above the stream


def figure(width: float, height: float) -> Figure:
    """Return an empty figure without a window."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height))
    made.set_layout_engine("constrained", w_pad=0.08, h_pad=0.09)
    return made


def placements() -> Figure:
    """Draw two layers with the norm on the stream, and the same with the norm before each sublayer."""
    names = ("attention", "feed-forward") * 2
    made = figure(8.8, 3.9)
    post, pre = made.subplots(2, 1)
    _bus(post, names, is_post=True)
    _bus(pre, names, is_post=False)
    post.set_title("post-LN: each norm is on the stream")
    pre.set_title("pre-LN: sublayers read normalized copies; nothing but adds on the stream")
    return made


def decoder_layer() -> Figure:
    """Draw a decoder layer, whose second sublayer also reads the encoder's output."""
    made = figure(7.4, 2.4)
    ax = made.subplots()
    _bus(ax, ("causal\nself-attention", "cross-\nattention", "feed-forward"), is_post=True, memory=1)
    return made


def norm_axes() -> Figure:
    """Draw tokens by features, the values of one mean in colour: those of a token in LayerNorm, of a feature in BatchNorm."""
    made = figure(7.0, 2.5)
    sides = made.subplots(1, 2)
    titles = ("LayerNorm: a token's features", "BatchNorm: a feature's tokens")
    for ax, title, colour, token, feature in zip(sides, titles, (BLUE, ORANGE), (2, None), (None, 3), strict=True):
        ax.set_title(title)
        for row in range(5):
            for column in range(8):
                chosen = row == token or column == feature
                ax.add_patch(_box((column, -row), 0.86, 0.86, colour if chosen else PALE, colour if chosen else GREY))
        ax.set_xlim(-1.4, 7.7)
        ax.set_ylim(-5.5, 0.7)
        ax.set_aspect("equal")
        ax.set_axis_off()
        ax.text(3.5, -5.1, "features", ha="center", va="center")
        ax.text(-1.0, -2, "tokens", ha="center", va="center", rotation=90)
    return made


def _bus(ax: Axes, names: tuple[str, ...], is_post: bool, memory: int | None = None) -> None:
    """Draw a stream and sublayers that read from it and write to it; sublayer `memory` also reads the encoder's output."""
    end = STEP * len(names) + (0.5 if is_post else 0.9)
    arrow(ax, (0.0, 0.0), (end, 0.0), INK, 2.4)
    ax.text(-0.12, 0, "x_0", ha="right", va="center")
    ax.text(end + 0.1, 0, "y", ha="left", va="center")
    for k, name in enumerate(names):
        read, write = STEP * k + 0.55, STEP * k + 1.95
        middle = (read + write) / 2
        ax.plot([read, read, middle], [0, HEIGHT, HEIGHT], color=INK, linewidth=1.2)
        ax.plot([middle, write], [HEIGHT, HEIGHT], color=INK, linewidth=1.2)
        arrow(ax, (write, HEIGHT), (write, 0.16), INK)
        ax.add_patch(_box((middle, HEIGHT), 1.12, 0.62, PALE, INK))
        ax.text(middle, HEIGHT, name, ha="center", va="center", fontsize=7.5, zorder=6)
        ax.plot([write], [0], marker="o", markersize=11, color=INK, markerfacecolor="white", zorder=3)
        ax.plot([write], [0], marker="+", markersize=7, color=INK, zorder=4)
        _norm(ax, (write + 0.55, 0.0) if is_post else (read, HEIGHT / 2 - 0.02))
        if k == memory:
            arrow(ax, (middle, 2.25), (middle, HEIGHT + 0.33), INK)
            ax.text(middle + 0.12, 2.1, "the encoder's output", ha="left", va="center", fontsize=7.5)
    if not is_post:
        _norm(ax, (end - 0.65, 0.0))
    ax.set_axis_off()
    ax.set_xlim(-0.5, end + 0.35)
    ax.set_ylim(-0.45, 2.35 if memory is not None else HEIGHT + 0.45)


def _norm(ax: Axes, centre: tuple[float, float]) -> None:
    ax.add_patch(_box(centre, WIDTH, 0.42, BLUE, BLUE))
    ax.text(*centre, "LN", ha="center", va="center", fontsize=7.5, fontweight="bold", color="white", zorder=6)


def _box(centre: tuple[float, float], width: float, height: float, face: str, edge: str) -> Any:
    """Return a rectangle around its centre."""
    from matplotlib.patches import Rectangle

    corner = centre[0] - width / 2, centre[1] - height / 2
    return Rectangle(corner, width, height, facecolor=face, edgecolor=edge, linewidth=1.0, zorder=5)


def arrow(ax: Axes, begin: tuple[float, float], end: tuple[float, float], colour: str, width: float = 1.2) -> None:
    """Draw an arrow from one place to another."""
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": width, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 11}
    ax.annotate("", xy=end, xytext=begin, arrowprops=style)
