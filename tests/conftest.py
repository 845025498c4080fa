"""Fixtures and settings for all tests: a seeded generator, Triton's interpreter, hypothesis profiles, the explorer's pages."""

import gc
import hashlib
import os
import tempfile
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

# torch's cache of compiled graphs does not notice when the schema of an operator changes: each schema has a cache of its own.
OPS = Path(__file__).parent.parent / "src" / "addnorm" / "ops"
SCHEMA = hashlib.sha256((OPS / "options.py").read_bytes() + (OPS / "schema.py").read_bytes()).hexdigest()[:12]
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / f"addnorm-inductor-{SCHEMA}")

# This must run before any import of Triton: without a GPU its kernels are interpreted on the CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples in every run; HYPOTHESIS_PROFILE=thorough draws new ones.
settings.register_profile("default", derandomize=True, deadline=None, max_examples=150)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(items):
    """Sort the tests, in the same order in every process."""
    sort_slowest_first(items)


@pytest.fixture(autouse=True)
def seeded():
    """Seed torch's generator before each test."""
    torch.manual_seed(0)


@pytest.fixture
def threads():
    """Return `torch.set_num_threads`; restore the number of threads after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def frozen_heap():
    """Exclude all objects that are alive from garbage collection: collections during the test see only new objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# The explorer: pytest-playwright's fixtures, with the system's Chromium.


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
    """Return the paths of the recordings in the explorer's second view, in order."""
    return explorer_recordings.made(tmp_path_factory.mktemp("recordings"))


@pytest.fixture(scope="session")
def served(recordings):
    """Yield the address of an `addnorm explore` that runs for the whole session."""
    files = [argument for path in recordings for argument in ("--recording", path)]
    with explorer_process.running(*files) as address:
        yield address


@pytest.fixture(scope="session")
def window(browser, browser_context_args):
    """Yield the browser context in which pages are opened; its pages share a cache."""
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
    """Yield a new page; after the test, check for foreign requests and console messages."""
    with watched(window, served) as found:
        yield found
    found.unharmed()


@pytest.fixture(scope="module")
def open_explorer(served, window):
    """Yield one page for all read-only tests of a file."""
    with watched(window, served) as found:
        yield found


@pytest.fixture
def looked(open_explorer):
    """Yield a page that is loaded once per file. A test that uses it edits the address and leaves no other state."""
    yield open_explorer
    open_explorer.unharmed()
