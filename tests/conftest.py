"""Fixtures and settings for all tests: generator, compiler, garbage collection, Triton's interpreter, hypothesis profiles."""

import gc
import hashlib
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from _pytest.doctest import DoctestModule
from hypothesis import settings

# Imports and compilations make many objects; with Python's default thresholds collections took a tenth of the suite's time.
gc.set_threshold(200_000, 20, 20)

# Programs that tests start import `support` too.
TESTS = str(Path(__file__).parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (TESTS, os.environ.get("PYTHONPATH"))))

# torch's cache of compiled graphs does not notice when the schema or the formula of an operator changes: each has a cache of its own.
OPS = Path(__file__).parent.parent / "src" / "addnorm" / "ops"
SCHEMA = hashlib.sha256(
    b"".join(
        (OPS / name).read_bytes()
        for name in (
            "formulas.py",
            "compile_mode.py",
            "options.py",
            "schema.py",
            "streams/schema.py",
            "../_util/norms.py",
        )
    )
).hexdigest()[:12]
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / f"addnorm-inductor-{SCHEMA}")

# Otherwise each process that uses Inductor compiles a program for each instruction set, and imports torch once more to load it.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# torch's compiler measures how long the guards of each graph take, behind emptied caches of the CPU, and collects garbage after it.
torch._C._dynamo.guards.profile_guard_manager = lambda *_: 0.0
os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"

# This must run before any import of Triton: without a GPU its kernels are interpreted on the CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples in every run; HYPOTHESIS_PROFILE=thorough draws new ones.
settings.register_profile("default", derandomize=True, deadline=None, max_examples=150)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Look for doctests in the package only: the tests have none, and looking for them would import every file twice."""
    collectors = yield
    return [collector for collector in collectors if not isinstance(collector, DoctestModule)]


@pytest.fixture
def operator_mode():
    """Make calls in compiled graphs the operator, which has the bits of eager calls."""
    from addnorm import set_compile_mode

    set_compile_mode("op")
    yield
    set_compile_mode(None)


@pytest.fixture(autouse=True)
def seeded():
    """Seed torch's generator before each test."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Forget compiled graphs after each test: other sizes would compile slower, and eight graphs of a function are the limit."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def threads():
    """Return `torch.set_num_threads`; restore the number of threads after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(threads):
    """Run on one thread, which small models need."""
    threads(1)


@pytest.fixture
def frozen_heap():
    """Exclude all objects that are alive from garbage collection: collections during the test see only new objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
