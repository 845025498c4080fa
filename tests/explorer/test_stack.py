"""Tests of the stack view in Chromium: moving the LayerNorm, marks and sentences, address, pins, downloads."""

import json
import math
import re

import pytest

from addnorm.explorer.stack import FIELDS, describe
from addnorm.lab import InitProbe
from addnorm.lab.init_probe import PLACEMENTS

TITLES = {place["name"]: place["title"] for place in describe()["placements"]}
CHARTS = ("stream", "gradient", "parameters", "ratio", "similarity", "cosine")


def assert_shows(explorer, flip, title, charts=CHARTS):
    """Check that the marks equal the library's numbers to the last digit."""
    found = flip.measure()
    for chart in charts:
        marks = [value for value in explorer.marks(chart, title) if value is not None]
        assert marks == [value for value in found[chart] if value is not None], chart
    cells = explorer.page.eval_on_selector_all(
        "#chart-map .cell[data-series]",
        "all => all.map(c => [c.dataset.series, Number(c.dataset.index), Number(c.dataset.value)])",
    )
    shares = {
        (found["labels"][r], c): value
        for r, row in enumerate(found["map"])
        for c, value in enumerate(row)
        if value is not None
    }
    assert {(row, column): value for row, column, value in cells} == shares


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_stack_marks_and_sentences_equal_library(looked, placement):
    looked.look(f"#v=1&place={placement}&S=12&d=16&T=5")
    assert_shows(looked, InitProbe(placement, sublayers=12, d_model=16, tokens=5), TITLES[placement])
    found = InitProbe(placement, sublayers=12, d_model=16, tokens=5).measure()
    layers = [math.hypot(*found["parameters"][at : at + 2]) for at in range(1, 13, 2)]
    wanted = {
        "stream": found["stream"][-1] / found["stream"][0], "gradient": found["gradient"][0] / found["gradient"][-1],
        "parameters": layers[-1] / layers[0], "ratio": found["ratio"][-1], "similarity": found["similarity"][-1],
        "cosine": sum(found["cosine"][1:]) / 12, "map": found["closure"],
    }  # fmt: skip
    pattern = r"(-?[\d.]+(?:e[+-]\d+)?)(?= times| at the end| on average|\.$)"
    for chart, value in wanted.items():
        assert float(re.findall(pattern, summary(looked, chart))[-1]) == pytest.approx(value, rel=6e-3), chart
    assert ("changes little" in summary(looked, "gradient")) == (abs(wanted["gradient"] - 1) <= 0.1)


def test_norm_moves_by_keyboard(explorer):
    page = explorer.stack()
    assert_shows(explorer, InitProbe(), "post-LN")
    for _ in range(20):  # skip link, four tabs as one stop, tools, and then the chip
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('aria-label')") == "Placement of the norm":
            break
    chip = page.get_by_role("slider", name="Placement of the norm")
    assert chip.get_attribute("aria-valuetext") == "post-LN: x' = N(x + f(x))"
    explorer.after(lambda: page.keyboard.press("ArrowRight"))
    assert chip.get_attribute("aria-valuetext") == "pre-LN: x' = x + f(N(x))"
    assert_shows(explorer, InitProbe("pre"), "pre-LN")
    # The lesson: in pre-LN the stream grows, and its gradient reaches the first sublayer.
    post, pre = InitProbe().measure(), InitProbe("pre").measure()
    assert explorer.marks("stream", "pre-LN")[-1] == pre["stream"][-1] > 2 * post["stream"][-1]
    assert page.get_by_role("radio", name="pre-LN").is_checked(), "the radio group is in step"


def test_norm_moves_by_mouse(explorer):
    page = explorer.stack("#v=1&S=8&d=16&T=4")
    small = {"sublayers": 8, "d_model": 16, "tokens": 4}
    explorer.after(lambda: page.locator(".slot[data-place=pre] rect").click())
    assert_shows(explorer, InitProbe("pre", **small), "pre-LN", ["stream"])
    chip, slot = (
        page.locator(css).bounding_box() for css in (".chip[role=slider]", ".slot[data-place=reordered] rect")
    )
    page.mouse.move(chip["x"] + chip["width"] / 2, chip["y"] + chip["height"] / 2)
    page.mouse.down()
    page.mouse.move(slot["x"] + slot["width"] / 2 - 9, slot["y"] + slot["height"] / 2 + 7, steps=5)
    explorer.after(page.mouse.up)
    assert_shows(explorer, InitProbe("reordered", **small), "reordered", ["stream"])
    explorer.after(lambda: page.get_by_role("radio", name="sandwich").check())
    assert_shows(explorer, InitProbe("sandwich", **small), "sandwich", ["gradient"])


