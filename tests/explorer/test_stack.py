"""Tests of the stack view in Chromium: moving the LayerNorm, marks and sentences, settings, pins, downloads."""

import json
import math
import re

import pytest

from addnorm.explorer import streams
from addnorm.explorer.stack import FIELDS, describe
from addnorm.lab import InitProbe
from addnorm.lab.init_probe import PLACEMENTS

TITLES = {place["name"]: place["title"] for place in describe()["placements"]}
CHARTS = ("stream", "gradient", "parameters", "ratio", "similarity", "cosine")


def assert_shows(explorer, probe, title):
    """Check that the marks equal the library's numbers to the last digit; return the numbers and the charts' summaries."""
    measured = probe.measure()
    marks, summaries = explorer.charts()
    for chart in CHARTS:
        values = [value for value in marks[chart][title] if value is not None]
        assert values == [value for value in measured[chart] if value is not None], chart
    cells = explorer.page.eval_on_selector_all(
        "#chart-map .cell[data-series]",
        "all => all.map(c => [c.dataset.series, Number(c.dataset.index), Number(c.dataset.value)])",
    )
    shares = {
        (measured["labels"][r], c): value
        for r, row in enumerate(measured["map"])
        for c, value in enumerate(row)
        if value is not None
    }
    assert {(row, column): value for row, column, value in cells} == shares
    return measured, summaries


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_stack_marks_and_sentences_equal_library(explorer, placement):
    explorer.stack(f"#v=1&place={placement}&S=12&d=16&T=5")
    probe = InitProbe(placement, sublayers=12, d_model=16, tokens=5)
    measured, summaries = assert_shows(explorer, probe, TITLES[placement])
    layers = [math.hypot(*measured["parameters"][at : at + 2]) for at in range(1, 13, 2)]
    expected = {
        "stream": measured["stream"][-1] / measured["stream"][0], "gradient": measured["gradient"][0] / measured["gradient"][-1],
        "parameters": layers[-1] / layers[0], "ratio": measured["ratio"][-1], "similarity": measured["similarity"][-1],
        "cosine": sum(measured["cosine"][1:]) / 12, "map": measured["closure"],
    }  # fmt: skip
    pattern = r"(-?[\d.]+(?:e[+-]\d+)?)(?= times| at the end| on average|\.$)"
    for chart, value in expected.items():
        assert float(re.findall(pattern, summaries[chart])[-1]) == pytest.approx(value, rel=6e-3), chart
    assert ("changes little" in summaries["gradient"]) == (abs(expected["gradient"] - 1) <= 0.1)


def test_norm_moves_by_keyboard(new_explorer):
    page = new_explorer.stack()
    assert_shows(new_explorer, InitProbe(), "post-LN")
    for _ in range(20):  # skip link, four tabs as one stop, tools, and then the chip
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('aria-label')") == "Placement of the norm":
            break
    chip = page.get_by_role("slider", name="Placement of the norm")
    assert chip.get_attribute("aria-valuetext") == "post-LN: x' = N(x + f(x))"
    new_explorer.after(lambda: page.keyboard.press("ArrowRight"))
    assert chip.get_attribute("aria-valuetext") == "pre-LN: x' = x + f(N(x))"
    assert_shows(new_explorer, InitProbe("pre"), "pre-LN")
    assert page.get_by_role("radio", name="pre-LN").is_checked(), "the radio group is in step"


def test_norm_moves_by_mouse(explorer):
    page = explorer.stack("#v=1&S=8&d=16&T=4")
    small = {"sublayers": 8, "d_model": 16, "tokens": 4}
    explorer.after(lambda: page.locator(".slot[data-place=pre] rect").click())
    assert_shows(explorer, InitProbe("pre", **small), "pre-LN")
    chip, slot = (
        page.locator(css).bounding_box() for css in (".chip[role=slider]", ".slot[data-place=reordered] rect")
    )
    page.mouse.move(chip["x"] + chip["width"] / 2, chip["y"] + chip["height"] / 2)
    page.mouse.down()
    page.mouse.move(slot["x"] + slot["width"] / 2 - 9, slot["y"] + slot["height"] / 2 + 7, steps=5)
    explorer.after(page.mouse.up)
    assert_shows(explorer, InitProbe("reordered", **small), "reordered")
    explorer.after(lambda: page.get_by_role("radio", name="sandwich").check())
    assert_shows(explorer, InitProbe("sandwich", **small), "sandwich")


