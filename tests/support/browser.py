"""Helpers that run the explorer in the system's Chromium and record a page's requests and console messages."""

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
    found = os.environ.get("ADDNORM_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(MISSING)
    return found


HOME = {
    "stack": "#v=1&S=2&d=8&T=1&seed=99",
    "trace": "#v=1&view=trace",
    "recording": "#v=1&view=recording&rstep=0&rdepth=1",
}
"""Addresses to which a shared page returns between tests; no test uses them otherwise."""
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
    """Page of the explorer that records foreign requests, console errors and warnings."""

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
        """Reset preferences and permissions that earlier pages left in the browser."""
        self.page.context.clear_permissions()
        session = self.page.context.new_cdp_session(self.page)
        session.send("Storage.clearDataForOrigin", {"origin": self.address, "storageTypes": "local_storage"})
        session.detach()

    def open(self, fragment="", ready="body"):
        """Load the page at an address."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}/{fragment}")
        self.page.wait_for_selector(ready)
        return self.page

    def edit(self, fragment):
        """Change the address of the open page without loading it."""
        self.page.evaluate(EDIT, fragment)

    def look(self, fragment, view="stack"):
        """Show a view at an address in a shared page. The view's home address is loaded first to reset its state."""

        def to(address):
            if view == "trace":  # the view is drawn at once
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
        """Load the stack view and wait until it is drawn."""
        return self.open(fragment, READY["stack"])

    def recording(self, more=""):
        """Load the recording view and wait until it is drawn."""
        return self.open(f"#v=1&view=recording{more}", READY["recording"])

    def race(self, more=""):
        """Load the race view and run a race."""
        page = self.open(f"#v=1&view=race{more}", "#panel-race h2")
        self.raced()
        return page

    def raced(self):
        """Start a race and wait for its end."""
        self.page.locator("#panel-race").get_by_role("button", name="Start").click()
        self.page.wait_for_selector("#panel-race[data-phase=over]")

    def after(self, act, view="stack"):
        """Call a function and wait until the view is drawn again."""
        before = self.ready(view)
        act()
        self.page.wait_for_function(
            "([view, n]) => Number(document.querySelector(`#panel-${view}`).dataset.ready ?? 0) > n", arg=[view, before]
        )

    def ready(self, view="stack"):
        """Return how often the view was drawn."""
        return self.page.evaluate("view => Number(document.querySelector(`#panel-${view}`).dataset.ready ?? 0)", view)

    def marks(self, chart, series):
        """Return the values of a series' marks, with None where a mark is missing. A hidden chart has no marks."""
        found = self.page.eval_on_selector_all(
            f'#chart-{chart}:not([hidden]) .mark[data-series="{series}"]',
            "all => all.map(m => [Number(m.dataset.index), m.dataset.value])",
        )
        values = [None] * (1 + max((index for index, _ in found), default=-1))
        for index, text in found:
            values[index] = float(text.replace("Infinity", "inf"))
        return values

    def fragment(self):
        """Return the fragment of the address."""
        return self.page.evaluate("location.hash")

    def unharmed(self):
        """Check that the page sent no foreign request and that the console is empty."""
        assert self.elsewhere == []
        assert self.complaints == []
