"""Tests of the browser helper: it detects foreign requests and console errors, and shows what a loaded page shows."""

import pytest


def test_foreign_requests_and_console_errors_are_caught(new_explorer):
    from playwright.sync_api import Error

    page = new_explorer.stack("#v=1&S=4&d=8&T=2")
    for lines in ("console.warn('oh')", "setTimeout(() => { throw new Error('oh'); })"):
        page.evaluate(f"() => {{ {lines}; return new Promise(done => setTimeout(done, 50)); }}")
        assert new_explorer.console == ["oh"]
        with pytest.raises(AssertionError):
            new_explorer.assert_clean()
    other = f"{new_explorer.address.replace('127.0.0.1', 'localhost')}/"  # the server would respond to its host name
    with pytest.raises(Error, match="ERR_NAME_NOT_RESOLVED"):
        page.goto(other)
    assert new_explorer.foreign_requests == [other]
    new_explorer.foreign_requests.clear()
    new_explorer.console.clear()
    page.wait_for_url("chrome-error://**")