def test_pinned_stack_stays(explorer):
    page = explorer.stack("#v=1&S=8&d=16&T=4")
    explorer.after(lambda: page.get_by_role("button", name="Pin", exact=True).click())
    explorer.after(lambda: page.keyboard.press("2"))
    small = {"sublayers": 8, "d_model": 16, "tokens": 4}
    post, pre = (InitProbe(name, **small).measure() for name in ("post", "pre"))
    assert explorer.charts()[0]["stream"] == {"pre-LN": pre["stream"], "post-LN": post["stream"]}
    assert page.locator("#chart-stream .plot .marks.ghost .mark").count() == 9
    verdict = page.locator(".stack-verdict").inner_text()
    factor = float(re.search(r"Compared with post-LN: the gradient at x_0 is ([\d.]+) times", verdict)[1])
    assert factor == pytest.approx(pre["gradient"][0] / post["gradient"][0], rel=6e-3)
    explorer.after(lambda: page.get_by_role("button", name="Unpin").click())
    assert page.locator("#chart-stream .plot .marks.ghost").count() == 0


def test_stack_address_holds_settings(explorer):
    page = explorer.stack()
    page.keyboard.press("2")
    page.get_by_label("Norm", exact=True).select_option("rms")
    page.get_by_label("Final norm").select_option("off")
    page.get_by_label("Residual connection").uncheck()
    values = {"Sublayers": 16, "d_model": 24, "Tokens": 3, "Weight gain": 0.5, "Residual α": 1.5, "Seed": 7}
    for label, value in values.items():
        page.get_by_role("slider", name=label, exact=True).fill(str(value))
    page.wait_for_function("() => location.hash.includes('seed=7')")
    fragment = explorer.fragment()
    settings = {"sublayers": 16, "d_model": 24, "tokens": 3, "gain": 0.5, "alpha": 1.5, "seed": 7}
    probe = InitProbe("pre", norm="rms", residual=False, final_norm=False, **settings)
    explorer.stack(fragment)
    assert explorer.fragment() == fragment
    assert_shows(explorer, probe, "pre-LN")


EXTREME = [
    "place=none&S=96&gain=3", "place=none&S=96&gain=0.1&res=0", "place=none&S=96&alpha=8&d=8", "place=pre&S=96&alpha=8",
    "S=2&d=8&T=1", "gain=0.1", "res=0", "place=deepnorm&res=0&S=96", "T=64&gain=3", "place=reordered&norm=rms&final=off",
    "place=none&res=0&gain=3&S=96&pins=place:none,gain:3,S:96;place:pre,final:on", "pins=as:first;as:first",
]  # fmt: skip


@pytest.mark.parametrize(
    "fragment",
    [
        extreme if k in (0, 1, 4, 7, 10) else pytest.param(extreme, marks=pytest.mark.slow)
        for k, extreme in enumerate(EXTREME)
    ],
)
def test_sentences_at_extreme_settings(explorer, fragment):
    page = explorer.stack(f"#v=1&{fragment}")
    sentences = page.locator(".stack-verdict p, #panel-stack figure.chart .summary").all_inner_texts()
    assert len(sentences) >= 8
    for sentence in sentences:
        assert re.fullmatch(r"\w.*\.", sentence)
        assert not re.search(r"\b(nan|inf|NaN|Infinity|undefined|null|true|false)\b|e\+02 %", sentence), sentence


