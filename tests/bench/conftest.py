"""Fixtures of the benchmarks' tests: short timing loops, since no test asserts a time, and small copies on the CPU."""

import pytest

from addnorm.bench import gpu
from support.short_timing import SHORT


@pytest.fixture(scope="module", autouse=True)
def short_timing():
    with pytest.MonkeyPatch.context() as patch:
        for setting in SHORT:
            patch.setattr(*setting)
        patch.setitem(gpu.COPY_BYTES, "cpu", 4096)
        yield
