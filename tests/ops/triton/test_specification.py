"""The tests of the functions in these files, run again with the Triton kernels in the interpreter."""

# ruff: noqa: F403 - what is tested there is tested here

import pytest

from functional.test_edges import *
from functional.test_functional import *
from functional.test_inplace import *
from ops.test_autograd import *
from ops.test_philox import *

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_triton")]

del test_contiguous_memory_is_overwritten_without_any_new  # noqa: F821 - the interpreter copies what a kernel writes
# Empty tensors are left to the reference, which sums gradients of weights that are not there: here of more features than memory.
del test_rows_of_any_size_are_no_rows  # noqa: F821
