"""Tests of what all views share, in Chromium: accessibility, widths, themes, keyboard, touch, print, charts, code and files."""

import csv
import json
from itertools import pairwise
from pathlib import Path

import pytest

from support.browser import READY, ExplorerPage
from support.explorer_requests import RACE_ADDRESS

VIEWS = {
    "stack": "#v=1&S=8&T=4&pins=place:pre,S:6&depth=3",
    "streams": "#v=1&view=streams&swiring=mhc&sS=6&sdepth=3",
    "trace": "#v=1&view=trace&step=variance&F=1,2",
    "recording": "#v=1&view=recording&rwith=first&rdepth=2",
    "race": RACE_ADDRESS,
}
"""Each with something in it: a ghost, an input that is refused, a comparison, a race that was run."""


@pytest.fixture(scope="module", params=VIEWS)
def view(request):
    """Return the name of a view."""
    return request.param


@pytest.fixture(scope="module")
def view_page(view, server_address, context, race_events):
    """Yield one page for each view, with a notice, and with every table and details element open."""
    explorer = ExplorerPage(context.new_page(), server_address)
    fragment = f"{VIEWS[view]}&zz=1"
    page = explorer.race(fragment, race_events) if view == "race" else explorer.show(fragment, view)
    page.evaluate(OPEN_ALL, view)
    assert "'zz' in the address is unknown" in explorer.read("#notices")
    yield explorer
    explorer.reset()
    page.close()


@pytest.fixture
def page(view_page):
    """Yield the page of a view in its usual size and media; after the test, check its requests and messages."""
    page = view_page.page
    page.emulate_media(media="screen", color_scheme="light", reduced_motion="reduce", forced_colors="none")
    resize(page, 1280)
    yield page
    view_page.assert_clean()


OPEN_ALL = """view => {
  for (const button of document.querySelectorAll(`#panel-${view} button`)) {
    if (button.textContent === 'Table' && button.checkVisibility()) button.click();
  }
  document.querySelectorAll('main details').forEach((one) => { one.open = true; });
}"""


def resize(page, width):
    """Set the page's width and wait until its charts are redrawn, which is a moment later."""
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))")
    page.wait_for_function("width => document.documentElement.scrollWidth <= width", arg=width)


