"""Tests of the browser helper: it detects foreign requests and console errors, and resets preferences."""

import pytest
from playwright.sync_api import Error


def test_foreign_requests_are_caught(explorer):
    page = explorer.stack("#v=1&S=4&d=8&T=2")
    other = f"{explorer.address.replace('127.0.0.1', 'localhost')}/"  # the server would respond to its host name
    with pytest.raises(Error, match="ERR_NAME_NOT_RESOLVED"):
        page.goto(other)
    assert explorer.elsewhere == [other]
    with pytest.raises(AssertionError):
        explorer.unharmed()
    explorer.elsewhere.clear()
    explorer.complaints.clear()


@pytest.mark.parametrize("harm", ["console.warn('oh')", "setTimeout(() => { throw new Error('oh'); })"])
def test_console_errors_are_caught(explorer, harm):
    page = explorer.stack("#v=1&S=4&d=8&T=2")
    page.evaluate(f"() => {{ {harm}; return new Promise(done => setTimeout(done, 50)); }}")
    assert explorer.complaints == ["oh"]
    explorer.complaints.clear()


def test_preferences_are_reset_between_tests(explorer):
    page = explorer.stack("#v=1&S=4&d=8&T=2")
    page.evaluate("localStorage.setItem('addnorm-theme', 'dark')")
    explorer.forget()
    assert page.evaluate("localStorage.length") == 0


def test_edited_address_equals_opened_address(explorer, looked):
    for view, fragment in (
        ("stack", "#v=1&place=pre&S=6&d=8&T=2&pins=place:post,S:4"),
        ("trace", "#v=1&view=trace&x=1,2&F=3,-5&tplace=pre"),
    ):
        looked.look(fragment, view)
        page = explorer.open(fragment, f"#panel-{view} h2")
        page.wait_for_selector(
            f"#panel-{view}" + ("[data-ready]" if view == "stack" else " .trace-walker:not([data-pending])")
        )
        panels = [one.page.locator(f"#panel-{view}") for one in (looked, explorer)]
        for _ in range(60):  # charts out of sight are drawn a moment later
            texts = [panel.inner_text() for panel in panels]
            if texts[0] == texts[1]:
                break
            page.wait_for_timeout(50)
        assert texts[0] == texts[1]
        assert looked.fragment() == explorer.fragment() == fragment