def test_stack_keys_can_be_switched_off(explorer):
    page = explorer.stack("#v=1&S=4&d=8&T=2")
    explorer.after(lambda: page.keyboard.press("5"))
    assert "place=deepnorm" in explorer.fragment()
    explorer.after(lambda: page.keyboard.press("p"))
    assert "pins=place:deepnorm,S:4,d:8,T:2" in explorer.fragment()
    page.keyboard.press("?")
    page.get_by_role("checkbox", name="Enable single-key shortcuts").uncheck()
    page.get_by_role("button", name="Close").click()
    page.keyboard.press("2")
    assert "place=deepnorm" in explorer.fragment()


def test_pinned_stack_stays(explorer):
    page = explorer.stack("#v=1&S=8&d=16&T=4")
    explorer.after(lambda: page.get_by_role("button", name="Pin", exact=True).click())
    explorer.after(lambda: page.keyboard.press("2"))
    small = {"sublayers": 8, "d_model": 16, "tokens": 4}
    post, pre = (InitProbe(name, **small).measure() for name in ("post", "pre"))
    assert explorer.marks("stream", "pre-LN") == pre["stream"]
    assert explorer.marks("stream", "post-LN") == post["stream"]
    assert page.locator("#chart-stream .plot .marks.ghost .mark").count() == 9
    verdict = page.locator(".stack-verdict").inner_text()
    factor = float(re.search(r"Compared with post-LN: the gradient at x_0 is ([\d.]+) times", verdict)[1])
    assert factor == pytest.approx(pre["gradient"][0] / post["gradient"][0], rel=6e-3)
    explorer.after(lambda: page.get_by_role("button", name="Unpin").click())
    assert page.locator("#chart-stream .plot .marks.ghost").count() == 0


EVERYTHING = {
    "place": "pre", "norm": "rms", "S": "16", "d": "24", "T": "3", "gain": "0.5", "alpha": "1.5", "seed": "7", "res": "0", "final": "off",
    "depth": "4", "pins": "place:none,S:4;as:first",
}  # fmt: skip


def test_stack_address_holds_settings(explorer):
    page = explorer.stack()
    page.keyboard.press("2")
    page.get_by_label("Norm", exact=True).select_option("rms")
    page.get_by_label("Final norm").select_option("off")
    page.get_by_label("Residual connection").uncheck()
    for label, value in (
        ("Sublayers", 16),
        ("d_model", 24),
        ("Tokens", 3),
        ("Weight gain", 0.5),
        ("Residual α", 1.5),
        ("Seed", 7),
    ):
        page.get_by_role("slider", name=label, exact=True).fill(str(value))
    page.wait_for_function("() => location.hash.includes('seed=7')")
    given = explorer.fragment()
    other = page.context.new_page()
    other.goto(f"{explorer.address}/{given}")
    other.wait_for_selector("#panel-stack[data-ready]")
    assert other.evaluate("location.hash") == given
    drawing = other.locator("#chart-gradient svg").first.inner_html()
    page.wait_for_function("html => document.querySelector('#chart-gradient svg').innerHTML === html", arg=drawing)
    other.close()
    flip = InitProbe(
        "pre",
        norm="rms",
        sublayers=16,
        d_model=24,
        tokens=3,
        gain=0.5,
        alpha=1.5,
        seed=7,
        residual=False,
        final_norm=False,
    )
    assert_shows(explorer, flip, "pre-LN", ["stream", "gradient"])


def test_stack_address_restores_settings(explorer):
    fragment = "#v=1&" + "&".join(f"{key}={value}" for key, value in EVERYTHING.items())
    page = explorer.stack(fragment)
    assert page.locator("#notices p").count() == 0
    page.keyboard.press("1")
    page.keyboard.press("2")
    assert dict(part.split("=") for part in explorer.fragment()[1:].split("&")) == {"v": "1"} | EVERYTHING


EXTREME = [
    "place=none&S=96&gain=3", "place=none&S=96&gain=0.1&res=0", "place=none&S=96&alpha=8&d=8", "place=pre&S=96&alpha=8",
    "S=2&d=8&T=1", "gain=0.1", "res=0", "place=deepnorm&res=0&S=96", "T=64&gain=3", "place=reordered&norm=rms&final=off",
    "place=none&res=0&gain=3&S=96&pins=place:none,gain:3,S:96;place:pre,final:on", "pins=as:first;as:first",
]  # fmt: skip