def test_overflow_and_underflow_are_reported(explorer):
    page = explorer.stack("#v=1&place=none&S=96&gain=3&d=16")
    marks, summaries = explorer.charts()
    values = marks["stream"]["none"]
    assert len(values) == 97
    n_odd = sum(not math.isfinite(value) for value in values)
    assert page.locator("#chart-stream .plot .mark.odd").count() == n_odd > 0
    label = InitProbe("none", 96, 16, gain=3.0).measure()["labels"][-n_odd]
    assert summaries["stream"].startswith(f"The stream overflows at {label};")
    assert summaries["map"].startswith(f"From {label} on the stream is not finite")
    explorer.stack("#v=1&place=none&S=96&gain=0.1&res=0&d=16")
    marks, summaries = explorer.charts()
    zero = marks["stream"]["none"].index(0)
    label = InitProbe("none", 96, 16, gain=0.1, residual=False).measure()["labels"][zero]
    assert summaries["stream"] == f"The stream underflows: it is 0 from {label} on."
    assert summaries["map"].startswith(f"From {label} on the stream is 0")


def test_eight_seeds_range(explorer):
    page = explorer.stack("#v=1&S=12&d=16&T=5&seed=3")
    page.get_by_role("button", name="8 seeds").click()
    sentence = page.locator(".stack-verdict p").filter(has_text="Over seeds 0 to 7").inner_text(timeout=20_000)
    gradients = [InitProbe(sublayers=12, d_model=16, tokens=5, seed=seed).measure()["gradient"] for seed in range(8)]
    ratios = [gradient[0] / gradient[-1] for gradient in gradients]
    low, high = re.search(r"x_0 over the end: ([\d.]+) to ([\d.]+);", sentence).groups()
    assert (float(low), float(high)) == (pytest.approx(min(ratios), rel=6e-3), pytest.approx(max(ratios), rel=6e-3))
    explorer.after(lambda: page.keyboard.press("2"))
    assert "Over seeds" not in page.locator(".stack-verdict").inner_text(), "they are of another setting"
    explorer.after(lambda: page.keyboard.press("1"))
    assert "Over seeds" in page.locator(".stack-verdict").inner_text()


def test_stack_layout_on_a_phone(explorer):
    page = explorer.stack("#v=1&S=4&d=8&T=2")
    page.set_viewport_size({"width": 360, "height": 740})
    tops, touch, width = page.evaluate("""() => {
      const find = (css) => document.querySelector(css);
      const places = ['.diagram', '.stack-places', '.stack-verdict', '.stack-settings', '#chart-stream'];
      return [places.map((css) => find(css).getBoundingClientRect().top),
        ['.diagram', '.diagram .chip'].map((css) => getComputedStyle(find(css)).touchAction), document.documentElement.scrollWidth];
    }""")
    page.set_viewport_size({"width": 1280, "height": 720})
    assert tops == sorted(tops)
    assert touch == ["auto", "none"]
    assert width <= 360


def test_equal_stack_is_pinned_once(explorer):
    page = explorer.stack("#v=1&S=4&d=8&T=2")
    explorer.after(lambda: page.keyboard.press("p"))
    page.keyboard.press("p")
    assert page.get_by_role("list", name="Pinned").get_by_role("listitem").count() == 1
    assert page.get_by_role("button", name="Pin", exact=True).is_disabled()
    assert "is pinned: change a setting" in page.locator(".stack-verdict").inner_text()
    explorer.after(lambda: page.get_by_label("Residual connection").uncheck())
    assert "Compared with post-LN, with the residual:" in page.locator(".stack-verdict").inner_text()


