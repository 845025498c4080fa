"""Fixtures of the benchmarks' tests: short timing loops, since no test asserts a time, and small copies on the CPU."""

import gc

import pytest

from addnorm.bench import exactness, gpu, operation, timing


@pytest.fixture(scope="module", autouse=True)
def short_timing():
    """Time single calls of small tensors, without full garbage collections and without new processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "SEGMENT_MS", 0.01)
        patch.setattr(gc, "collect", lambda *_: 0)
        patch.setattr(exactness, "import_ms", lambda: 1.0)
        patch.setattr(exactness, "SHAPE", (64, 32))
        patch.setattr(operation, "PAUSE_SECONDS", 0.0)
        patch.setitem(gpu.COPY_BYTES, "cpu", 4096)
        yield