@pytest.mark.parametrize(
    "fragment",
    [one if k in (0, 1, 4, 7, 10) else pytest.param(one, marks=pytest.mark.slow) for k, one in enumerate(EXTREME)],
)
def test_sentences_at_extreme_settings(looked, fragment):
    page = looked.look(f"#v=1&{fragment}")
    said = page.locator(".stack-verdict p, #panel-stack figure.chart .summary").all_inner_texts()
    assert len(said) >= 8
    for sentence in said:
        assert re.fullmatch(r"\w.*\.", sentence)
        assert not re.search(r"\b(nan|inf|NaN|Infinity|undefined|null|true|false)\b|e\+02 %", sentence), sentence


def summary(explorer, chart):
    return explorer.page.locator(f"#chart-{chart} .summary").inner_text()


def test_overflow_and_underflow_are_reported(looked):
    looked.look("#v=1&place=none&S=96&gain=3")
    first = next(k for k, value in enumerate(looked.marks("stream", "none")) if not math.isfinite(value))
    label = InitProbe("none", 96, gain=3.0).measure()["labels"][first]
    assert summary(looked, "stream").startswith(f"The stream overflows at {label};")
    assert summary(looked, "map").startswith(f"From {label} on the stream is not finite")
    looked.look("#v=1&place=none&S=96&gain=0.1&res=0")
    zero = looked.marks("stream", "none").index(0)
    label = InitProbe("none", 96, gain=0.1, residual=False).measure()["labels"][zero]
    assert summary(looked, "stream") == f"The stream underflows: it is 0 from {label} on."
    assert summary(looked, "map").startswith(f"From {label} on the stream is 0")


def test_eight_seeds_range(explorer):
    page = explorer.stack("#v=1&S=12&d=16&T=5&seed=3")
    page.get_by_role("button", name="8 seeds").click()
    said = page.locator(".stack-verdict p").filter(has_text="Over seeds 0 to 7").inner_text(timeout=20_000)
    found = [InitProbe(sublayers=12, d_model=16, tokens=5, seed=seed).measure() for seed in range(8)]
    ratios = [one["gradient"][0] / one["gradient"][-1] for one in found]
    low, high = re.search(r"x_0 over the end: ([\d.]+) to ([\d.]+);", said).groups()
    assert (float(low), float(high)) == (pytest.approx(min(ratios), rel=6e-3), pytest.approx(max(ratios), rel=6e-3))
    explorer.after(lambda: page.keyboard.press("2"))
    assert "Over seeds" not in page.locator(".stack-verdict").inner_text(), "they are of another setting"
    explorer.after(lambda: page.keyboard.press("1"))
    assert "Over seeds" in page.locator(".stack-verdict").inner_text()


def test_slider_keys_are_one_history_entry(explorer):
    page = explorer.stack("#v=1&S=4&d=8&T=2")
    before = page.evaluate("history.length")
    slider = page.get_by_role("slider", name="Sublayers")
    slider.focus()
    for _ in range(8):
        page.keyboard.press("ArrowRight")
    assert "S=20" in explorer.fragment()
    assert page.evaluate("history.length") == before + 1
    page.go_back()
    page.wait_for_function("() => location.hash.includes('S=4')")
    assert slider.input_value() == "4"


def test_back_after_cursor_keeps_history(explorer):
    page = explorer.stack("#v=1&S=8&d=8&T=2")
    explorer.after(lambda: page.keyboard.press("2"))
    page.get_by_role("slider", name="Residual stream: data cursor", exact=True).focus()
    page.keyboard.press("ArrowRight")
    assert explorer.fragment() == "#v=1&place=pre&S=8&d=8&T=2&depth=0"
    explorer.after(page.go_back)
    explorer.after(lambda: page.keyboard.press("3"))
    explorer.after(page.go_back)
    assert explorer.fragment() == "#v=1&S=8&d=8&T=2"


