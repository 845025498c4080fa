"""Tests of the page around the views in Chromium: tabs, skip link, keys, themes, links, missing server, source files."""

import json
import re
from pathlib import Path

import pytest

from addnorm import explorer as package
from support.browser import READY
from support.explorer_requests import RACE_ADDRESS

STATIC = Path(package.__file__).parent / "static"


TAB = """() => {
  const all = (css) => [...document.querySelectorAll(css)];
  return [
    all('[role=tab][aria-selected=true]').map(tab => tab.textContent), document.activeElement.textContent,
    all('[role=tabpanel]').filter(one => one.checkVisibility()).map(one => document.getElementById(one.getAttribute('aria-labelledby')).textContent),
    all('[role=tab]').map(tab => tab.getAttribute('tabindex')).filter(value => value !== '-1'), document.title,
  ];
}"""


def test_tabs_by_arrow_keys(explorer):
    page = explorer.stack()
    page.get_by_role("tab").first.focus()
    for key, name in (("ArrowRight", "Streams"), ("End", "Race"), ("ArrowRight", "Stack"), ("ArrowLeft", "Race"), ("ArrowLeft", "Recording"), ("Home", "Stack")):  # fmt: skip
        page.keyboard.press(key)
        assert page.evaluate(TAB) == [[name], name, [name], ["0"], f"{name} · addnorm explorer"]
        assert page.get_by_role("tabpanel", name=name).is_visible()
    page.go_back()
    assert page.get_by_role("tab", selected=True).inner_text() == "Recording"


def test_skip_link_focuses_content(new_explorer):
    page = new_explorer.stack("#v=1&place=pre&S=4&d=8&T=2")
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the content")
    assert skip.evaluate("link => link.getBoundingClientRect().left") >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert new_explorer.read("#notices") == ""
    assert new_explorer.fragment() == "#v=1&place=pre&S=4&d=8&T=2", "the address holds the state"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('main') !== null")


def test_help_and_keys(explorer):
    page = explorer.stack()

    def press(key):
        page.keyboard.press(key)
        return "place=pre" in explorer.fragment()

    press("?")
    box = page.get_by_role("dialog")
    assert box.get_by_role("heading", name="Keys").is_visible()
    assert {"1", "6", "p", "←", "→", "?"} <= {*box.locator("kbd").all_inner_texts()}
    assert explorer.violations() == []
    for _ in range(6):  # the focus stays in the dialog or moves to the browser
        press("Tab")
        assert page.evaluate("document.activeElement === document.body || !!document.activeElement.closest('dialog')")
    assert not press("2"), "keys mean nothing behind a dialog"
    box.get_by_label("Enable single-key shortcuts").uncheck()
    press("Escape")
    assert box.count() == 0
    assert not press("2")
    explorer.click("Help and keys")
    box.get_by_label("Enable single-key shortcuts").check()
    press("Escape")
    assert press("2")


# Saved state, and state in the address.


def test_theme_is_kept(new_explorer):
    page = new_explorer.stack()
    page.emulate_media(color_scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    theme = page.get_by_role("button", name="Theme")
    theme.click()
    theme.click()
    assert theme.inner_text() == "Theme: dark"
    dark = page.evaluate(paper)
    assert dark != light
    new_explorer.stack()
    assert page.evaluate(paper) == dark
    assert theme.inner_text() == "Theme: dark"
    theme.click()
    assert (theme.inner_text(), page.evaluate(paper)) == ("Theme: auto", light)


def test_link_is_copied(explorer):
    page = explorer.stack("#v=1&S=8&T=4")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.keyboard.press("5")
    explorer.click("Copy link")
    page.wait_for_function("() => document.getElementById('notices').textContent.startsWith('The link copied')")
    assert page.evaluate("navigator.clipboard.readText()") == f"{explorer.address}/{explorer.fragment()}"
    assert explorer.fragment() == "#v=1&place=deepnorm&S=8&T=4"


ADDRESSES = {
    "stack": "#v=1&place=pre&norm=rms&S=16&d=24&T=3&gain=0.5&alpha=1.5&seed=7&res=0&final=off&depth=4&pins=place:none,S:4;as:first",
    "streams": "#v=1&view=streams&swiring=mhc&sS=6&sd=16&sn=2&moved=0.8&sseed=7&sdepth=3",
    "trace": "#v=1&view=trace&x=3,-1.5&F=0.5,1&gamma=0.5,-1&step=dx&times=2.5&plus=-1",
    "recording": "#v=1&view=recording&rstep=1&rdepth=2&rwhat=write.cosine&rwith=1",
    "race": f"{RACE_ADDRESS}&left=rezero&right=deepnorm&lr=0.01&warm=2&rseed=5&at=4",
}


@pytest.mark.parametrize("view", ADDRESSES)
def test_address_is_read_and_written(new_explorer, view):
    """Load an address with every setting, and write it again by showing another view and coming back."""
    page = new_explorer.open(ADDRESSES[view], READY[view])
    text = new_explorer.text(view)
    page.get_by_role("tab", selected=True).focus()
    for key in ("ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    assert {*new_explorer.fragment()[1:].split("&")} == {*ADDRESSES[view][1:].split("&")}
    new_explorer.wait_for_text(view, text)
    assert new_explorer.read("#notices") == ""


# Missing features.


def test_recording_view_without_files(new_explorer):
    def without(route):
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"recordings": []})

    new_explorer.page.route("**/api/meta", without)
    page = new_explorer.open("#v=1&view=recording", "#panel-recording h2")
    assert "addnorm explore minilm.json" in new_explorer.read("#panel-recording pre")
    assert new_explorer.violations() == []
    new_explorer.click("Show code")
    assert page.get_by_role("dialog").locator("pre").inner_text().startswith("#")
    page.keyboard.press("Escape")
    assert json.loads(new_explorer.download("JSON")) is None
    page.get_by_role("tab", name="Stack").click()
    page.wait_for_selector("#panel-stack[data-ready]")


def test_missing_server_is_reported(new_explorer):
    page = new_explorer.stack("#v=1&S=4&d=16&T=4")
    page.route("**/api/stack", lambda route: route.abort())
    page.get_by_role("radio", name="sandwich").check()
    alert = page.locator("#panel-stack .wrong")
    alert.wait_for()
    sentence = "The server does not answer. Is `addnorm explore` still running in its terminal?"
    assert alert.inner_text() == sentence
    opacities = "() => [...document.querySelectorAll('.stack-main > *')].map((one) => getComputedStyle(one).opacity)"
    assert set(page.evaluate(opacities)) == {"0.5", "1"}, "sentences and charts are dimmed, the alert is not"
    assert page.evaluate(opacities).count("1") == 1
    measured = json.loads(new_explorer.download("JSON"))["params"]
    assert measured["placement"] == "post", "the file holds what was measured, not what was requested"
    page.unroute("**/api/stack")
    new_explorer.after(page.get_by_role("radio", name="reordered").check)
    assert not alert.is_visible()
    assert set(page.evaluate(opacities)) == {"1"}
    page.route("**/api/meta", lambda route: route.abort())
    new_explorer.open("", "main .wrong")
    assert new_explorer.read("main .wrong") == sentence
    assert all("ERR_FAILED" in line for line in new_explorer.console)
    new_explorer.console.clear()


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
