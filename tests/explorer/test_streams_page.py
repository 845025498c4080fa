"""Tests of the streams view: its data, and in Chromium the path, marks and cells, settings, the cursor, code, narrow pages."""

import re

import pytest

from addnorm import wirings
from addnorm.explorer.streams import FIELDS, STEPS, compute, describe, parse
from addnorm.lab import StreamsProbe
from addnorm.lab.streams_probe import PROBED
from support.browser import drawn

SMALL, SIZES = "#v=1&view=streams&sS=4&sd=8", {"sublayers": 4, "d_model": 8}


@pytest.mark.parametrize("wiring", PROBED)
def test_only_growing_wirings_keep_states(wiring):
    result = compute(parse({"wiring": wiring, **SIZES}))
    assert result["keeps_states"] == (wiring in ("attention_residuals", "denseformer", "muddformer"))
    assert all(("mix" in site) != result["keeps_states"] for site in result["coefficients"]["sites"])
    assert len(result["sources"]) == len(result["streams"][-1]) == len(result["coefficients"]["head"])
    if wiring == "attention_residuals":
        assert result["sources"] == result["labels"]
    if wiring == "denseformer":
        assert result["sources"] == ["x_0", "attention 1", "attention 2"], "each state begins in a layer's attention"


def test_description_has_the_wirings_settings():
    described = describe()["wirings"]
    assert [name for name in PROBED if not described[name]["is_learned"]] == [
        "pre_ln", "reversible", "resi_dual", "siamese_norm",
    ]  # fmt: skip
    assert {name for name in PROBED if described[name]["has_n"]} == {
        "hyper_connections", "mhc", "independent_hc", "gated_residual",
    }  # fmt: skip
    assert described["pre_ln"]["equation"] == wirings.pre_ln().equation()


# The page.


def by_sublayer(sites):
    """Return the cells of A, B and C: {entry: values}."""
    cells = {}
    for site in sites:
        entries = {f"C {j + 1}": value for j, value in enumerate(site["collapse"][0])}
        entries |= {f"B {i + 1}": value for i, value in enumerate(site["inject"])}
        entries |= {f"A {i + 1}{j + 1}": value for i, row in enumerate(site["mix"]) for j, value in enumerate(row)}
        for name, value in entries.items():
            cells.setdefault(name, []).append(value)
    return cells


def series_of(places):
    """Return {series: values} of the streams at each place."""
    streams = [list(values) for values in zip(*places, strict=True)]
    return {f"stream {j + 1}" if len(streams) > 1 else "the stream": values for j, values in enumerate(streams)}


@pytest.mark.parametrize("wiring", ["pre_ln", "reversible", "hyper_connections"])
def test_mixed_streams_equal_library(explorer, wiring):
    page = explorer.show(f"{SMALL}&swiring={wiring}&sn=3&moved=0.5", "streams")
    expected = StreamsProbe(wiring, 4, 8, 3, perturbation=0.5).measure()
    marks, summaries = explorer.charts()
    coefficients, gains = expected["coefficients"], expected.get("gains") if wiring == "hyper_connections" else None
    assert marks["streams-sizes"] == series_of(expected["streams"])
    assert marks["streams-gradients"] == series_of(expected["gradients"])
    assert marks["streams-paths"]["direct path"] == [abs(value) for value in coefficients["direct_path"]]
    assert marks["streams-paths"]["full gradient"] == expected["write_gradients"]
    assert marks["streams-coefficients"] == by_sublayer(coefficients["sites"])
    assert page.locator("#chart-streams-sources").is_hidden()
    assert marks.get("streams-gains") == (gains and {
        f"{title}, {direction}": [None, *gains[name][direction]]
        for title, name in (("hyper-connections", "hyper_connections"), ("mHC", "mhc"))
        for direction in ("forward", "backward")
    })  # fmt: skip
    if gains:
        factor = re.search(r"by up to ([\d.e+]+) forward", summaries["streams-gains"])[1]
        assert float(factor) == pytest.approx(gains["hyper_connections"]["forward"][-1], rel=6e-3)


def test_attention_weights_equal_library(explorer):
    page = explorer.show(f"{SMALL}&swiring=attention_residuals&moved=0.9", "streams")
    expected = StreamsProbe("attention_residuals", 4, 8, perturbation=0.9).measure()
    reads = [*(site["collapse"][0] for site in expected["coefficients"]["sites"]), expected["coefficients"]["head"]]
    columns = [[None] * len(reads), *(read + [None] * (len(reads) - len(read)) for read in reads)]
    rows = map(drawn, zip(*columns, strict=True))
    assert explorer.charts()[0]["streams-sources"] == dict(zip(expected["labels"], rows, strict=True))
    assert explorer.marks("streams-sizes", "read") == [None, *expected["reads"][:-1]]
    assert page.locator("#chart-streams-coefficients").is_hidden()