def test_drag_is_drawn_and_one_history_entry(explorer):
    page = explorer.stack("#v=1&S=4&d=8&T=2&pins=place:pre,S:4,d:8,T:2")
    before, ready = page.evaluate("history.length"), explorer.ready()
    # The view is drawn three times during the move; with a debounce that waits for the end of the move this would time out.
    page.evaluate(
        """drawn => new Promise((done, fail) => {
        const [slider, panel] = ['.stack-side input[type=range]', '#panel-stack'].map(css => document.querySelector(css));
        const end = Date.now() + 15000;
        let value = 4;
        const move = () => {
            if (Number(panel.dataset.ready) >= drawn) return done();
            if (Date.now() > end) return fail(new Error('it does not move under the hand'));
            value = value < 60 ? value + 2 : 6;
            slider.value = String(value);
            slider.dispatchEvent(new Event('input', {bubbles: true}));
            setTimeout(move, 16);  // faster than it can be computed
        };
        move();
    })""",
        ready + 3,
    )
    explorer.after(lambda: page.evaluate(
        "() => { const slider = document.querySelector('.stack-side input[type=range]'); slider.value = '70'; "
        "for (const type of ['input', 'change']) slider.dispatchEvent(new Event(type, {bubbles: true})); }"
    ))  # fmt: skip
    page.wait_for_function(
        "() => document.querySelectorAll(`#chart-stream .mark[data-series='post-LN']`).length === 71"
    )
    assert page.evaluate("history.length") == before + 1
    explorer.after(page.go_back)
    assert len(explorer.marks("stream", "post-LN")) == 5


def test_skip_link_keeps_state(explorer):
    page = explorer.stack("#v=1&place=pre&S=4&d=8&T=2")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert explorer.fragment() == "#v=1&place=pre&S=4&d=8&T=2"
    assert page.locator("#notices p").count() == 0


def test_stack_layout_on_a_phone(explorer):
    page = explorer.stack("#v=1&S=4&d=8&T=2")
    page.set_viewport_size({"width": 360, "height": 740})
    tops = [page.locator(css).first.bounding_box()["y"] for css in
            (".diagram", ".stack-places", ".stack-verdict", ".stack-settings", "#chart-stream")]  # fmt: skip
    assert tops == sorted(tops)
    assert page.evaluate("getComputedStyle(document.querySelector('.diagram')).touchAction") == "auto"
    assert page.evaluate("getComputedStyle(document.querySelector('.diagram .chip')).touchAction") == "none"
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_equal_stack_is_pinned_once(explorer):
    page = explorer.stack("#v=1&S=4&d=8&T=2")
    explorer.after(lambda: page.keyboard.press("p"))
    page.keyboard.press("p")
    assert page.get_by_role("list", name="Pinned").get_by_role("listitem").count() == 1
    assert page.get_by_role("button", name="Pin", exact=True).is_disabled()
    assert "is pinned: change a setting" in page.locator(".stack-verdict").inner_text()
    explorer.after(lambda: page.get_by_label("Residual connection").uncheck())
    assert "Compared with post-LN, with the residual:" in page.locator(".stack-verdict").inner_text()


def test_stack_back_and_forward(explorer):
    page = explorer.stack("#v=1&S=4&d=8&T=2")
    for key in "23":
        explorer.after(lambda key=key: page.keyboard.press(key))
    explorer.after(page.go_back)
    assert page.get_by_role("radio", name="pre-LN").is_checked()
    explorer.after(page.go_forward)
    assert page.get_by_role("radio", name="sandwich").is_checked()


@pytest.mark.parametrize(("fragment", "sentence"), [
    ("#v=2&place=pre", "The address has version '2', expected 1"),
    ("#v=1&place=front", "place is 'front' in the address, expected one of post, pre, sandwich, reordered, deepnorm, none: post was used."),
    ("#v=1&S=1000", "S is '1000' in the address, expected a whole number from 2 to 96 in steps of 2: 96 was used."),
    ("#v=1&S=%F0%9F&d=", "d is '' in the address, expected a whole number from 8 to 256"),
    ("#v=1&gain=NaN", "gain is 'NaN' in the address, expected a number from 0.1 to 3: 1 was used."),
    ("#v=1&__proto__=1&constructor=2", "'__proto__' in the address is unknown and was ignored."),
    ("#v=1&pins=place:front", "pins is 'place:front' in the address, expected place to be one of post"),
    ("#v=1&pins=place:pre,S:1000", "expected S to be a whole number from 2 to 96 in steps of 2: the default was used."),
    ("#" + "&".join(f"k{i}=1" for i in range(3000)), "And 2992 more."),
    ("#v=1&pins=a;b;c;d", "expected at most 3 pinned settings"),
    ("#v=1&place=pre&place=post", "'place' occurs more than once in the address: the first value was used."),
    ("#v=1&view=cellar", "view is 'cellar' in the address"),
])  # fmt: skip
def test_wrong_address_is_reported(looked, fragment, sentence):
    page = looked.look(fragment)
    assert sentence in page.locator("#notices").inner_text()
    assert (
        len(
            looked.marks(
                "stream", page.locator("#chart-stream .plot g.marks[data-series]").last.get_attribute("data-series")
            )
        )
        > 2
    )


