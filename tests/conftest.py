"""What every test shares: a seeded generator, and the profile of the property tests."""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from support import explorer_process, explorer_recordings
from support.browser import ARGUMENTS, Watched, chromium
from support.order import sort_slowest_first

# Programs that tests start import `support` too.
TESTS = str(Path(__file__).parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (TESTS, os.environ.get("PYTHONPATH"))))

# Before Triton is imported, by whatever: without a GPU its kernels are interpreted, on the CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples at every run; HYPOTHESIS_PROFILE=thorough looks for new ones.
settings.register_profile("default", derandomize=True, deadline=None, max_examples=150)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(items):
    """In every process the same."""
    sort_slowest_first(items)


@pytest.fixture(autouse=True)
def seeded():
    """A test's random numbers are its own, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def threads():
    """A function that sets the number of threads; the number comes back after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# The explorer: pytest-playwright's fixtures, with the system's Chromium.


@pytest.fixture(scope="session")
def browser_type_launch_args(browser_type_launch_args):
    """How it is started."""
    return browser_type_launch_args | {"executable_path": chromium(), "args": ARGUMENTS}


@pytest.fixture(scope="session")
def browser_context_args(browser_context_args):
    """Nothing moves by itself: a test would click where something was."""
    return browser_context_args | {"reduced_motion": "reduce"}


@pytest.fixture(scope="session")
def base_url():
    """None: tests give whole addresses. (The plugin's own is written in a way that pytest 9 warns of.)"""


@pytest.fixture(scope="session")
def recordings(tmp_path_factory):
    """What the explorer shows in its second view, in the order of its files."""
    return explorer_recordings.made(tmp_path_factory.mktemp("recordings"))


@pytest.fixture(scope="session")
def served(recordings):
    """The address of `addnorm explore`, which runs while the tests do."""
    files = [argument for path in recordings for argument in ("--recording", path)]
    with explorer_process.running(*files) as address:
        yield address


@pytest.fixture(scope="session")
def window(browser, browser_context_args):
    """Where the pages are opened: what one has loaded is at hand for the next."""
    context = browser.new_context(**browser_context_args)
    yield context
    context.close()


@contextmanager
def watched(window, served):
    page = window.new_page()
    found = Watched(page, served)
    found.forget()
    yield found
    page.close()


@pytest.fixture
def explorer(served, window):
    """A page of it; at the end nothing may have left the machine, and nothing complained."""
    with watched(window, served) as found:
        yield found
    found.unharmed()


@pytest.fixture(scope="module")
def open_explorer(served, window):
    """One for all tests of a file that only look."""
    with watched(window, served) as found:
        yield found


@pytest.fixture
def looked(open_explorer):
    """A page that is loaded once in a file: a test that only looks edits the address and leaves nothing else behind."""
    yield open_explorer
    open_explorer.unharmed()
