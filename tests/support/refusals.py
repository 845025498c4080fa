"""Check of a refusal: the class of the error, and one sentence."""

import pytest


def assert_refused(sentence, call):
    """Check that a call is refused: `sentence` is a part of "ValueError: d_model is 0, expected a whole number from 1."."""
    with pytest.raises((TypeError, ValueError)) as refusal:
        call()
    text = f"{type(refusal.value).__name__}: {refusal.value}"
    assert sentence in text
    assert text.endswith(".")
    assert "\n" not in text
    assert ". " not in text
