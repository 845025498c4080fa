"""Check of a refusal: the class of the error, and one sentence."""

import pytest


def assert_raises(sentence, call):
    """Check that a call raises an error with a part of "ValueError: d_model is 0, expected ..."; return the whole."""
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    text = f"{type(raised.value).__name__}: {raised.value}"
    assert sentence in text, text
    return text


def assert_refused(sentence, call):
    """Check that a call is refused: `sentence` is a part of "ValueError: d_model is 0, expected a whole number from 1."."""
    text = assert_raises(sentence, call)
    assert text.endswith(".")
    assert "\n" not in text
    assert ". " not in text


def make_test(refused):
    """Return the test that each call of a table is refused with its sentence, the first of its keys if it has several."""

    @pytest.mark.parametrize("key", refused)
    def test(key):
        assert_refused(key if isinstance(key, str) else key[0], refused[key])

    return test
