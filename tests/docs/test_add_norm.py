"""Tests of docs/add_norm.md: numbers of the results and of the code."""

import re

import pytest
import torch

import addnorm
from addnorm.trace import PRESETS
from support.loading import ROOT, load

PAGE = ROOT / "docs/add_norm.md"


def test_refuted_advantage_is_called_refuted(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs/_build")
    assert load("docs/_build/arguments.py").verdict_words("refuted", "refuted") == "refuted"


def test_shape_rule_is_the_sentence_of_the_library():
    sentence = re.search(r"^> (branch has .*)$", PAGE.read_text(), re.M)[1]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        addnorm.add_layer_norm(torch.zeros(2, 4), torch.zeros(2, 5))


def test_second_example_has_the_numbers_of_the_trace():
    t, page = PRESETS["lesson-001"].trace(), PAGE.read_text()
    for name, places in (("z", 2), ("centred", 2), ("squares", 4), ("normalized", 4)):
        assert f"[{', '.join(f'{value:.{places}f}' for value in t[name].value)}]" in page, name
    assert f"= {t['mean'].value:.2f} |" in page
    assert f"= {t['variance'].value:.4f} |" in page
    assert f"| {t['root'].value:.4f} |" in page
    rounded = [f"{value / 1.04:.4f}" for value in t["centred"].value]
    assert f"dividing by 1.04 gives [{', '.join(rounded)}]" in page
