"""Draw the figures of the docs and of README.md from the numbers of figure_numbers.py and stream_numbers.py.

python docs/_build/figures.py            write docs/figures/*.svg
python docs/_build/figures.py FOLDER     write them elsewhere

A reader who prefers dark pages gets dark ones: `DARK` has the colours. Texts are SVG text, in the reader's own
sans-serif font where DejaVu Sans is missing. The same numbers give the same file.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import drawings
import figure_numbers as numbers
import stream_numbers
from drawings import BLUE, INK, ORANGE, PALE, arrow, figure

from addnorm._util import files
from addnorm._util.charts import LOOKS, Axis, Chart, Panel, Series
from addnorm._util.svg import chart_file
from addnorm.report import comparison_charts
from addnorm.stream.record.axes import COLOURS, DASHES, GREY

if TYPE_CHECKING:  # matplotlib is imported where it is used
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

FOLDER = Path(__file__).parent.parent / "figures"
GREEN, PINK = COLOURS[2:4]
TRAINED_LAYERS = 6
STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "addnorm", "font.family": "DejaVu Sans", "font.size": 9, "text.color": INK,
    "axes.edgecolor": GREY, "axes.labelcolor": INK, "xtick.color": GREY, "ytick.color": GREY, "xtick.labelcolor": INK,
    "ytick.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9.5,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "figure.facecolor": "white", "savefig.facecolor": "white",
}  # fmt: skip
# Colour on light pages -> on dark ones, as in the style sheets of report and explorer.
DARK = {
    "#ffffff": "#0d1117", INK: "#e8ebee", GREY: "#98a2ac", PALE: "#1a1e23", "#E2E2E2": "#2a3037", "#DDDDDD": "#2a3037",
    BLUE: "#56b4e9", ORANGE: "#e69f00", GREEN: "#1fb58a", PINK: "#dd92bb",
}  # fmt: skip


def signal_and_scale() -> Chart:
    """Chart four stacks by depth: Add keeps the signal, Norm keeps the scale."""
    stacks = numbers.by_depth()
    cosines, sizes = (
        [line(stacks[wiring].name, wiring, getattr(stacks[wiring], key)) for wiring in shown.split()]
        for key, shown in (("cosine", "pre_ln post_ln no_residual"), ("rms", "no_norm pre_ln post_ln"))
    )
    return chart(
        Panel("Add keeps the signal: cosine of x_l with the input x_0", cosines, height=260),
        Panel("Norm keeps the scale: size of the stream x_l (rms)", sizes, log=True, height=260),
        x=Axis("depth in sublayers"), columns=2,
    )  # fmt: skip


def line(name: str, wiring: str, values: Sequence[float], x: Sequence[float] | None = None) -> Series:
    """Return the series of a wiring, which has the same look in all charts."""
    points = [*zip(range(len(values)) if x is None else x, values, strict=True)]
    return Series(name, points, colour=LOOKS[wiring], dash=LOOKS[wiring])


def chart(*panels: Panel, x: Axis, columns: int) -> Chart:
    """Return a chart without title and caption, which the page has."""
    return Chart("", "", panels, x, columns)


def add_then_norm() -> Figure:
    """Draw one vector through the add and the norm, as bars."""
    t = numbers.example()
    made = figure(8.6, 3.0)
    panels = made.subplots(1, 5, sharey=True)
    steps = (
        ("x", "x", BLUE, ""), ("sublayer", "Sublayer(x)", ORANGE, "+"), ("z", "z", GREEN, "="),
        ("centred", "z − μ", GREEN, "→"), ("normalized", "(z − μ) / √(σ² + ε)", PINK, "→"),
    )  # fmt: skip
    below = {
        "z": f"μ = {numbers.places(t['mean'].value)}", "centred": f"σ² = {numbers.places(t['variance'].value)}",
        "normalized": "mean 0, variance 1",
    }  # fmt: skip
    for ax, (name, title, colour, sign) in zip(panels, steps, strict=True):
        values: Any = t[name].value
        bars(ax, values, colour)
        ax.set_title(title, loc="center")
        ax.text(-0.09, 0.5, sign, transform=ax.transAxes, ha="center", va="center", fontsize=15, color=INK)
        ax.set_xlabel(below.get(name, ""))
    mean: Any = t["mean"].value
    panels[2].axhline(mean, color=INK, linewidth=1, linestyle=DASHES[1])
    panels[2].text(0.5, mean + 0.12, "μ", ha="center")
    return made


def bars(ax: Axes, values: Sequence[float], colour: str) -> None:
    """Draw the features of a vector, each with its number."""
    ax.bar(range(len(values)), values, width=0.62, color=colour)
    ax.axhline(0, color=GREY, linewidth=0.8)
    for place, value in enumerate(values):
        up = value >= 0
        ax.text(place, value + (0.12 if up else -0.15), numbers.places((value,))[1:-1],
                ha="center", va="bottom" if up else "top", fontsize=8.5)  # fmt: skip
    ax.set_ylim(-2.2, 5.3)
    ax.set_xlim(-0.65, len(values) - 0.35)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)


def workflow() -> Figure:
    """Draw the seven steps, with the residual path around the sublayer."""
    from matplotlib.patches import FancyBboxPatch

    stages = numbers.workflow()
    made = figure(7.6, 5.4)
    ax = made.subplots()
    ax.set_axis_off()
    ax.set_xlim(0, 10)
    ax.set_ylim(-0.45, len(stages) - 0.45)
    fills = [BLUE, ORANGE, ORANGE, GREEN, PINK, PINK, INK]
    heights = [len(stages) - 1 - k for k in range(len(stages))]
    for k, (stage, y, colour) in enumerate(zip(stages, heights, fills, strict=True)):
        ax.add_patch(
            FancyBboxPatch((1.5, y - 0.29), 8.3, 0.58, boxstyle="round,pad=0,rounding_size=0.12", facecolor=PALE,
                           edgecolor=colour, linewidth=1.5)
        )  # fmt: skip
        ax.text(1.85, y, f"{k + 1}", ha="center", va="center", fontsize=12, fontweight="bold", color=colour)
        ax.text(2.2, y, stage.title, va="center", fontweight="bold")
        ax.text(5.75, y, stage.numbers, va="center", linespacing=1.35, fontsize=8.5)
        if k:
            arrow(ax, (4.0, y + 0.71), (4.0, y + 0.29), INK)
    around = [(1.5, heights[0]), (0.9, heights[0]), (0.9, heights[3]), (1.5, heights[3])]
    ax.plot(*zip(*around[:3], strict=True), color=BLUE, linewidth=2, solid_joinstyle="round")
    arrow(ax, around[2], around[3], BLUE, width=2)
    ax.text(0.55, (heights[0] + heights[3]) / 2, "the residual connection: x itself", rotation=90, ha="center",
            va="center", color=BLUE)  # fmt: skip
    return made


def encoder_layer() -> Figure:
    """Draw the tokens of an encoder layer at each place, and the size of each."""
    flow = numbers.encoder_layer()
    limit = 4.0
    made = figure(8.8, 4.4)
    rows = (
        ((flow.x, "x"), (flow.attention, "attention write"), (flow.z, "z = x + write"), (flow.y, "y = LayerNorm(z)")),
        ((flow.y, "y"), (flow.feed_forward, "feed-forward write"), (flow.z_2, "z' = y + write"),
         (flow.y_2, "y' = LayerNorm(z')")),
    )  # fmt: skip
    panels = made.subplots(2, 4)
    for line, row in zip(panels, rows, strict=True):
        for ax, (values, title), sign in zip(line, row, ("", "+", "=", "→"), strict=True):
            drawn = heat(ax, values, limit)
            ax.set_title(title, fontsize=8.5)
            ax.text(-0.1, 0.5, sign, transform=ax.transAxes, ha="center", va="center", fontsize=15, color=INK)
        line[0].set_ylabel("tokens")
    for ax in panels[1]:
        ax.set_xlabel("features", fontsize=8)
    bar = made.colorbar(drawn, ax=panels, shrink=0.62, aspect=24, pad=0.02, extend="both", ticks=(-4, -2, 0, 2, 4))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
    return made


def heat(ax: Axes, values: Tensor, limit: float) -> Any:
    """Draw a token a row: its features as colours, and its root mean square."""
    tokens, d = values.shape
    drawn = ax.pcolormesh(values.tolist(), cmap="PuOr_r", vmin=-limit, vmax=limit, clip_on=False)
    ax.hlines(range(1, tokens), 0, d, color="white", linewidth=1.2)
    ax.vlines(range(1, d), 0, tokens, color="white", linewidth=0.6)
    ax.set_xlim(0, d)
    ax.set_ylim(tokens, 0)
    for place, size in enumerate(numbers.token_rms(values)):
        ax.text(d + 0.4, place + 0.5, f"{size:.2f}", va="center", fontsize=7.5)
    ax.text(d + 0.4, -0.12, "rms", va="bottom", fontsize=7.5, color=GREY)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    return drawn


def comparison() -> Chart:
    """Chart the training of two wirings: the loss by step, and the gradient by depth after training."""
    results = numbers.comparison()
    n = results.protocol.num_layers[0]
    learning = comparison_charts.learning_chart(results, n)
    depth = comparison_charts.depth_chart(comparison_charts.groups_by_warm_up(results, n), after=True)
    assert depth is not None
    loss: Any = learning.panels[0]
    gradient: Any = next(panel for panel in depth.panels if panel.label == comparison_charts.BY_DEPTH["gradient"])
    after = gradient._replace(label=f"after training: {gradient.label}", height=loss.height, x=depth.x)
    return chart(loss, after, x=learning.x, columns=2)


def norms() -> Chart:
    """Chart trainings with and without norms: the loss, and how the sublayers' inputs change."""
    courses = numbers.training(TRAINED_LAYERS)
    loss, size, shift = (
        [line(course.name, wiring, getattr(course, key), course.steps) for wiring, course in courses.items()]
        for key in ("loss", "size", "shift")
    )
    entropy = numbers.unigram()
    limits = min(min(course.loss) for course in courses.values()) - 0.05, entropy + 0.35
    return chart(
        Panel("loss on held-out text, nats a character", loss, limits, lines={"character frequencies": entropy}, height=240),
        Panel("inputs: largest factor of change", size, height=240),
        Panel("inputs: largest shift of a mean, σ", shift, height=240),
        x=Axis("step"), columns=3,
    )  # fmt: skip