def test_stack_cursors_are_linked(explorer):
    page = explorer.stack("#v=1&S=8&d=16&T=4&pins=place:pre,S:8,d:16,T:4")
    found = InitProbe(sublayers=8, d_model=16, tokens=4).measure()
    cursor = page.get_by_role("slider", name="Residual stream: data cursor", exact=True)
    cursor.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert cursor.get_attribute("aria-valuetext").startswith(f"feed-forward 1: post-LN {found['stream'][2]:.4g}")
    page.keyboard.press("ArrowDown")
    assert cursor.get_attribute("aria-valuetext").startswith("feed-forward 1: pre-LN")
    page.keyboard.press("End")
    page.wait_for_function("() => document.querySelector('#live').textContent.startsWith('feed-forward 4')")
    assert "feed-forward 4" in page.locator("#chart-gradient .readout").inner_text()
    assert "depth=8" in explorer.fragment()


def test_cursor_sends_no_request(explorer):
    page = explorer.stack("#v=1&S=8&d=16&T=4&pins=place:pre,S:8,d:16,T:4")
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.get_by_role("slider", name="Residual stream: data cursor", exact=True).focus()
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    page.wait_for_timeout(300)
    assert "depth=5" in explorer.fragment()
    assert asked == []


def test_stack_tables_and_files(explorer):
    page = explorer.stack("#v=1&S=4&d=16&T=4")
    found = InitProbe(sublayers=4, d_model=16, tokens=4).measure()
    chart = page.locator("#chart-stream")
    chart.get_by_role("button", name="Table").click()
    cells = chart.locator("tbody td").all_inner_texts()
    assert [float(text) for text in cells] == found["stream"]
    with page.expect_download() as csv:
        chart.get_by_role("button", name="CSV").click()
    lines = csv.value.path().read_text().splitlines()
    assert [float(line.rpartition(",")[2]) for line in lines[1:]] == found["stream"]
    with page.expect_download() as svg:
        chart.get_by_role("button", name="SVG").click()
    drawing = svg.value.path().read_text()
    assert drawing.startswith("<svg")
    assert "var(" not in drawing, "its colours are its own"
    assert drawing.count('data-series="post-LN"') >= 5
    with page.expect_download() as document:
        page.get_by_role("button", name="JSON").click()
    assert json.loads(document.value.path().read_text())["measured"]["stream"] == found["stream"]


def test_stack_code_computes_the_same(explorer, capsys):
    page = explorer.stack("#v=1&place=pre&S=4&d=16&T=4&final=off&res=0&norm=rms")
    page.get_by_role("button", name="Show code").click()
    code = page.locator("dialog code").inner_text()
    page.keyboard.press("Escape")
    names = {}
    exec(code, names)
    assert names["result"]["stream"] == explorer.marks("stream", "pre-LN")
    assert "feed-forward 2" in capsys.readouterr().out


def test_overflow_is_marked(looked):
    page = looked.look("#v=1&place=none&S=96&gain=3&d=64")
    values = looked.marks("stream", "none")
    assert len(values) == 97
    assert not math.isfinite(values[-1])
    assert page.locator("#chart-stream .plot .mark.odd").count() == sum(not math.isfinite(value) for value in values)
    assert "overflows" in page.locator("#chart-stream .summary").inner_text()


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
    assert_shows(explorer, InitProbe("deepnorm", sublayers=96, d_model=128), "DeepNorm", ["stream"])


def test_missing_server_is_reported(explorer):
    page = explorer.stack("#v=1&S=4&d=16&T=4")
    page.route("**/api/stack", lambda route: route.abort())
    page.keyboard.press("2")
    page.get_by_role("alert").filter(has_text="The server does not answer").wait_for()
    with page.expect_download() as document:
        page.get_by_role("button", name="JSON").click()
    assert json.loads(document.value.path().read_text())["params"]["placement"] == "post", (
        "what was measured, not what was asked in vain"
    )
    explorer.complaints.clear()  # the browser reports the failed request
    page.unroute("**/api/stack")
    explorer.after(lambda: page.keyboard.press("3"))
    assert page.get_by_role("alert").filter(has_text="The server").count() == 0


def test_slider_bounds_equal_server(explorer):
    page = explorer.stack()
    for label, name in (
        ("Sublayers", "sublayers"),
        ("d_model", "d_model"),
        ("Tokens", "tokens"),
        ("Weight gain", "gain"),
    ):
        slider = page.get_by_role("slider", name=label, exact=True)
        assert (float(slider.get_attribute("min")), float(slider.get_attribute("max"))) == (
            FIELDS[name].minimum,
            FIELDS[name].maximum,
        )
