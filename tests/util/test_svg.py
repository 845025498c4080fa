"""Tests of `addnorm._util.svg`, `addnorm._util.charts` and `addnorm.report.page`: places, colours, contrast, looks of wirings."""

import base64
import math
import re
from importlib import resources
from pathlib import Path
from xml.etree import ElementTree

import pytest

import addnorm
from addnorm._util.charts import LOOKS, NUM_LOOKS, Axis, Chart, Map, Panel, Scale, Series, choose_looks
from addnorm._util.svg import NARROW, WIDE, chart_file, draw_chart, read_style
from addnorm.report import Table, draw_figure
from addnorm.stream.record import axes

KINDS = ("start", "attention", "feed-forward", "attention")


def chart(*panels, x=None, columns=1):
    return Chart('A "title"', "A caption.", panels, x or Axis("step"), columns)


def draw(*panels, width=WIDE, **options):
    return ElementTree.fromstring(draw_chart(chart(*panels, **options), width))


def paths(svg, name):
    """Return the points at which the paths of a class move or draw a line, path by path."""
    found = [element.get("d") for element in svg.iter("path") if element.get("class") == name]
    return [[(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", d)] for d in found]


def texts(svg):
    return [element.text for element in svg.iter("text")]


@pytest.mark.parametrize("log", [False, True])
def test_points_are_drawn_at_their_numbers(log):
    points = [(0, 1.0), (1, 10.0), (3, 100.0)]
    svg = draw(Panel("loss", [Series("a", points)], limits=(0.1, 1000.0), log=log, height=200))
    ((first, second, last),) = [line for line in paths(svg, "line") if len(line) == 3]
    assert second[0] - first[0] == pytest.approx((last[0] - first[0]) / 3, abs=0.1)
    heights = [math.log10(y) / 4 + 0.25 if log else (y - 0.1) / 999.9 for _, y in points]
    for (_, y), height in zip((first, second, last), heights, strict=True):
        assert 206 - y == pytest.approx(200 * height, abs=0.1), "larger numbers are higher"


def test_axis_follows_from_the_numbers():
    def panel(*values, **options):
        return Panel("p", [Series("a", [*enumerate(values)])], **options)

    assert panel(2.0, 3.0).scale[0] == 0.0, "without 0 noise would look large"
    assert panel(1.0, 11.0).scale.log
    assert not panel(-1.0, 11.0).scale.log
    assert not panel(1.0, 11.0, least=(0.0, 1.0)).scale.log
    assert panel(0.5, 0.75, least=(0.0, 1.0)).scale.has(1.0)
    assert panel(5.0, limits=(1.0, 2.0)).scale == Scale(1.0, 2.0, False)


def test_series_share_style_by_label():
    lower = [Series("b", [(0, 1.0), (1, 2.0)]), Series("a", [(0, 2.0), (1, 1.0)]), Series("a", [(3, 2.0)])]
    svg = draw(
        Panel("upper", [Series("a", [(0, 1.0)]), Series("c", [(0, 2.0)], colour=8, dash=3)]), Panel("lower", lower)
    )
    classes = {}
    for group in svg.iter("g"):
        for title in group.findall("title"):
            classes.setdefault(title.text, set()).add(group.get("class"))
    assert classes == {"a": {"s1 d0"}, "c": {"s2 d3"}, "b": {"s3 d2"}}
    assert [text for text in texts(svg) if text in "abc"] == ["a", "c", "b"], "one legend for all panels"


def test_unplaceable_numbers_are_marked():
    values = [(0, 0.0), (1, 1.0), (2, math.nan), (3, 1000.0), (4, math.inf)]
    svg = draw(Panel("p", [Series("a", values, [""] * 5)]))
    assert [len(line) for line in paths(svg, "line")] == [2]
    assert [len(marks) for marks in paths(svg, "lost")][1:] == [2]
    assert [len(marks) for marks in paths(svg, "zeros")][1:] == [1]
    assert {"NaN or infinite", "0, off the log axis"} <= {*texts(svg)}


def test_markers_tell_kinds_apart():
    svg = draw(Panel("p", [Series("a", [(k, 1.0 + k) for k in range(4)], KINDS)]))
    assert sorted(len(marks) for marks in paths(svg, "point")) == [1, 1, 2]
    assert {"attention", "feed-forward"} <= {*texts(svg)}
    assert not {"start", "a"} & {*texts(svg)}


def test_bars_stand_on_zero():
    panel = Panel("p", [Series("a", [(1, 2.0), (2, -1.0)], form="bars")], height=100)
    svg = draw(panel, x=Axis("depth", ticks={1: "1", 2: "2"}))
    (bars,) = [path.get("d") for path in svg.iter("path") if path.get("class") == "bar"]
    (base, top), (other, bottom) = re.findall(r"M[\d.]+ ([\d.]+)V([\d.]+)h", bars)
    assert base == other
    assert float(base) - float(top) == pytest.approx(2 * (float(bottom) - float(base)), abs=0.2)


@pytest.mark.parametrize(("width", "most"), [(WIDE, 70), (NARROW, 12)])
def test_ticks_without_room_are_left_out(width, most):
    ticks = {0.0: "x_0", **{float(k): str(k) for k in range(1, 97)}, 97.0: "final"}
    svg = draw(
        Panel("p", [Series("a", [(k, 1.0) for k in range(98)])]),
        x=Axis("depth", ticks=ticks, groups={"encoder": (0, 97)}),
        width=width,
    )
    shown = [text for text in texts(svg) if text in ticks.values()]
    assert {"x_0", "final"} <= {*shown}
    assert 4 < len(shown) < most
    assert "encoder" in texts(svg)


def test_map_cells_have_the_root_of_the_share():
    shares = [[1.0, 0.0, 0.0], [0.64, 0.36, 0.0], [1.04, 0.16, -0.2]]
    svg = draw(Map("map", ["x_0", "attention 1", "a name that is much too long for the margin of a page"], shares, 1.04),
               Map("other", ["x_0"], [[1.0]]), x=Axis("depth", ticks={0: "x_0", 1: "1", 2: "2"}), columns=2)  # fmt: skip
    cells = [
        element
        for element in svg.iter("path")
        if element.get("class", "").startswith("cell") and element.get("d")[1:3] != "4-"
    ]
    opacity = {float(cell.get("fill-opacity")): cell.get("class") for cell in cells}
    assert opacity[1.0] == "cell s1"
    negative = [strength for strength, classes in opacity.items() if classes == "cell s2"]
    assert negative == [pytest.approx(0.04 + 0.96 * (0.2 / 1.04) ** 0.5, abs=0.02)]
    assert {"0.64", "0.36", "-0.20"} <= {*texts(svg)}
    assert "0.00" not in texts(svg), "cells before a source's write are blank"
    assert any(text.startswith("…") and text.endswith("margin of a page") for text in texts(svg))


def test_drawing_uses_only_page_colours():
    everything = Panel(
        "<p> & 'q'",
        [Series("<a>", [(0, 1.0), (1, math.nan)], ["", ""]), Series("b", [(1, 2.0)], form="bars")],
        lines={"l": 1.5},
    )
    text = draw_chart(chart(everything), WIDE)
    assert not re.findall(r"[(=]#|style=|id=|url|http", text)
    used = {name for classes in re.findall(r'class="([^"]*)"', text) for name in classes.split()}
    assert used - {"chart", "d0"} <= {*re.findall(r"\.([a-z]\w*)", read_style())}
    assert ElementTree.fromstring(text).get("aria-label") == 'A "title". A caption.'


def test_chart_file_has_its_own_colours():
    root = ElementTree.fromstring(chart_file(chart(Panel("p", [Series("a", [(1, 0.5)])]))))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme: dark" in root[0].text


def test_matplotlib_drawing_becomes_a_figure():

    def make():
        return draw_figure(
            "line", lambda figure: figure.add_subplot().plot([1, 2]), title="T", caption="C.", table=Table(["a"], [[1]])
        )

    figure = make()
    assert make().svg == figure.svg, "the same drawing gives the same text"
    data = re.search(r'href="data:image/svg\+xml;base64,([^"]+)"', figure.svg)[1]
    assert base64.b64decode(data).startswith(b"<?xml")


# Light and dark.


def themes():
    """Return the colour variables of each theme: light, dark, print."""
    merged = {}
    for style in (read_style(), resources.files("addnorm.report").joinpath("style.css").read_text()):
        for theme, root in zip(
            ("light", "dark", "print"), re.findall(r":root \{(.*?)\}", style, re.DOTALL), strict=False
        ):
            merged.setdefault(theme, {}).update(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", root))
    return merged


def contrast(first, other):
    def luminance(colour):
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(first), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_colours_have_enough_contrast(theme):
    colour = themes()[theme]
    assert colour["paper"] == ("#121417" if theme == "dark" else "#ffffff")
    for k in range(1, 8):
        assert contrast(colour[f"series-{k}"], colour["paper"]) >= 3
    for name in ("ink", "soft", "muted", "accent", "alarm", "proved"):
        for background in ("paper", "tint"):
            assert contrast(colour[name], colour[background]) >= 4.5, (name, background)
    if theme != "dark":
        assert [colour[f"series-{k + 1}"] for k in range(7)] == [code.lower() for code in axes.COLOURS]


# Looks of wirings


def test_explorer_has_the_same_looks():
    text = (Path(addnorm.__file__).parent / "explorer/static/chart/looks.js").read_text()
    table = re.search(r"const LOOKS = \{(.*?)\};", text, re.DOTALL)[1]
    assert {name: int(number) for name, number in re.findall(r"(\w+): (\d+)", table)} == LOOKS
    assert f"NUM_LOOKS = {NUM_LOOKS};" in text
    assert set(LOOKS) <= set(addnorm.wirings.CONSTRUCTORS)


def test_looks_of_a_chart_are_distinct():
    names = ["post_ln", "mine", "mhc", "sandwich", "post_ln", *map(str, range(6))]
    looks = choose_looks(names)
    assert len({*looks}) == len(names)
    assert (looks[0], looks[2]) == (LOOKS["post_ln"], LOOKS["mhc"])
