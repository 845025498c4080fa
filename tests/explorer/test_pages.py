"""Tests of all views in Chromium: accessibility, widths, themes, keyboard, touch, print, links."""

import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe

from addnorm import explorer as package
from addnorm.explorer.race import parse, run_race
from support.browser import Watched

STATIC = Path(package.__file__).parent / "static"
TINY = "&L=1&steps=3&rd=16&rT=8&rB=2"


@cache
def race_body():
    """Return the events of a small race, as the server sends them."""
    runs = parse({"layers": 1, "steps": 3, "d_model": 16, "tokens": 8, "batch": 2})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in run_race(runs))


def replayed_race(explorer, more):
    """Show the race view after a race from recorded events, without training."""
    body = race_body()
    explorer.page.route("**/api/race", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    return explorer.race(TINY + more)


OPEN = {
    "stack": lambda explorer, more="": explorer.stack(f"#v=1&S=8&T=4&pins=place:pre,S:6&depth=3{more}"),
    "trace": lambda explorer, more="": explorer.open(
        f"#v=1&view=trace&step=variance&F=1,2{more}", "#panel-trace [data-step]"
    ),
    "recording": lambda explorer, more="": explorer.recording(f"&rwith=first&rdepth=2{more}"),
    "race": lambda explorer, more="": replayed_race(explorer, more),
}
"""Each with something in it: a ghost, an input that is refused, a comparison, a race that was run."""

SOME = ["stack", "recording", *(pytest.param(view, marks=pytest.mark.slow) for view in ("trace", "race"))]


def full(explorer, view):
    """Open a view with every table and details element open, and a notice."""
    page = OPEN[view](explorer, "&zz=1")
    panel = page.locator(f"#panel-{view}")
    for button in panel.get_by_role("button", name="Table", exact=True).all():
        button.click()
    page.evaluate("document.querySelectorAll('main details').forEach(one => { one.open = true; })")
    assert "'zz' in the address is unknown" in page.locator("#notices").inner_text()
    return page


def barriers(page):
    """Return the serious and critical violations that axe reports."""
    found = Axe().run(page).response["violations"]
    return [
        (one["id"], one["nodes"][0]["html"], one["nodes"][0].get("failureSummary"))
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def redrawn(page, width):
    """Set the page's width and wait until its charts are redrawn, which is a moment later."""
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))")
    page.wait_for_function("width => document.documentElement.scrollWidth <= width", arg=width)


FAINT = """() => {
  // Ratios of contrast with the paper of what axe does not look at: marks and text in drawings.
  const light = (css) => {
    const context = Object.assign(document.createElement('canvas'), { width: 1, height: 1 }).getContext('2d');
    context.fillStyle = css;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = light(getComputedStyle(document.body).backgroundColor);
  const ratio = (css) => { const [a, b] = [light(css), paper].sort(); return (b + 0.05) / (a + 0.05); };
  const found = [];
  for (const [what, property, least] of [['.chart svg text', 'fill', 4.5], ['.chart .mark:not(.hollow):not(.odd)', 'fill', 3], ['.chart .line', 'stroke', 3]]) {
    for (const one of document.querySelectorAll(what)) {
      if (one.checkVisibility() && ratio(getComputedStyle(one)[property]) < least) found.push([what, one.getAttribute('class')]);
    }
  }
  return found;
}"""

UNNAMED = """() => [...document.querySelectorAll('figure.chart')].filter(one => one.checkVisibility()).filter(one => {
  const slider = one.querySelector('[role=slider]');
  const title = document.getElementById(one.getAttribute('aria-labelledby'))?.textContent;
  const places = Number(slider.getAttribute('aria-valuemax'));
  const rows = [...one.querySelectorAll('tbody tr')];
  return !(title && one.querySelector('.summary').textContent.length > 15
    && slider.getAttribute('aria-label') === `${title}: data cursor` && slider.getAttribute('aria-valuetext')
    && one.querySelector('svg[role=img]').getAttribute('aria-label').startsWith(title)
    && rows.length && rows.every(row => row.querySelector('th').textContent && row.querySelectorAll('td').length)
    && [rows.length, rows[0].children.length - 1].includes(places));
}).map(one => one.id)"""


