"""What every test shares: a seeded generator, and the profile of the property tests."""

import os

import pytest
import torch
from hypothesis import settings

# The same examples at every run; HYPOTHESIS_PROFILE=thorough looks for new ones.
settings.register_profile("default", derandomize=True, deadline=None, max_examples=150)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


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
