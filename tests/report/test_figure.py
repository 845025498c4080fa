"""Tests of `addnorm.report.figure`: colours, ids, determinism, contrast."""

import re
from importlib import resources
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

import matplotlib

from addnorm.report import Table, draw_figure
from addnorm.report.figure import COLOUR_VARIABLES, to_unicode
from addnorm.stream.record import axes
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import RecordedSite

TABLE = Table(["sublayer", "value"], [["1", 0.5]])
TEXTS = {"title": "A title", "caption": "A caption.", "table": TABLE}


def recording(value=lambda k: 1.0 + k):
    kinds = ("attention", "feed-forward")
    rec = Recording([RecordedSite(f"layers.{k}", "", kinds[k % 2], k // 2) for k in range(4)], {"model": "Toy"})
    for k in range(4):
        for role, statistic in (("out", "rms"), ("out", "max"), ("write", "ratio"), ("write", "cosine")):
            rec.add(0, k, role, statistic, value(k))
    return rec


def stream(name="stream", rec=None):
    rec = rec or recording()
    return draw_figure(name, lambda figure: rec.plot.stream(ax=figure.add_subplot()), **TEXTS)


@pytest.fixture(scope="module")
def figure():
    """Return the drawing of a stream."""
    return stream()


def heat_map(n):
    rec = recording()
    rec.memory_maps = {"stream": ([f"s{k}" for k in range(n)], [[1 / n] * n] * n)}
    return draw_figure("map", lambda figure: rec.plot.memory_map(ax=figure.add_subplot()), **TEXTS)


def colours(svg):
    return {*re.findall(r"#[0-9a-fA-F]{6}\b", svg)}


def test_drawing_uses_only_page_colours():
    figure = stream(rec=recording(lambda k: float("nan") if k == 2 else 1.0 + k))
    for svg in (figure.svg, figure.narrow):
        assert colours(svg) == set()
        used = {*re.findall(r"var\((--[\w-]+)\)", svg)}
        assert {"--series-1", "--series-2", "--ink", "--muted", "--grid", "--paper", "--font", "--alarm"} == used


def test_every_plot_colour_is_a_variable():
    assert {colour.lower() for colour in (*axes.COLOURS, axes.GREY, axes.ALARM)} <= {*COLOUR_VARIABLES}


def test_drawing_is_an_svg_element_without_prolog(figure):
    root = ElementTree.fromstring(figure.svg)
    assert root.attrib.keys() == {"class", "viewBox", "role", "aria-label"}
    assert root.get("aria-label") == "A title. A caption."
    assert (root.get("class"), ElementTree.fromstring(figure.narrow).get("class")) == ("chart wide", "chart narrow")
    assert not {element.tag for element in root.iter()} & {"metadata", "title", "style", "script", "image"}
    for word in ("<?xml", "<!DOCTYPE", "http", "xlink", "DejaVu", "A title</text>", "The residual stream by depth"):
        assert word not in figure.svg
    assert {"rms", "max", "attention", "depth in sublayers", "4"} <= {element.text for element in root.iter("text")}


def test_drawings_share_no_ids(figure):
    ids = []
    for name, drawing in (("stream", figure), ("two", stream("two"))):
        for svg in (drawing.svg, drawing.narrow):
            own = re.findall(r' id="([^"]+)"', svg)
            assert own
            assert all(own_id.startswith(f"{name}-") for own_id in own)
            assert {*re.findall(r"#([\w-]+)", svg)} == {*own}  # and no id without a reference to it
            ids += own
    assert len(ids) == len({*ids})


def test_drawing_is_deterministic_and_keeps_settings(figure):
    before = dict(matplotlib.rcParams)
    assert stream() == figure
    assert dict(matplotlib.rcParams) == before


def test_large_heat_maps_are_rasterized():
    small, large = heat_map(12).svg, heat_map(40).svg
    assert "fill: var(--series-1); fill-opacity:" in small, "a map follows the theme"
    assert (small.count("<image"), large.count("<image")) == (0, 1)
    assert {*re.findall(r'href="(data:image/png;base64,|#)', large)} == {"data:image/png;base64,", "#"}


def test_map_numbers_keep_readable_ink():
    svg = heat_map(3).svg
    fills = {
        re.search(r"fill: ([^;]+)", element.get("style"))[1] for element in ElementTree.fromstring(svg).iter("text")
    }
    assert fills == {"var(--ink)", "var(--paper)"}, "dark numbers on pale cells, and the reverse, in both themes"


def test_small_numbers_have_no_axis_factor():
    svg = stream(rec=recording(lambda k: 1e-6 * (k + 5))).svg
    texts = [element.text for element in ElementTree.fromstring(svg).iter("text")]
    assert "2e−6" in texts
    assert texts.count("1e−6") == 1  # a tick's


def test_mathtext_becomes_unicode():
    assert [to_unicode(text) for text in ("$x_0$", "$10^{-2}$", "$10^{3}$", "5", "")] == ["x₀", "10⁻²", "10³", "5", ""]
    svg = stream(rec=recording(lambda k: 10.0 ** (-2 * k))).svg
    assert "10⁻⁴" in svg
    assert "$" not in svg


def test_draw_figure_refuses_invalid_names():
    with pytest.raises(ValueError, match="name is 'a b', expected letters"):
        stream("a b")


def test_missing_matplotlib_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(
        ImportError, match=r"matplotlib is not installed, and is needed to draw: pip install 'addnorm\[plot\]'"
    ):
        stream(rec=recording())


# Light and dark.


def themes():
    """Return the colour variables of each theme of style.css; print is the third."""
    style = resources.files("addnorm.report").joinpath("style.css").read_text()
    roots = re.findall(r":root \{(.*?)\}", style, re.S)
    assert len(roots) == 3
    assert "(prefers-color-scheme: dark)" in style
    return dict(
        zip(
            ("light", "dark", "print"),
            (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", root)) for root in roots),
            strict=True,
        )
    )


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