def test_stack_cursors_are_linked(explorer):
    page = explorer.stack("#v=1&S=8&d=16&T=4&pins=place:pre,S:8,d:16,T:4")
    measured = InitProbe(sublayers=8, d_model=16, tokens=4).measure()
    cursor = page.get_by_role("slider", name="Residual stream: data cursor", exact=True)
    cursor.focus()
    for key in ("Home", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert cursor.get_attribute("aria-valuetext").startswith(f"feed-forward 1: post-LN {measured['stream'][2]:.4g}")
    page.keyboard.press("ArrowDown")
    assert cursor.get_attribute("aria-valuetext").startswith("feed-forward 1: pre-LN")
    page.keyboard.press("End")
    page.wait_for_function("() => document.querySelector('#live').textContent.startsWith('feed-forward 4')")
    assert "feed-forward 4" in page.locator("#chart-gradient .readout").inner_text()
    assert "depth=8" in explorer.fragment()


def test_cursor_sends_no_request(explorer):
    page = explorer.stack("#v=1&S=8&d=16&T=4&pins=place:pre,S:8,d:16,T:4")
    requests = []
    page.on("request", lambda request: requests.append(request.post_data_json))
    page.get_by_role("slider", name="Residual stream: data cursor", exact=True).focus()
    for key in ("Home", *["ArrowRight"] * 5):
        page.keyboard.press(key)
    assert "depth=5" in explorer.fragment()
    explorer.after(lambda: page.keyboard.press("4"))
    assert [request["placement"] for request in requests] == ["reordered"]


def test_stack_tables_and_files(explorer):
    page = explorer.stack("#v=1&S=4&d=16&T=4")
    measured = InitProbe(sublayers=4, d_model=16, tokens=4).measure()
    chart = page.locator("#chart-stream")
    chart.get_by_role("button", name="Table").click()
    cells = chart.locator("tbody td").all_inner_texts()
    assert [float(text) for text in cells] == measured["stream"]
    lines = explorer.download("CSV", "#chart-stream").splitlines()
    assert [float(line.rpartition(",")[2]) for line in lines[1:]] == measured["stream"]
    drawing = explorer.download("SVG", "#chart-stream")
    assert drawing.startswith("<svg")
    assert "var(" not in drawing, "its colours are its own"
    assert drawing.count('data-series="post-LN"') >= 5
    assert json.loads(explorer.download("JSON"))["measured"]["stream"] == measured["stream"]


def test_stack_code_computes_the_same(explorer):
    explorer.stack("#v=1&place=pre&S=4&d=16&T=4&final=off&res=0&norm=rms")
    printed, names = explorer.run_code()
    assert names["result"]["stream"] == explorer.marks("stream", "pre-LN")
    assert "feed-forward 2" in printed


def test_quick_changes_draw_the_last(explorer):
    page = explorer.stack("#v=1&S=96&d=128")
    page.evaluate("""() => {
        window.drawn = [];
        const equation = document.querySelector('.stack-equation');
        new MutationObserver(() => drawn.push(equation.textContent)).observe(equation, {childList: true, characterData: true, subtree: true});
    }""")
    # All keys at once: between two real key presses on a slow machine the view may be drawn.
    page.evaluate(
        "keys => [...keys].forEach(key => document.body.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true})))",
        "23461235",
    )
    page.wait_for_function(
        "() => document.querySelector('.stack-equation').textContent.includes('N(3.13 x')", timeout=20_000
    )
    assert len(page.evaluate("drawn")) < 5, "what was overtaken is not drawn"
    assert_shows(explorer, InitProbe("deepnorm", sublayers=96, d_model=128), "DeepNorm")


STREAMS = ("#v=1&view=streams&sS=4&sd=8", "streams", streams.FIELDS)
SLIDERS = {
    "Sublayers": ("#v=1", "stack", FIELDS), "Tokens": ("#v=1", "stack", FIELDS), "Weight gain": ("#v=1", "stack", FIELDS),
    "Perturbation": STREAMS, "Streams n": STREAMS, "d_model": STREAMS,
}  # fmt: skip


@pytest.mark.parametrize("label", SLIDERS)
def test_slider_bounds_equal_server(explorer, label):
    address, view, fields = SLIDERS[label]
    field = fields[{"Weight gain": "gain", "Streams n": "n"}.get(label, label.lower())]
    slider = explorer.show(address, view).get_by_role("slider", name=label, exact=True)
    assert [float(slider.get_attribute(name)) for name in ("min", "max")] == [field.minimum, field.maximum]
