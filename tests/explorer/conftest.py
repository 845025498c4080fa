"""Fixtures of the explorer's tests: recordings, a server, and its page in the system's Chromium."""

import pytest

from addnorm.explorer.race import parse, run_race
from support import explorer_process, explorer_recordings
from support.browser import ARGUMENTS, ExplorerPage, chromium
from support.explorer_requests import SMALL_RACE


@pytest.fixture(scope="session")
def browser_type_launch_args(browser_type_launch_args):
    """Return the launch arguments with the system's Chromium."""
    return browser_type_launch_args | {"executable_path": chromium(), "args": ARGUMENTS}


@pytest.fixture(scope="session")
def browser_context_args(browser_context_args):
    """Return the context arguments with reduced motion: a test must not click where a moving element was."""
    return browser_context_args | {"reduced_motion": "reduce"}


@pytest.fixture(scope="session")
def base_url():
    """Return None: tests use absolute addresses, and pytest 9 warns about the plugin's own fixture."""


@pytest.fixture(scope="session")
def recordings(tmp_path_factory):
    """Return {path: recording} for the recording view, in order."""
    return explorer_recordings.write_recordings(tmp_path_factory.mktemp("recordings"))


@pytest.fixture(scope="session")
def race_events():
    """Return the events of a small race, for tests that do not need the server to train."""
    return [*run_race(parse(SMALL_RACE))]


@pytest.fixture(scope="module")
def server_address(recordings):
    """Yield the address of the explorer's server, which runs in a thread."""
    with explorer_process.serve_in_thread(recordings) as address:
        yield address


@pytest.fixture(scope="session")
def context(browser, browser_context_args):
    """Yield the browser context in which all pages are opened; they share a cache."""
    context = browser.new_context(**browser_context_args)
    yield context
    context.close()


@pytest.fixture(scope="module")
def shared_page(server_address, context):
    """Yield the page that the tests of a file share."""
    page = ExplorerPage(context.new_page(), server_address, is_shared=True)
    yield page
    page.page.close()


@pytest.fixture
def explorer(shared_page):
    """Yield the shared page. A test that uses it leaves no state but the address, its history, dialogs, and routes."""
    yield shared_page
    shared_page.reset()
    shared_page.assert_clean()


@pytest.fixture
def new_explorer(server_address, context):
    """Yield a new page."""
    page = ExplorerPage(context.new_page(), server_address)
    yield page
    page.reset()
    page.page.close()
    page.assert_clean()