def several_streams() -> Chart:
    """Chart stacks of several streams by depth: whether the streams stay alike, what A amplifies, and what sublayers read."""
    curves = stream_numbers.streams_by_depth()
    cosine, gain, read = (
        [line(course.name, wiring, course.values) for wiring, course in courses.items()] for courses in curves
    )
    return chart(
        Panel("mean cosine of two streams", cosine, least=(-0.2, 1.0), height=240),
        Panel("largest row sum of the product of all A", gain, log=True, height=240),
        Panel("size of the read before its norm (rms)", read, log=True, height=240),
        x=Axis("depth in sublayers"), columns=3,
    )  # fmt: skip


FIGURES: dict[str, Callable[[], Figure | Chart]] = {
    "signal-and-scale": signal_and_scale, "add-then-norm": add_then_norm, "workflow": workflow,
    "encoder-layer": encoder_layer, "comparison": comparison, "norms": norms,
    "several-streams": several_streams, "placements": drawings.placements, "decoder-layer": drawings.decoder_layer,
    "norm-axes": drawings.norm_axes,
}  # fmt: skip


NUMBER = re.compile(r"-?\d+\.\d+")
NO_ROTATION = re.compile(r' transform="rotate\(-?0 [^"]*\)"')
RECTANGLE = re.compile(r"M (\S+) (\S+) L (\S+) \2 L \3 (\S+) L \1 \4 L \1 \2( z)?")


