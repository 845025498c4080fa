"""The explorer's page in the system's Chromium: it shows addresses, reads charts, and records requests and console messages."""

import contextlib
import io
import json
import os
import shutil

import pytest

MISSING = "there is no Chromium: `apt-get install chromium`, or name it in ADDNORM_CHROMIUM"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync",
             "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]  # fmt: skip
"""The last argument keeps all requests on this machine without intercepting them, which would disable the browser's cache."""


def chromium():
    """Return the path of Chromium. Without it the test is skipped; on CI it fails."""
    path = os.environ.get("ADDNORM_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(MISSING)
    return path


HOME = {
    "stack": "#v=1&S=2&d=8&T=1&seed=99",
    "streams": "#v=1&view=streams&sS=4&sd=8&sseed=99",
    "trace": "#v=1&view=trace&x=99&F=1",
    "recording": "#v=1&view=recording&rstep=0&rdepth=1",
}
"""Addresses that a shared page shows between tests; no test uses them otherwise."""
READY = {
    "stack": "#panel-stack[data-ready]",
    "streams": "#panel-streams[data-ready]",
    "trace": "#panel-trace .trace-walker:not([data-pending])",
    "recording": "#panel-recording[data-ready]",
    "race": "#panel-race h2",
}

# Show addresses one after another without loading the page. The counters are read directly before the page reads the address,
# so that an earlier request which is still computed does not count.
SHOW = """async ([view, addresses]) => {
  const panel = document.getElementById(`panel-${view}`);
  const counts = view === 'stack' || view === 'streams';
  const counter = counts ? 'drawn' : 'ready';
  const read = (name) => Number(panel.dataset[name] ?? 0);
  const until = async (condition) => {
    for (const end = performance.now() + 15000; !condition(); await new Promise((done) => setTimeout(done, 5))) {
      if (performance.now() > end) throw new Error(`the view ${view} is not drawn at ${location.hash}`);
    }
  };
  for (const address of addresses) {
    if (location.hash === address) continue;
    let before;
    addEventListener('popstate', () => { before = read(counter); }, { capture: true, once: true });
    const changed = new Promise((done) => addEventListener('hashchange', done, { once: true }));
    location.hash = address;
    await changed;
    if (view === 'trace') await until(() => !panel.querySelector('.trace-walker[data-pending]'));
    else await until(() => read(counter) > before && (!counts || read('ready') === read('drawn')));
  }
}"""

CHARTS = """() => Object.fromEntries([...document.querySelectorAll('main figure.chart:not([hidden])')].map((chart) => {
  const series = {};
  for (const mark of chart.querySelectorAll('.mark[data-series], .cell[data-series]')) {
    (series[mark.dataset.series] ??= []).push([Number(mark.dataset.index), mark.dataset.value]);
  }
  return [chart.id.replace('chart-', ''), { summary: chart.querySelector('.summary').textContent, series }];
}))"""


VIOLATIONS = """async (contrast) => {
  const rules = { 'color-contrast': { enabled: contrast } };
  const { violations } = await axe.run({ exclude: [['tbody tr:nth-child(n+3)']] }, { resultTypes: ['violations'], rules });
  return violations.filter((one) => ['serious', 'critical'].includes(one.impact))
    .map((one) => [one.id, one.nodes[0].html, one.nodes[0].failureSummary]);
}"""


TEXT = """(view) => {
  const panel = document.getElementById(`panel-${view}`);
  for (const bars of panel.querySelectorAll('.trace-bars')) bars.style.contentVisibility = 'visible';
  return panel.innerText;
}"""


CATCH_BLOBS = """() => {
  const make = URL.createObjectURL.original ?? URL.createObjectURL;
  window.blob = null;
  URL.createObjectURL = (blob) => make.call(URL, window.blob = blob);
  URL.createObjectURL.original = make;
}"""


class ExplorerPage:
    """Page of the explorer that records foreign requests, console errors and warnings.

    Args:
        page: an empty tab.
        address: address of the server, or of a folder.
        is_shared: the tests of a file share the page: `show` edits the address instead of loading the page.
        file: the page's file in the folder.
    """

    def __init__(self, page, address, *, is_shared=False, file=""):
        self.page, self.address, self.is_shared, self.file = page, address, is_shared, file
        self.console, self.foreign_requests = [], []
        page.on("console", lambda line: line.type in ("error", "warning") and self.console.append(line.text))
        page.on("pageerror", lambda error: self.console.append(str(error)))
        page.on("request", self._record_request)
        page.set_default_timeout(15_000)

    def _record_request(self, request):
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.foreign_requests.append(request.url)

    def reset(self):
        """Reset permissions, preferences, routes and dialogs that a test left."""
        self.page.context.clear_permissions()
        if self.page.url.startswith(self.address):
            self.page.unroute_all()
            self.page.evaluate(
                "localStorage.clear(); document.querySelectorAll('dialog').forEach((box) => box.close())"
            )

    def open(self, fragment="", ready="body"):
        """Load the page at an address."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}/{self.file}{fragment}")
        self.page.wait_for_selector(ready)
        return self.page

    def show(self, fragment, view="stack"):
        """Show a view at an address until it is drawn. A shared page goes home first, which resets its state."""
        if not self.is_shared or not self.page.url.startswith(self.address):
            return self.open(fragment, READY[view])
        self.page.evaluate(SHOW, [view, [HOME[view], fragment]])
        return self.page

    def stack(self, fragment="#v=1"):
        """Show the stack view."""
        return self.show(fragment)

    def recording(self, more=""):
        """Show the recording view."""
        return self.show(f"#v=1&view=recording{more}", "recording")

    def race(self, fragment, events=None):
        """Load the race view and run a race, or replay one from its events."""
        if events is not None:
            self.answer_race(events)
        page = self.open(fragment, READY["race"])
        self.run_race()
        return page

    def answer_race(self, events):
        """Answer the page's next races with these events, without training."""
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        self.page.unroute("**/api/race")
        self.page.route("**/api/race", lambda route: route.fulfill(content_type="text/event-stream", body=body))

    def run_race(self):
        """Start a race and wait for its end."""
        self.page.locator("#panel-race").get_by_role("button", name="Start").click()
        self.page.wait_for_selector("#panel-race[data-phase=over]")

    def set_sliders(self, fields, labels, values):
        """Move the sliders of parameters, whose bounds are those of the fields."""
        for name, value in values.items():
            slider = self.page.get_by_role("slider", name=labels.get(name, name.capitalize()), exact=True)
            bounds = [float(slider.get_attribute(bound)) for bound in ("min", "max")]
            assert bounds == [fields[name].minimum, fields[name].maximum]
            slider.fill(str(value))

    def after(self, act, *args, view="stack"):
        """Call a function and wait until the view is drawn again."""
        before = self.page.evaluate("view => Number(document.querySelector(`#panel-${view}`).dataset.ready ?? 0)", view)
        act(*args)
        self.page.wait_for_function(
            "([view, n]) => Number(document.querySelector(`#panel-${view}`).dataset.ready ?? 0) > n", arg=[view, before]
        )

    def download(self, name, within="body"):
        """Press a button in a part of the page and return the text of the file that it saves.

        The text is read from the page: without a person at the mouse, Chromium drops every eleventh download of a page.
        """
        self.page.evaluate(CATCH_BLOBS)
        self.page.locator(within).get_by_role("button", name=name).click()
        return self.page.evaluate("() => window.blob.text()")

    def run_code(self):
        """Run the code that the page shows; return what it prints, and its names."""
        self.click("Show code")
        code, names = self.page.locator("dialog pre").inner_text(), {}
        self.page.keyboard.press("Escape")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, names)
        return printed.getvalue(), names

    def text(self, view):
        """Return the text of a view, including parts that are out of sight."""
        return self.page.evaluate(TEXT, view)

    def wait_for_text(self, view, text):
        """Wait until a view has this text: some charts draw their axes a moment after they are shown."""
        self.page.wait_for_function(f"([view, text]) => ({TEXT})(view) === text", arg=[view, text])

    def pass_time(self, milliseconds):
        """Move the page's clock forward, as if the user had waited."""
        self.page.evaluate(
            "ms => { const now = performance.now.bind(performance); performance.now = () => now() + ms; }", milliseconds
        )

    def click(self, name):
        """Press a button."""
        self.page.get_by_role("button", name=name).click()

    def read(self, selector):
        """Return the text of an element."""
        return self.page.locator(selector).inner_text()

    def charts(self):
        """Return {chart: {series: values}} with None for missing marks and cells, and {chart: summary}, without hidden charts."""
        charts = self.page.evaluate(CHARTS)
        marks = {chart: {name: _values(pairs) for name, pairs in of["series"].items()} for chart, of in charts.items()}
        return marks, {chart: of["summary"] for chart, of in charts.items()}

    def marks(self, chart, series):
        """Return the values of a series' marks, with None where a mark is missing. A hidden chart has no marks."""
        return self.charts()[0].get(chart, {}).get(series, [])

    def violations(self, *, contrast=True):
        """Return the serious and critical violations that axe reports. Of a table only the first rows are checked."""
        if not self.page.evaluate("'axe' in window"):
            from axe_playwright_python.base import AXE_SCRIPT

            self.page.evaluate(AXE_SCRIPT)
        return self.page.evaluate(VIOLATIONS, contrast)

    def fragment(self):
        """Return the fragment of the address."""
        return self.page.evaluate("location.hash")

    def assert_clean(self):
        """Check that the page sent no foreign request and that the console is empty."""
        lines = [*self.foreign_requests, *self.console]
        self.foreign_requests.clear()
        self.console.clear()
        assert lines == []


def drawn(values):
    """Return the values of a series in the form of `ExplorerPage.charts`: without missing values at the end."""
    count = max((place for place, value in enumerate(values, 1) if value is not None), default=0)
    return [*values[:count]]


def _values(pairs):
    values = [None] * (1 + max(index for index, _ in pairs))
    for index, text in pairs:
        values[index] = float(text.replace("Infinity", "inf"))
    return values