def test_path_is_walked_by_keyboard(explorer):
    page = explorer.stack("#v=1&S=4&d=8&T=2")
    explorer.click("Next: several streams")
    assert page.get_by_role("tab", selected=True).inner_text() == "Streams"
    page = explorer.show(SMALL, "streams")
    titles, title, following = [], page.locator(".streams-step h3"), page.get_by_role("button", name="Next step")
    for _ in STEPS[1:]:
        titles.append(title.inner_text())
        explorer.after(following.press, "Enter", view="streams")
    assert [*titles, title.inner_text()] == [f"{k + 1}. {step.title}" for k, step in enumerate(STEPS)]
    assert following.is_disabled()
    explorer.after(page.keyboard.press, "4", view="streams")
    assert page.get_by_role("radio", name="mHC").is_checked()
    explorer.after(page.get_by_label("More wirings").select_option, "resi_dual", view="streams")
    assert title.inner_text() == "resi_dual"
    assert page.get_by_role("slider", name="Perturbation").is_disabled()
    explorer.after(explorer.click, "First step", view="streams")
    assert page.get_by_role("radio", name="pre-LN").is_checked()


def test_identical_streams_are_pointed_out(explorer):
    page = explorer.show(f"{SMALL}&swiring=mhc&moved=0", "streams")
    verdict = page.locator(".streams-verdict")
    assert verdict.inner_text().startswith("All streams are identical copies, as before training")
    assert "by no more than round-off" in verdict.inner_text()
    explorer.after(page.get_by_role("slider", name="Perturbation").fill, "0.5", view="streams")
    numbers = re.search(r"up to ([\d.]+) of their size.*by ([\d.]+) of its norm", verdict.inner_text(), re.S).groups()
    expected = StreamsProbe("mhc", 4, 8, perturbation=0.5).measure()
    assert [*map(float, numbers)] == pytest.approx([expected["distance"], expected["difference"]], rel=6e-3)


def test_cursor_reads_every_coefficient(explorer):
    page = explorer.show(f"{SMALL}&swiring=mhc&sn=2&moved=0.5", "streams")
    site = StreamsProbe("mhc", 4, 8, 2, perturbation=0.5).measure()["coefficients"]["sites"][1]
    slider = page.get_by_role("slider", name="A, B and C of each sublayer: data cursor")
    for key in ("Home", "ArrowRight"):
        slider.press(key)
    said = []
    for _ in range(8):
        said.append(slider.get_attribute("aria-valuetext").rsplit(": ", 1))
        slider.press("ArrowDown")
    assert slider.get_attribute("aria-valuetext").rsplit(": ", 1) == said[0], (
        "after the last entry the first comes again"
    )
    read, (first, second), (to_first, to_second) = site["collapse"][0], site["mix"], site["inject"]
    assert [float(value) for _, value in said] == pytest.approx([*read, *first, *second, *site["inject"]], rel=1e-3)
    assert said[3][0] == "feed-forward 1: A, new stream 1 from old stream 2"
    shown = [float(text) for text in page.locator(".streams-numbers td.number").all_inner_texts()]
    assert shown == pytest.approx([*read, *first, to_first, *second, to_second], rel=6e-3)
    assert "sdepth=2" in explorer.fragment()
    cell = page.locator("#chart-streams-coefficients .cell[data-series='B 2'][data-index='3']").bounding_box()
    page.mouse.move(cell["x"] + cell["width"] / 2, cell["y"] + cell["height"] / 2)
    assert slider.get_attribute("aria-valuetext").startswith("feed-forward 2: B, write to stream 2: ")


def test_streams_controls_set_the_params(explorer):
    page = explorer.show(SMALL, "streams")
    page.keyboard.press("3")
    labels = {"n": "Streams n", "d_model": "d_model"}
    values = {"perturbation": 0.8, "n": 2, "sublayers": 6, "d_model": 16, "seed": 7}
    explorer.set_sliders(FIELDS, labels, values)
    page.wait_for_function("() => location.hash.includes('sseed=7')")
    explorer.show(explorer.fragment(), "streams")
    expected = StreamsProbe("hyper_connections", **values).measure()
    assert explorer.charts()[0]["streams-sizes"] == series_of(expected["streams"])
    printed, names = explorer.run_code()
    assert names["result"]["write_gradients"] == explorer.marks("streams-paths", "full gradient")
    assert "feed-forward 2" in printed


def test_many_coefficients_fit_a_phone(explorer):
    page = explorer.show(f"{SMALL}&swiring=mhc&sS=24", "streams")
    page.set_viewport_size({"width": 400, "height": 800})
    page.wait_for_function("() => document.documentElement.scrollWidth <= 400")
    page.wait_for_function(
        "() => document.querySelector('#chart-streams-coefficients .cell').getBoundingClientRect().width >= 5.9"
    )
    assert page.locator(".streams-numbers").evaluate("one => one.scrollWidth <= one.clientWidth"), "all numbers fit"
    page.set_viewport_size({"width": 1280, "height": 720})