FAINT = """() => {
  // Ratios of contrast with the paper of what axe does not look at: marks and text in drawings.
  const light = (css, over, alpha = 1) => {
    const context = Object.assign(document.createElement('canvas'), { width: 1, height: 1 }).getContext('2d');
    for (const [colour, opacity] of [[over ?? css, 1], [css, alpha]]) {
      Object.assign(context, { fillStyle: colour, globalAlpha: opacity });
      context.fillRect(0, 0, 1, 1);
    }
    const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = light(getComputedStyle(document.body).backgroundColor);
  const ratios = new Map();
  const ratio = (css) => {
    if (!ratios.has(css)) { const [a, b] = [light(css), paper].sort(); ratios.set(css, (b + 0.05) / (a + 0.05)); }
    return ratios.get(css);
  };
  const found = [];
  for (const [what, property, least] of [['.chart svg :not(.numbers) > text', 'fill', 4.5], ['.trace-views text', 'fill', 4.5], ['.chart .mark:not(.hollow):not(.odd)', 'fill', 3], ['.chart .line', 'stroke', 3]]) {
    for (const one of document.querySelectorAll(what)) {
      if (one.checkVisibility() && ratio(getComputedStyle(one)[property]) < least) found.push([what, one.getAttribute('class')]);
    }
  }
  // The number in a cell of a map, against the cell.
  for (const map of document.querySelectorAll('.chart.square')) {
    const cells = map.querySelectorAll('.cells .cell:not(.odd)');
    for (const [k, number] of [...map.querySelectorAll('.numbers text')].entries()) {
      const background = light(getComputedStyle(cells[k]).fill, getComputedStyle(document.body).backgroundColor, Number(cells[k].getAttribute('fill-opacity')));
      const [a, b] = [light(getComputedStyle(number).fill), background].sort();
      if (cells[k].dataset.value !== 'NaN' && (b + 0.05) / (a + 0.05) < 3.5) found.push([number.textContent, number.getAttribute('class')]);
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


STATE = f"""() => ({{
  faint: ({FAINT})(), unnamed: ({UNNAMED})(), animations: document.getAnimations().length, width: document.documentElement.scrollWidth,
  levels: [...document.querySelectorAll('h1, h2, h3, h4, h5, h6')].filter(one => one.checkVisibility()).map(one => Number(one.tagName[1])),
}})"""


LOOKS = {"a": [(360, "dark"), (1440, "light")], "b": [(360, "light"), (1440, "dark")]}


@pytest.mark.parametrize("looks", ["a", pytest.param("b", marks=pytest.mark.slow)])
def test_views_are_accessible(view_page, page, view, looks):
    for k, (width, scheme) in enumerate(LOOKS[looks]):
        page.emulate_media(color_scheme=scheme)
        resize(page, width)
        # Contrast of text is slow to check: each view in one scheme by default, and in the other one under `slow`.
        assert view_page.violations(contrast=k == [*VIEWS].index(view) % 2) == [], (width, scheme)
        state = page.evaluate(STATE)
        levels = state.pop("levels")
        assert state.pop("width") <= width
        assert state == {"faint": [], "unnamed": [], "animations": 0}, (width, scheme)
        assert levels[:2] == [1, 2]
        assert levels.count(1) == 1
        assert all(below <= above + 1 for above, below in pairwise(levels))


# By keyboard.

STOPS = """() => {
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


def test_controls_are_reached_by_tab(page):
    stops = page.evaluate(STOPS)
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


def test_code_is_copied_and_json_saved(page, view):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opener = page.get_by_role("button", name="Show code")
    opener.click()
    box = page.get_by_role("dialog", name="Python code for this view")
    code = box.locator("pre").inner_text()
    box.get_by_role("button", name="Copy").click()
    page.wait_for_function("() => document.getElementById('notices').textContent.startsWith('The code copied')")
    assert page.evaluate("navigator.clipboard.readText()") == code
    assert opener.evaluate("button => button === document.activeElement"), "the focus comes back"
    with page.expect_download(timeout=60_000) as saved:
        page.get_by_role("button", name="JSON").click()
    assert saved.value.suggested_filename == f"addnorm-{view}.json"
    assert len(json.loads(Path(saved.value.path()).read_text())) >= 2


# Charts.

TABLES = """() => Object.fromEntries([...document.querySelectorAll('main figure.chart')].filter((one) => one.checkVisibility()).map((chart) =>
  [chart.id.replace('chart-', ''), [chart.classList.contains('square'), ...[...chart.querySelectorAll('table tr')].map((row) => [...row.cells].map((cell) => cell.textContent))]]))"""


def test_tables_and_files_equal_drawings(view_page, page, view):
    drawings, tables = view_page.charts()[0], page.evaluate(TABLES)
    assert drawings.keys() <= tables.keys()
    assert (view == "trace") == (tables == {})
    for chart, (is_map, head, *rows) in tables.items():
        assert [*csv.reader(view_page.download("CSV", f"#chart-{chart}").splitlines())] == [head, *rows]
        lines = rows if is_map else zip(head, *rows, strict=True)
        numbers = {name: [float(cell) if cell else None for cell in cells] for name, *cells in lines if name != head[0]}
        for series, values in drawings[chart].items():
            assert values + [None] * (len(numbers[series]) - len(values)) == numbers[series], (chart, series)
        drawing = view_page.download("SVG", f"#chart-{chart}")
        assert drawing.startswith("<svg")
        assert "var(" not in drawing, "its colours are its own"
        assert drawing.count("data-series=") >= len(rows)


SELECTED = {"stack": (7, "depth=7"), "streams": (5, "sdepth=5"), "recording": (8, "rdepth=5"), "race": (2, "at=4")}
"""Number of charts that show the place which was selected in the first one, and the place in the address."""


def test_cursor_moves_by_keyboard(view_page, page, view):
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    cursors = page.locator(f"#panel-{view} figure.chart .cursor[role=slider]:visible")
    if view == "trace":
        assert cursors.count() == 0
        return
    cursor = cursors.first
    cursor.focus()
    places = []
    for key in ("Home", "ArrowRight", "End", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
        places.append(int(cursor.get_attribute("aria-valuenow")))
    most = int(cursor.get_attribute("aria-valuemax"))
    assert places == [1, 2, most, most, most - 1]
    texts = cursors.evaluate_all("all => all.map((one) => one.getAttribute('aria-valuetext'))")
    place = texts[0].split(":")[0]
    linked, in_address = SELECTED[view]
    assert sum(f"{place}:" in text for text in texts) == linked, texts
    assert in_address in view_page.fragment()
    page.keyboard.press("ArrowDown")
    other = cursor.get_attribute("aria-valuetext")
    assert (other != texts[0], other.split(":")[0]) == (True, place), "another series is read out"
    page.wait_for_function("text => document.getElementById('live').textContent === text", arg=other)
    assert requests == [] or view == "recording", "only a recording has more numbers on the server"


# By touch.

SMALL = """() => [...document.querySelectorAll('button, select, input, summary, [role=slider]')]
  .filter(one => one.checkVisibility({ visibilityProperty: true }))
  .map(one => [one, (one.matches('[type=radio], [type=checkbox]') && one.closest('label') || one).getBoundingClientRect()])
  .filter(([, box]) => box.width < 43.9 || box.height < 43.9)
  .map(([one, box]) => [one.tagName, one.getAttribute('aria-label') ?? one.textContent, box.width, box.height])"""


def test_touch_targets_are_large(page):
    page.set_viewport_size({"width": 360, "height": 800})
    telephone = page.context.new_cdp_session(page)
    telephone.send("Emulation.setTouchEmulationEnabled", {"enabled": True})
    resize(page, 360)
    assert page.evaluate("matchMedia('(pointer: coarse)').matches")
    assert page.evaluate(SMALL) == []
    telephone.send("Emulation.setTouchEmulationEnabled", {"enabled": False})
    telephone.detach()


# Other media.


def test_forced_colors_zoom_and_print(page, view):
    page.emulate_media(forced_colors="active")
    tab = page.get_by_role("tab", selected=True)
    assert tab.evaluate("one => getComputedStyle(one).outlineStyle") == "solid"
    page.emulate_media(forced_colors="none")
    resize(page, 720)  # 1440 by 900 at 200 %
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    page.emulate_media(media="print", color_scheme="dark")
    colours = page.evaluate("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
    assert colours == ["rgb(255, 255, 255)", "rgb(26, 31, 36)"], "paper is white, whatever the theme"
    assert not page.locator("#tools").is_visible()
    assert page.locator(f"#panel-{view} h2").is_visible()
    page.wait_for_function("() => document.documentElement.scrollWidth <= 720")  # charts follow a moment later
    page.evaluate("delete document.documentElement.dataset.theme")


def test_reduced_motion(page, view):
    moving = "() => [...document.querySelectorAll('*')].filter(one => { const style = getComputedStyle(one); return style.transitionDuration.split(', ').some(d => parseFloat(d) > 0) || style.animationName !== 'none'; }).length"
    assert page.evaluate(moving) == 0
    page.emulate_media(reduced_motion="no-preference")
    assert (page.evaluate(moving) > 0) == (view in ("stack", "trace")), (
        "with nothing to suppress this would prove nothing"
    )


TOPS = """async () => {
  let before;
  do {  // plots out of sight are laid out later
    before = document.documentElement.scrollHeight;
    await new Promise(done => setTimeout(done, 300));
  } while (before !== document.documentElement.scrollHeight);
  return [...document.querySelectorAll('.stack-main figure, .stack-settings')].map(one => Math.round(one.getBoundingClientRect().top + scrollY));
}"""


def test_no_chart_is_alone_in_half_a_row(new_explorer):
    page = new_explorer.page
    page.set_viewport_size({"width": 1280, "height": 900})
    page = new_explorer.open("#v=1&view=streams&swiring=pre_ln", READY["streams"])
    grid, *charts = page.locator(".streams-main .charts, .streams-main .charts > .chart:visible").evaluate_all(
        "all => all.map((one) => one.clientWidth)"
    )
    assert len(charts) == 3
    assert max(charts[:2]) < grid / 2 < charts[2] == grid


@pytest.mark.parametrize("width", [320, 768])
def test_moving_the_norm_moves_no_chart_on_small_screens(new_explorer, width):
    page, tops = new_explorer.page, set()
    page.set_viewport_size({"width": width, "height": 900})
    for place in ("post", "pre", "none"):
        new_explorer.stack(f"#v=1&place={place}")
        tops.add(tuple(page.evaluate(TOPS)))
    assert len(tops) == 1
