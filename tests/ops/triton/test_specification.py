"""The tests of the functions in these files, run again with the Triton kernels in the interpreter."""

# ruff: noqa: F403 - what is tested there is tested here

import pytest
import torch

from functional.test_edges import *
from functional.test_functional import *
from functional.test_inplace import *
from ops.test_autograd import *
from ops.test_philox import *
from support.triton_interpreter import Interpreted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted: test_cuda.py runs on the GPU"),
]

del test_contiguous_memory_is_overwritten_without_any_new  # noqa: F821 - the interpreter copies what a kernel writes


@pytest.fixture(autouse=True)
def on_triton():
    """Replace the operators by Triton's."""
    with Interpreted():
        yield
