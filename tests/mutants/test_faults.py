"""Check that every planted fault of tests/mutants/faults.py still applies to the source."""

from mutants.run import find_problems


def test_each_fault_applies_exactly_once():
    assert find_problems() == []
