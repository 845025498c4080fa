"""Tests of the streams view in Chromium: the path, marks and cells, settings, the cursor, code, narrow pages."""

import re

import pytest

from addnorm.explorer.streams import STEPS, compute, parse
from addnorm.lab import StreamsProbe

SMALL = "#v=1&view=streams&sS=4&sd=8"
CELLS = """id => [...document.querySelectorAll(`#chart-streams-${id} .cell[data-series]`)].map(
  (cell) => [cell.dataset.series, Number(cell.dataset.index), Number(cell.dataset.value)])"""


def expected_cells(sites):
    """Return {(entry, sublayer): value} of A, B and C."""
    cells = {}
    for k, site in enumerate(sites):
        cells |= {(f"C {j + 1}", k): value for j, value in enumerate(site["collapse"][0])}
        cells |= {(f"B {i + 1}", k): value for i, value in enumerate(site["inject"])}
        cells |= {(f"A {i + 1}{j + 1}", k): value for i, row in enumerate(site["mix"]) for j, value in enumerate(row)}
    return cells


def series_of(places):
    """Return {series: values} of the streams at each place."""
    streams = [list(values) for values in zip(*places, strict=True)]
    return {f"stream {j + 1}" if len(streams) > 1 else "the stream": values for j, values in enumerate(streams)}


@pytest.mark.parametrize("wiring", ["pre_ln", "reversible", "hyper_connections"])
def test_mixed_streams_equal_library(explorer, wiring):
    page = explorer.show(f"{SMALL}&swiring={wiring}&sn=3&moved=0.5", "streams")
    expected = compute(parse({"wiring": wiring, "sublayers": 4, "d_model": 8, "n": 3, "perturbation": 0.5}))
    marks, summaries = explorer.charts()
    assert marks["streams-sizes"] == series_of(expected["streams"])
    assert marks["streams-gradients"] == series_of(expected["gradients"])
    paths = marks["streams-paths"]
    assert paths["direct path"] == [abs(value) for value in expected["coefficients"]["direct_path"]]
    assert paths["full gradient"] == expected["write_gradients"]
    cells = {(name, k): value for name, k, value in page.evaluate(CELLS, "coefficients")}
    assert cells == expected_cells(expected["coefficients"]["sites"])
    assert page.locator("#chart-streams-sources").is_hidden()
    if wiring != "hyper_connections":
        assert "streams-gains" not in summaries
        return
    gains = expected["gains"]
    assert marks["streams-gains"] == {
        f"{title}, {direction}": [None, *gains[name][direction]]
        for title, name in (("hyper-connections", "hyper_connections"), ("mHC", "mhc"))
        for direction in ("forward", "backward")
    }
    factor = re.search(r"by up to ([\d.e+]+) forward", summaries["streams-gains"])[1]
    assert float(factor) == pytest.approx(gains["hyper_connections"]["forward"][-1], rel=6e-3)


def test_attention_weights_equal_library(explorer):
    page = explorer.show(f"{SMALL}&swiring=attention_residuals&moved=0.9", "streams")
    expected = StreamsProbe("attention_residuals", 4, 8, perturbation=0.9).measure()
    coefficients = expected["coefficients"]
    reads = [*(site["collapse"][0] for site in coefficients["sites"]), coefficients["head"]]
    cells = {(name, k): value for name, k, value in page.evaluate(CELLS, "sources")}
    assert cells == {
        (expected["labels"][j], k + 1): value for k, read in enumerate(reads) for j, value in enumerate(read)
    }
    assert explorer.marks("streams-sizes", "read") == [None, *expected["reads"][:-1]]
    assert page.locator("#chart-streams-coefficients").is_hidden()


def test_path_is_walked_by_keyboard(explorer):
    page = explorer.show(SMALL, "streams")
    titles = []
    page.get_by_role("button", name="Next step").focus()
    for k in range(len(STEPS)):
        titles.append(page.locator(".streams-step h3").inner_text())
        if k + 1 < len(STEPS):
            explorer.after(lambda: page.keyboard.press("Enter"), "streams")
    assert titles == [f"{k + 1}. {step.title}" for k, step in enumerate(STEPS)]
    assert page.get_by_role("button", name="Next step").is_disabled()
    explorer.after(lambda: page.keyboard.press("4"), "streams")
    assert page.get_by_role("radio", name="mHC").is_checked()
    explorer.after(lambda: page.get_by_label("More wirings").select_option("resi_dual"), "streams")
    assert page.locator(".streams-step h3").inner_text() == "resi_dual"
    assert page.get_by_role("slider", name="Perturbation").is_disabled()
    explorer.after(lambda: page.get_by_role("button", name="First step").click(), "streams")
    assert page.get_by_role("radio", name="pre-LN").is_checked()


