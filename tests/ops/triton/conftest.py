"""Fixtures of the tests of the Triton kernels."""

import pytest
import torch


@pytest.fixture
def on_triton():
    """Replace the operators by Triton's, interpreted on the CPU."""
    if torch.cuda.is_available():
        pytest.skip("nothing is interpreted: test_cuda.py and test_streams_cuda.py run on the GPU")
    from support.triton_interpreter import Interpreted  # which imports Triton

    with Interpreted() as mode:
        yield mode
