"""Marks of tests in several files."""

import pytest

from addnorm.ops import cpu

needs_kernels = pytest.mark.skipif(cpu.ISA is None, reason=f"the C++ kernels: {cpu.DETAIL}")