def svg(draw: Callable[[], Figure | Chart]) -> str:
    """Return a figure as the text of an SVG file, without date or name of a program."""
    import matplotlib as mpl

    style: Any = STYLE  # matplotlib's type of the keys is a list of all their names
    with mpl.rc_context(style):
        text, drawn = io.StringIO(), draw()
        if isinstance(drawn, Chart):
            return chart_file(drawn)
        drawn.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    short = re.sub(r"<[a-z][^>]*>", lambda tag: shorten(tag[0]), text.getvalue())
    short = short.replace("</style>", f"\n{dark_rules()}</style>", 1)
    return "\n".join(line.strip() for line in short.splitlines() if line.strip()) + "\n"


def dark_rules() -> str:
    """Return the style rules for dark pages. A viewer that ignores them shows the light colours."""
    rules = [
        f'[style*="{name}: {light.lower()}"] {{{name}: {dark} !important}}'
        for light, dark in DARK.items() for name in ("fill", "stroke")
    ]  # fmt: skip
    return "\n".join(["@media (prefers-color-scheme: dark) {", *rules, "}", ""])


def shorten(tag: str) -> str:
    """Return a tag on one line, with coordinates in hundredths, short rectangles, and fallbacks of the font."""
    tag = NO_ROTATION.sub("", " ".join(tag.split()))
    tag = NUMBER.sub(lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), tag)
    return RECTANGLE.sub(r"M \1 \2 H \3 V \4 H \1 z", tag).replace(
        "'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif"
    )


def main(words: Sequence[str]) -> int:
    """Draw all figures, then write them."""
    if len(words) > 1 or words[:1] == ["--help"]:
        raise SystemExit("docs/_build/figures.py takes one folder at most, or none for docs/figures.")
    folder = Path(words[0]) if words else FOLDER
    drawn = {name: svg(draw) for name, draw in FIGURES.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in drawn.items():
        files.write_text(folder / f"{name}.svg", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
