"""Tests of the stack view in Chromium: moving the LayerNorm, marks and sentences, settings, pins."""

import json
import math
import re

import pytest

from addnorm.explorer.stack import FIELDS, describe
from addnorm.lab import InitProbe
from addnorm.lab.init_probe import PLACEMENTS
from support.browser import drawn

TITLES = {place["name"]: place["title"] for place in describe()["placements"]}
CHARTS = ("stream", "gradient", "parameters", "ratio", "similarity", "cosine")
SMALL, SIZES = "#v=1&S=8&d=16&T=4", {"sublayers": 8, "d_model": 16, "tokens": 4}


def assert_shows(explorer, probe):
    """Check that the marks equal the library's numbers to the last digit; return the numbers and the charts' summaries."""
    measured = probe.measure()
    marks, summaries = explorer.charts()
    for chart in CHARTS:
        assert marks[chart][TITLES[probe.placement]] == drawn(measured[chart]), chart
    shares = zip(measured["labels"], measured["map"], strict=True)
    assert marks["map"] == {label: drawn(row) for label, row in shares if drawn(row)}
    return measured, summaries


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_stack_marks_and_sentences_equal_library(explorer, placement):
    explorer.stack(f"#v=1&place={placement}&S=12&d=16&T=5")
    measured, summaries = assert_shows(explorer, InitProbe(placement, sublayers=12, d_model=16, tokens=5))
    layers = [math.hypot(*measured["parameters"][at : at + 2]) for at in range(1, 13, 2)]
    expected = {
        "stream": measured["stream"][-1] / measured["stream"][0], "gradient": measured["gradient"][0] / measured["gradient"][-1],
        "parameters": layers[-1] / layers[0], "ratio": measured["ratio"][-1], "similarity": measured["similarity"][-1],
        "cosine": sum(measured["cosine"][1:]) / 12, "map": measured["closure"],
    }  # fmt: skip
    pattern = r"(-?[\d.]+(?:e[+-]\d+)?)(?= times| at the end| on average|\.$)"
    for chart, value in expected.items():
        assert float(re.findall(pattern, summaries[chart])[-1]) == pytest.approx(value, rel=6e-3), chart
    slopes = float(re.search(r"slopes, has the factor (\S+)\. ", summaries["gradient"])[1])
    assert slopes == pytest.approx(measured["direct_path"][0], rel=6e-3, abs=1e-12)
    assert ("changes little" in summaries["gradient"]) == (abs(expected["gradient"] - 1) <= 0.1)


def test_norm_moves_by_keyboard(explorer):
    page = explorer.stack(SMALL)
    chip = page.get_by_role("slider", name="Placement of the norm")
    assert chip.get_attribute("aria-valuetext") == "post-LN: x' = N(x + f(x))"
    explorer.after(chip.press, "ArrowRight")
    assert chip.get_attribute("aria-valuetext") == "pre-LN: x' = x + f(N(x))"
    assert page.get_by_role("radio", name="pre-LN").is_checked(), "the radio group is in step"
    assert_shows(explorer, InitProbe("pre", **SIZES))


def test_flip_leaves_the_earlier_curve_and_redraws_the_bus(explorer):
    page = explorer.stack("#v=1&S=4&d=8&T=2")
    bus, before = page.locator(".bus"), page.locator("#chart-gradient .before")
    curve = page.locator("#chart-gradient .plot .line").get_attribute("d")
    assert (bus.locator(".bus-norm").count(), before.locator("path").count()) == (4, 0)
    explorer.after(page.keyboard.press, "2")
    assert (bus.locator(".bus-norm").count(), before.locator("text").inner_html()) == (5, "post-LN, before")
    assert before.locator("path").get_attribute("d").count("L") == curve.count("L") == 4
    explorer.after(explorer.click, "Pin")
    assert before.locator("path").count() == 0, "pinned stacks take its place"


def test_norm_moves_by_mouse(explorer):
    page = explorer.stack(SMALL)
    explorer.after(page.locator(".slot[data-place=pre] rect").click)
    assert_shows(explorer, InitProbe("pre", **SIZES))
    chip = page.locator(".chip[role=slider]")
    assert chip.evaluate("one => getComputedStyle(one).touchAction") == "none", "a finger drags it and does not scroll"
    start, end = (one.bounding_box() for one in (chip, page.locator(".slot[data-place=reordered] rect")))
    page.mouse.move(start["x"] + start["width"] / 2, start["y"] + start["height"] / 2)
    page.mouse.down()
    page.mouse.move(end["x"] + end["width"] / 2 - 9, end["y"] + end["height"] / 2 + 7, steps=5)
    explorer.after(page.mouse.up)
    assert_shows(explorer, InitProbe("reordered", **SIZES))