def test_identical_streams_are_pointed_out(explorer):
    page = explorer.show(f"{SMALL}&swiring=mhc&moved=0", "streams")
    verdict = page.locator(".streams-verdict")
    assert verdict.inner_text().startswith("All streams are identical copies, as before training")
    assert "by no more than round-off" in verdict.inner_text()
    explorer.after(lambda: page.get_by_role("slider", name="Perturbation").fill("0.5"), "streams")
    distance = float(re.search(r"up to ([\d.]+) of their size", verdict.inner_text())[1])
    expected = StreamsProbe("mhc", 4, 8, perturbation=0.5).measure()
    assert distance == pytest.approx(expected["distance"], rel=6e-3)
    difference = float(re.search(r"by ([\d.]+) of its norm", verdict.inner_text())[1])
    assert difference == pytest.approx(expected["difference"], rel=6e-3)


def test_cursor_reads_every_coefficient(explorer):
    page = explorer.show(f"{SMALL}&swiring=mhc&sn=2&moved=0.5", "streams")
    site = StreamsProbe("mhc", 4, 8, 2, perturbation=0.5).measure()["coefficients"]["sites"][1]
    slider = page.get_by_role("slider", name="A, B and C of each sublayer: data cursor")
    slider.focus()
    for key in ("Home", "ArrowRight"):
        page.keyboard.press(key)
    said = []
    for _ in range(8):
        said.append(slider.get_attribute("aria-valuetext"))
        page.keyboard.press("ArrowDown")
    assert slider.get_attribute("aria-valuetext") == said[0], "after the last entry the first comes again"
    values = [*site["collapse"][0], *site["mix"][0], *site["mix"][1], *site["inject"]]
    assert [float(text.rsplit(": ", 1)[1]) for text in said] == pytest.approx(values, rel=1e-3)
    assert said[3] == f"feed-forward 1: A, new stream 1 from old stream 2: {said[3].rsplit(': ', 1)[1]}"
    table = page.locator(".streams-numbers")
    assert table.locator("caption").inner_text() == "feed-forward 1: the numbers"
    assert [float(text) for text in table.locator("td.number").all_inner_texts()] == pytest.approx(
        [*site["collapse"][0], *site["mix"][0], site["inject"][0], *site["mix"][1], site["inject"][1]], rel=6e-3
    )
    assert "sdepth=2" in explorer.fragment()
    sizes = page.get_by_role("slider", name="Size of the streams: data cursor")
    assert sizes.get_attribute("aria-valuetext").startswith("feed-forward 1: "), "the charts share the cursor"
    cell = page.locator("#chart-streams-coefficients .cell[data-series='B 2'][data-index='3']").bounding_box()
    page.mouse.move(cell["x"] + cell["width"] / 2, cell["y"] + cell["height"] / 2)
    assert slider.get_attribute("aria-valuetext").startswith("feed-forward 2: B, write to stream 2: ")


def test_streams_address_holds_settings(explorer):
    page = explorer.show(SMALL, "streams")
    page.keyboard.press("3")
    values = {"Perturbation": 0.8, "Streams n": 2, "Sublayers": 6, "d_model": 16, "Seed": 7}
    for label, value in values.items():
        page.get_by_role("slider", name=label, exact=True).fill(str(value))
    page.wait_for_function("() => location.hash.includes('sseed=7')")
    fragment = explorer.fragment()
    explorer.show(fragment, "streams")
    assert explorer.fragment() == fragment
    expected = StreamsProbe("hyper_connections", 6, 16, 2, 7, 0.8).measure()
    assert explorer.charts()[0]["streams-sizes"] == series_of(expected["streams"])


def test_streams_code_computes_the_same(explorer):
    explorer.show(f"{SMALL}&swiring=hyper_connections&moved=0.4", "streams")
    printed, names = explorer.run_code()
    assert names["result"]["write_gradients"] == explorer.marks("streams-paths", "full gradient")
    assert "feed-forward 2" in printed


def test_streams_on_a_phone(explorer):
    page = explorer.show(f"{SMALL}&swiring=mhc&sS=24", "streams")
    page.set_viewport_size({"width": 400, "height": 800})
    page.wait_for_function("() => document.documentElement.scrollWidth <= 400")
    page.wait_for_function(
        "() => document.querySelector('#chart-streams-coefficients .cell').getBoundingClientRect().width >= 5.9"
    )
    tops = page.evaluate("""['.streams-path', '.streams-step', '.streams-verdict', '.streams-settings', '#chart-streams-coefficients']
      .map((css) => document.querySelector(css).getBoundingClientRect().top)""")
    assert tops == sorted(tops)
    table = page.locator(".streams-numbers")
    assert table.evaluate("one => one.scrollWidth <= one.clientWidth"), "all numbers fit"
    page.set_viewport_size({"width": 1280, "height": 720})


def test_stack_view_leads_to_streams(explorer):
    page = explorer.stack("#v=1&S=4&d=8&T=2")
    page.get_by_role("button", name="Next: several streams").click()
    assert page.get_by_role("tab", selected=True).inner_text() == "Streams"
    assert page.get_by_role("heading", level=2, name="From one residual stream to several").is_visible()
