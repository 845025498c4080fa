"""The explorer in a real browser: the system's Chromium, a page that is watched, and what is done in it."""

import os
import shutil

import pytest

MISSING = "there is no Chromium: `apt-get install chromium`, or name it in ADDNORM_CHROMIUM"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync",
             "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]  # fmt: skip
"""The last: nothing leaves the machine, and requests need not be held up for it, which would switch the browser's cache off."""


def chromium():
    """Its path; without one a test is skipped, and on CI it fails."""
    found = os.environ.get("ADDNORM_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(MISSING)
    return found


HOME = {
    "stack": "#v=1&S=2&d=8&T=1&seed=99",
    "trace": "#v=1&view=trace",
    "recording": "#v=1&view=recording&rstep=0&rdepth=1",
}
"""Where a page that stays open comes from: what the trace begins with, and what no test of the others looks at."""
READY = {
    "stack": "#panel-stack[data-ready]",
    "trace": "#panel-trace [data-step]",
    "recording": "#panel-recording[data-ready]",
}

EDIT = """fragment => new Promise(done => {
  const before = location.href;
  addEventListener('hashchange', () => done(), { once: true });  // the page's own listener was there before
  location.hash = fragment;
  if (location.href === before) done();
})"""


class Watched:
    """A page of the explorer, of which every request and every complaint is kept."""

    def __init__(self, page, address):
        self.page, self.address = page, address
        self.complaints, self.elsewhere = [], []
        page.on("console", lambda said: said.type in ("error", "warning") and self.complaints.append(said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._asked)
        page.set_default_timeout(15_000)

    def _asked(self, request):
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.elsewhere.append(request.url)

    def forget(self):
        """Undoes what pages before this one left in the browser: choices that are kept, and permissions."""
        self.page.context.clear_permissions()
        session = self.page.context.new_cdp_session(self.page)
        session.send("Storage.clearDataForOrigin", {"origin": self.address, "storageTypes": "local_storage"})
        session.detach()

    def open(self, fragment="", ready="body"):
        """The page at an address, as if it were typed."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}/{fragment}")
        self.page.wait_for_selector(ready)
        return self.page

    def edit(self, fragment):
        """Another address in the open page: nothing is loaded."""
        self.page.evaluate(EDIT, fragment)

    def look(self, fragment, view="stack"):
        """A view at an address in a page that stays open; by way of home, so that nothing is left of the address before."""

        def to(address):
            if view == "trace":  # it is drawn at once
                self.edit(address)
            else:
                self.after(lambda: self.edit(address), view)

        if not self.page.url.startswith(self.address):
            self.open(HOME[view], READY[view])
        elif self.fragment() != HOME[view]:
            to(HOME[view])
        to(fragment)
        return self.page

    def stack(self, fragment=""):
        """The stack view, when it has drawn."""
        return self.open(fragment, READY["stack"])

    def recording(self, more=""):
        """The recording view, when it has drawn."""
        return self.open(f"#v=1&view=recording{more}", READY["recording"])

    def race(self, more=""):
        """The race view, after a race of these settings."""
        page = self.open(f"#v=1&view=race{more}", "#panel-race h2")
        self.raced()
        return page

    def raced(self):
        """Starts a race, and waits for its end."""
        self.page.locator("#panel-race").get_by_role("button", name="Start").click()
        self.page.wait_for_selector("#panel-race[data-phase=over]")

    def after(self, act, view="stack"):
        """Does something, and waits until the view has drawn again."""
        before = self.ready(view)
        act()
        self.page.wait_for_function(
            "([view, n]) => Number(document.querySelector(`#panel-${view}`).dataset.ready ?? 0) > n", arg=[view, before]
        )

    def ready(self, view="stack"):
        """How often the view has drawn."""
        return self.page.evaluate("view => Number(document.querySelector(`#panel-${view}`).dataset.ready ?? 0)", view)

    def marks(self, chart, series):
        """The values of the marks of a series, None where there is none; words for what is no number. A hidden chart has none."""
        found = self.page.eval_on_selector_all(
            f'#chart-{chart}:not([hidden]) .mark[data-series="{series}"]',
            "all => all.map(m => [Number(m.dataset.index), m.dataset.value])",
        )
        values = [None] * (1 + max((index for index, _ in found), default=-1))
        for index, text in found:
            values[index] = float(text.replace("Infinity", "inf"))
        return values

    def fragment(self):
        """What stands in the address."""
        return self.page.evaluate("location.hash")

    def unharmed(self):
        """Nothing was asked of anybody else, and nothing complained."""
        assert self.elsewhere == []
        assert self.complaints == []
