"""The explorer in a real browser: the system's Chromium, a page that is watched, and what is done in it."""

import os
import shutil

import pytest

MISSING = "there is no Chromium: `apt-get install chromium`, or name it in ADDNORM_CHROMIUM"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip


def chromium():
    """Its path; without one a test is skipped, and on CI it fails."""
    found = os.environ.get("ADDNORM_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(MISSING)
    return found


class Watched:
    """A page of the explorer, of which every request and every complaint is kept."""

    def __init__(self, page, address):
        self.page, self.address = page, address
        self.complaints, self.elsewhere = [], []
        page.on("console", lambda said: said.type in ("error", "warning") and self.complaints.append(said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.set_default_timeout(15_000)
        page.route("**/*", self._route)

    def _route(self, route):
        if route.request.url.startswith((self.address, "data:", "blob:")):
            route.continue_()
        else:
            self.elsewhere.append(route.request.url)
            route.abort()

    def open(self, fragment="", ready="body"):
        """The page at an address, as if it were typed."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}/{fragment}")
        self.page.wait_for_selector(ready)
        return self.page

    def stack(self, fragment=""):
        """The stack view, when it has drawn."""
        return self.open(fragment, "#panel-stack[data-ready]")

    def recording(self, more=""):
        """The recording view, when it has drawn."""
        return self.open(f"#v=1&view=recording{more}", "#panel-recording[data-ready]")

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
        """The values of the marks of a series, None where there is none; words for what is no number."""
        found = self.page.eval_on_selector_all(
            f'#chart-{chart} .mark[data-series="{series}"]',
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