LOOKS = {"a": [(360, "dark"), (1440, "light")], "b": [(360, "light"), (1440, "dark")]}


@pytest.mark.parametrize("looks", ["a", pytest.param("b", marks=pytest.mark.slow)])
@pytest.mark.parametrize("view", OPEN)
def test_views_are_accessible(explorer, view, looks):
    page = full(explorer, view)
    for width, scheme in LOOKS[looks]:
        page.emulate_media(color_scheme=scheme)
        redrawn(page, width)
        assert barriers(page) == [], (width, scheme)
        assert page.evaluate(FAINT) == [], (width, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(UNNAMED) == [], (width, scheme)
        assert page.evaluate("document.getAnimations().length") == 0
        levels = page.eval_on_selector_all(
            "h1, h2, h3, h4, h5, h6",
            "all => all.filter(one => one.checkVisibility()).map(one => Number(one.tagName[1]))",
        )
        assert levels[:2] == [1, 2]
        assert levels.count(1) == 1
        assert all(below <= above + 1 for above, below in pairwise(levels))


# By keyboard.

STOPS = """view => {
  const all = [...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex]')].filter(one =>
    one.checkVisibility({ visibilityProperty: true }) && !one.disabled && !one.closest('fieldset:disabled') && one.tabIndex >= 0);
  const radios = new Map();
  for (const one of all) if (one.type === 'radio') radios.set(one.name, one.checked ? one : radios.get(one.name) ?? one);
  const stops = all.filter(one => one.type !== 'radio' || radios.get(one.name) === one);
  stops.forEach((one, k) => { one.dataset.stop = k; });
  return stops.map(one => `${one.tagName} ${one.getAttribute('aria-label') ?? one.textContent.slice(0, 30)}`);
}"""
HERE = """() => {
  const one = document.activeElement;
  if (!one || one === document.body) return null;
  const drawn = (element, name) => element && getComputedStyle(element)[name];
  // A ring around it, around the label that stands for it, or around what is drawn of it.
  const ring = [one, one.closest('label'), one.closest('.trace-segments label')].some(element =>
    element && drawn(element, 'outlineStyle') !== 'none' && parseFloat(drawn(element, 'outlineWidth')) >= 2);
  const frame = [...one.querySelectorAll?.('rect') ?? []].some(rect => drawn(rect, 'stroke') === drawn(document.body, 'color') && parseFloat(drawn(rect, 'strokeWidth')) >= 3);
  const box = one.getBoundingClientRect();
  return { stop: Number(one.dataset.stop ?? -1), seen: ring || frame, there: box.bottom > 0 && box.top < innerHeight };
}"""


@pytest.mark.parametrize("view", OPEN)
def test_controls_are_reached_by_tab(explorer, view):
    page = OPEN[view](explorer)
    stops = page.evaluate(STOPS, view)
    assert len(stops) > 20
    reached = []
    for _ in range(len(stops) + 5):
        page.keyboard.press("Tab")
        here = page.evaluate(HERE)
        if here is None:  # between the last and the first element the focus is in the browser's own controls
            continue
        if reached and here["stop"] == reached[0]:
            break
        assert here["seen"], stops[here["stop"]]
        assert here["there"], stops[here["stop"]]
        reached.append(here["stop"])
    first = reached.index(0)
    assert reached[first:] + reached[:first] == [*range(len(stops))], "in the order of the page, none left out"


def test_tabs_by_arrow_keys(explorer):
    page = explorer.stack()
    tabs = page.get_by_role("tab")
    tabs.first.focus()
    for key, name in (("ArrowRight", "Trace"), ("End", "Race"), ("ArrowRight", "Stack"), ("ArrowLeft", "Race"), ("ArrowLeft", "Recording"), ("Home", "Stack")):  # fmt: skip
        page.keyboard.press(key)
        chosen = page.get_by_role("tab", selected=True)
        assert chosen.inner_text() == name
        assert chosen.evaluate("tab => tab === document.activeElement")
        assert page.get_by_role("tabpanel").count() == 1
        assert page.get_by_role("tabpanel", name=name).is_visible()
        assert page.title() == f"{name} · addnorm explorer"
        assert [tab.get_attribute("tabindex") for tab in tabs.all()].count("0") == 1
    page.go_back()
    assert page.get_by_role("tab", selected=True).inner_text() == "Recording"


def test_skip_link_focuses_content(explorer):
    page = explorer.stack()
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the content")
    assert skip.evaluate("link => link.getBoundingClientRect().left") >= 0
    before = explorer.fragment()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.locator("#notices").inner_text() == ""
    assert explorer.fragment() == before, "the address holds the state: a jump leaves it"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('main') !== null")


def test_chart_cursor_by_keyboard(explorer):
    page = explorer.race(TINY)
    slider = page.get_by_role("slider", name="Loss: data cursor")
    slider.focus()
    said = []
    for key in ("Home", "ArrowRight", "End", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
        said.append((slider.get_attribute("aria-valuenow"), slider.get_attribute("aria-valuetext").split(":")[0]))
    assert said == [("1", "step 0"), ("2", "step 1"), ("3", "step 2"), ("3", "step 2"), ("2", "step 1")]
    first = slider.get_attribute("aria-valuetext")
    page.keyboard.press("ArrowDown")
    assert first.index("post_ln") < first.index("pre_ln")
    assert slider.get_attribute("aria-valuetext").startswith("step 1: pre_ln")
    page.wait_for_function("() => document.getElementById('live').textContent.startsWith('step 1: pre_ln')")
    assert "at=1" in explorer.fragment()


def test_help_and_keys(explorer):
    page = explorer.stack()
    page.keyboard.press("?")
    box = page.get_by_role("dialog")
    assert box.get_by_role("heading", name="Keys").is_visible()
    assert {"1", "6", "p", "←", "→", "?"} <= {*box.locator("kbd").all_inner_texts()}
    assert barriers(page) == []
    for _ in range(6):  # the focus stays in the dialog or moves to the browser
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement === document.body || !!document.activeElement.closest('dialog')")
    page.keyboard.press("2")
    assert "place" not in explorer.fragment(), "keys mean nothing behind a dialog"
    box.get_by_label("Enable single-key shortcuts").uncheck()
    page.keyboard.press("Escape")
    assert box.count() == 0
    page.keyboard.press("2")
    assert "place" not in explorer.fragment()
    page.get_by_role("button", name="Help and keys").click()
    page.get_by_label("Enable single-key shortcuts").check()
    page.keyboard.press("Escape")
    page.keyboard.press("2")
    assert "place=pre" in explorer.fragment()


@pytest.mark.parametrize("view", OPEN)
def test_code_is_copied_and_json_saved(explorer, view):
    explorer.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = OPEN[view](explorer)
    opener = page.get_by_role("button", name="Show code")
    opener.click()
    box = page.get_by_role("dialog", name="Python code for this view")
    code = box.locator("pre").inner_text()
    assert "addnorm" in code
    compile(code, view, "exec")
    box.get_by_role("button", name="Copy").click()
    page.wait_for_function("() => document.getElementById('notices').textContent.startsWith('The code copied')")
    assert page.evaluate("navigator.clipboard.readText()") == code
    assert opener.evaluate("button => button === document.activeElement"), "the focus comes back"
    with page.expect_download() as saved:
        page.get_by_role("button", name="JSON").click()
    assert saved.value.suggested_filename == f"addnorm-{view}.json"
    assert len(json.loads(Path(saved.value.path()).read_text())) >= 2


# By touch.

SMALL = """() => [...document.querySelectorAll('button, select, input, summary, [role=slider]')]
  .filter(one => one.checkVisibility({ visibilityProperty: true }))
  .map(one => [one, (one.matches('[type=radio], [type=checkbox]') && one.closest('label') || one).getBoundingClientRect()])
  .filter(([, box]) => box.width < 43.9 || box.height < 43.9)
  .map(([one, box]) => [one.tagName, one.getAttribute('aria-label') ?? one.textContent, box.width, box.height])"""


@pytest.fixture(scope="module")
def touched(browser, browser_context_args):
    """Yield a page on an emulated telephone."""
    phone = {"viewport": {"width": 360, "height": 800}, "has_touch": True, "is_mobile": True}
    context = browser.new_context(**browser_context_args | phone)
    yield context
    context.close()


@pytest.mark.parametrize("view", OPEN)
def test_touch_targets_are_large(served, touched, view):
    page = touched.new_page()
    watched = Watched(page, served)
    full(watched, view)
    assert page.evaluate("matchMedia('(pointer: coarse)').matches")
    assert page.evaluate(SMALL) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    watched.unharmed()
    page.close()


# Other media.


@pytest.mark.parametrize("view", SOME)
def test_forced_colors_zoom_and_print(explorer, view):
    page = full(explorer, view)
    page.emulate_media(forced_colors="active")
    tab = page.get_by_role("tab", selected=True)
    assert tab.evaluate("one => getComputedStyle(one).outlineStyle") == "solid"
    page.emulate_media(forced_colors="none")
    page.set_viewport_size({"width": 720, "height": 450})  # 1440 by 900 at 200 %
    page.wait_for_function("() => document.documentElement.scrollWidth <= 720")  # charts follow a moment later
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    page.emulate_media(media="print", color_scheme="dark")
    colours = page.evaluate("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
    assert colours == ["rgb(255, 255, 255)", "rgb(26, 31, 36)"], "paper is white, whatever the theme"
    assert not page.locator("#tools").is_visible()
    assert page.locator(f"#panel-{view} h2").is_visible()
    page.wait_for_function("() => document.documentElement.scrollWidth <= 720")  # charts follow a moment later


def test_reduced_motion(explorer):
    moving = "() => [...document.querySelectorAll('*')].filter(one => { const style = getComputedStyle(one); return style.transitionDuration.split(', ').some(d => parseFloat(d) > 0) || style.animationName !== 'none'; }).length"
    for view in ("stack", "trace"):
        page = OPEN[view](explorer)
        page.emulate_media(reduced_motion="reduce")
        assert page.evaluate(moving) == 0
        page.emulate_media(reduced_motion="no-preference")
        assert page.evaluate(moving) > 0, "with nothing to suppress this would prove nothing"


# Saved state, and state in the address.


def test_theme_is_kept(explorer):
    page = explorer.stack()
    page.emulate_media(color_scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    theme = page.get_by_role("button", name="Theme")
    theme.click()
    theme.click()
    assert theme.inner_text() == "Theme: dark"
    dark = page.evaluate(paper)
    assert dark != light
    explorer.stack()
    assert page.evaluate(paper) == dark
    assert theme.inner_text() == "Theme: dark"
    theme.click()
    assert (theme.inner_text(), page.evaluate(paper)) == ("Theme: auto", light)


CHANGES = {
    "stack": (lambda page: page.get_by_role("radio", name="DeepNorm").check(), lambda page: page.get_by_role("radio", name="DeepNorm").is_checked()),
    "trace": (lambda page: page.get_by_label("Token x").fill("4,-5,6.5"), lambda page: page.get_by_label("Token x").input_value() == "4,-5,6.5"),
    "recording": (lambda page: page.get_by_role("combobox", name="Recording").select_option("2"), lambda page: page.get_by_role("combobox", name="Recording").input_value() == "2"),
    "race": (lambda page: page.get_by_label("Against").select_option("deepnorm"), lambda page: page.get_by_label("Against").input_value() == "deepnorm"),
}  # fmt: skip
PLAIN = {
    "stack": ("#v=1&S=8&T=4", "#panel-stack[data-ready]"),
    "trace": ("#v=1&view=trace", "#panel-trace [data-step]"),
    "recording": ("#v=1&view=recording", "#panel-recording[data-ready]"),
    "race": ("#v=1&view=race", "#panel-race h2"),
}


@pytest.mark.parametrize("view", SOME)
def test_copied_link_restores_view(explorer, view):
    change, changed = CHANGES[view]
    page = explorer.open(*PLAIN[view])
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    assert not changed(page)
    change(page)
    page.get_by_role("button", name="Copy link").click()
    page.wait_for_function("() => document.getElementById('notices').textContent.startsWith('The link copied')")
    link = page.evaluate("navigator.clipboard.readText()")
    assert link.startswith(explorer.address)
    explorer.open(link.removeprefix(f"{explorer.address}/"), PLAIN[view][1])
    assert changed(page)
    assert explorer.fragment() == f"#{link.split('#')[1]}"
    assert page.locator("#notices").inner_text() == ""


def test_foreign_address_is_reported(explorer):
    page = explorer.stack("#v=9&view=nope&place=<b>&S=1e9&%zz&pins=a:b;c&view=race&rec=-1&constructor=1&__proto__=2")
    said = page.locator("#notices p > span").all_inner_texts()
    assert len(said) == 9
    assert said[-1] == "And 2 more."
    assert "The address has version '9', expected 1: known settings were used." in said
    assert "view is 'nope' in the address, expected one of stack, trace, recording, race: stack was used." in said
    assert "'view' occurs more than once in the address: the first value was used." in said
    for line in page.get_by_role("button", name="Dismiss").all()[::-1]:
        line.click()
    assert page.locator("#notices").inner_text() == ""


# Missing features.


def test_recording_view_without_files(explorer):
    page = explorer.page

    def without(route):
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"recordings": []})

    page.route("**/api/meta", without)
    explorer.open("#v=1&view=recording", "#panel-recording h2")
    assert "addnorm explore --recording" in page.locator("#panel-recording pre").inner_text()
    assert barriers(page) == []
    page.get_by_role("button", name="Show code").click()
    assert page.get_by_role("dialog").locator("pre").inner_text().startswith("#")
    page.keyboard.press("Escape")
    with page.expect_download() as saved:
        page.get_by_role("button", name="JSON").click()
    assert json.loads(Path(saved.value.path()).read_text()) is None
    page.get_by_role("tab", name="Stack").click()
    page.wait_for_selector("#panel-stack[data-ready]")


def test_page_without_server(explorer):
    page = explorer.stack()
    page.route("**/api/stack", lambda route: route.abort())
    page.get_by_role("radio", name="sandwich").check()
    page.wait_for_selector("#panel-stack .wrong:not([hidden])")
    sentence = "The server does not answer. Is `addnorm explore` still running in its terminal?"
    assert page.locator("#panel-stack .wrong").inner_text() == sentence
    page.unroute("**/api/stack")
    explorer.after(lambda: page.get_by_role("radio", name="reordered").check())
    assert not page.locator("#panel-stack .wrong").is_visible()
    page.route("**/api/meta", lambda route: route.abort())
    explorer.open("", "main .wrong")
    assert page.locator("main .wrong").inner_text() == sentence
    assert all("ERR_FAILED" in said for said in explorer.complaints)
    explorer.complaints.clear()


# Source files.

FORBIDDEN = re.compile(
    r"""https?:// | \beval\( | new\ Function | innerHTML | outerHTML | insertAdjacentHTML | document\.write | srcdoc | javascript:
    | setAttribute\("style" | [{,]\s*style: | \sstyle= | import\((?!"\.) | set(?:Timeout|Interval)\(\s*["'`]""",
    re.VERBOSE,
)
NAMESPACES = re.compile(r"http://www\.w3\.org/(2000/svg|1999/xhtml|1998/Math/MathML)\b")


def test_static_files_load_nothing_foreign():
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    assert len(files) > 30
    for path in files:
        text = path.read_text()
        assert FORBIDDEN.findall(NAMESPACES.sub("", text)) == [], path
        if path.suffix == ".js":
            assert text.startswith("// @ts-check"), path
            assert all(name.startswith(".") for name in re.findall(r'from "([^"]+)"', text)), path
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\ssrc=)|\son\w+=|<style", page)
    linked = {*re.findall(r'(?:href|src)="/static/([^"]+)"', page)}
    assert {path.relative_to(STATIC).as_posix() for path in files if path.suffix == ".css"} <= linked


@pytest.mark.parametrize(
    "bad",
    [
        'fetch("https://a.b")',
        "x.innerHTML = y",
        'h("p", { style: "color: red" })',
        'import("https:x")',
        "setTimeout('f()')",
        "eval(x)",
    ],
)
def test_forbidden_patterns_match(bad):
    assert FORBIDDEN.search(bad)