def test_stack_controls_set_the_params(explorer):
    page = explorer.stack("#v=1&place=pre")
    page.get_by_label("Norm", exact=True).select_option("rms")
    page.get_by_label("Final norm").select_option("off")
    page.get_by_label("Residual connection").uncheck()
    labels = {"gain": "Weight gain", "alpha": "Residual α", "d_model": "d_model"}
    values = {"sublayers": 16, "d_model": 24, "tokens": 3, "gain": 0.5, "alpha": 1.5, "seed": 7}
    explorer.set_sliders(FIELDS, labels, values)
    page.wait_for_function("() => location.hash.includes('seed=7')")
    explorer.stack(explorer.fragment())
    assert_shows(explorer, InitProbe("pre", norm="rms", residual=False, final_norm=False, **values))


def test_pinned_stack_stays(explorer):
    page = explorer.stack(SMALL)
    pin, ghosts = (
        page.get_by_role("button", name="Pin", exact=True),
        page.locator("#chart-stream .plot .marks.ghost .mark"),
    )
    explorer.after(pin.click)
    assert pin.is_disabled(), "an equal stack is pinned once"
    explorer.after(page.keyboard.press, "2")
    post, pre = (InitProbe(name, **SIZES).measure() for name in ("post", "pre"))
    assert explorer.charts()[0]["stream"] == {"pre-LN": pre["stream"], "post-LN": post["stream"]}
    assert ghosts.count() == 9
    verdict = explorer.read(".stack-verdict")
    factor = float(re.search(r"Compared with post-LN: the gradient at x_0 is ([\d.]+) times", verdict)[1])
    assert factor == pytest.approx(pre["gradient"][0] / post["gradient"][0], rel=6e-3)
    explorer.after(explorer.click, "Unpin")
    assert ghosts.count() == 0


EXTREME = [
    "place=none&S=96&gain=3", "place=none&S=96&gain=0.1&res=0", "T=64&gain=3&place=pre&alpha=8", "S=2&d=8&T=1",
    "place=none&res=0&gain=3&S=96&pins=place:none,gain:3,S:96;place:pre,final:on",
]  # fmt: skip


@pytest.mark.parametrize("fragment", EXTREME)
def test_sentences_at_extreme_settings(explorer, fragment):
    page = explorer.stack(f"#v=1&{fragment}")
    sentences = page.locator(".stack-verdict p, #panel-stack figure.chart .summary").all_inner_texts()
    assert len(sentences) >= 8
    for sentence in sentences:
        assert re.fullmatch(r"\w.*\.", sentence)
        assert not re.search(r"\b(nan|inf|NaN|Infinity|undefined|null|true|false)\b|e\+02%", sentence), sentence


def test_overflow_and_underflow_are_reported(explorer):
    page = explorer.stack("#v=1&place=none&S=96&gain=3&d=16")
    marks, summaries = explorer.charts()
    n_odd = sum(not math.isfinite(value) for value in marks["stream"]["none"])
    assert page.locator("#chart-stream .plot .mark.odd").count() == n_odd > 0
    label = InitProbe("none", 96, 16, gain=3.0).measure()["labels"][-n_odd]
    assert summaries["stream"].startswith(f"The stream overflows at {label};")
    assert summaries["map"].startswith(f"From {label} on the stream is not finite")
    explorer.stack("#v=1&place=none&S=96&gain=0.1&res=0&d=16")
    marks, summaries = explorer.charts()
    label = InitProbe("none", 96, 16).measure()["labels"][marks["stream"]["none"].index(0)]
    assert summaries["stream"] == f"The stream underflows: it is 0 from {label} on."
    assert summaries["map"].startswith(f"From {label} on the stream is 0")


def test_eight_seeds_range(explorer):
    page = explorer.stack(f"{SMALL}&seed=3")
    explorer.click("8 seeds")
    over = page.locator(".stack-verdict p").filter(has_text="Over seeds 0 to 7")
    shown = re.search(r"x_0 over the end: ([\d.]+) to ([\d.]+);", over.inner_text(timeout=20_000)).groups()
    gradients = [InitProbe(**SIZES, seed=seed).measure()["gradient"] for seed in range(8)]
    ratios = sorted(gradient[0] / gradient[-1] for gradient in gradients)
    assert [*map(float, shown)] == pytest.approx([ratios[0], ratios[-1]], rel=6e-3)
    for key, is_shown in (("2", False), ("1", True)):
        explorer.after(page.keyboard.press, key)
        assert over.is_visible() == is_shown, "they are of one setting"


def test_stack_code_and_json_have_the_numbers(explorer):
    explorer.stack("#v=1&place=pre&S=4&d=16&T=4&final=off&res=0&norm=rms")
    printed, names = explorer.run_code()
    values = explorer.marks("stream", "pre-LN")
    assert names["result"]["stream"] == values
    assert "feed-forward 2" in printed
    assert json.loads(explorer.download("JSON"))["measured"]["stream"] == values


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
    assert_shows(explorer, InitProbe("deepnorm", sublayers=96, d_model=128))
