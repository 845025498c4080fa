"""Tests of the looks of wirings in charts: the same in reports, figures and the explorer."""

import re
from pathlib import Path

import addnorm
from addnorm._util.charts import LOOKS, NUM_LOOKS, choose_looks


def test_explorer_has_the_same_looks():
    text = (Path(addnorm.__file__).parent / "explorer/static/chart/looks.js").read_text()
    table = re.search(r"const LOOKS = \{(.*?)\};", text, re.DOTALL)[1]
    assert {name: int(number) for name, number in re.findall(r"(\w+): (\d+)", table)} == LOOKS
    assert f"NUM_LOOKS = {NUM_LOOKS};" in text
    assert set(LOOKS) <= set(addnorm.wirings.CONSTRUCTORS)


def test_looks_of_a_chart_are_distinct():
    names = ["post_ln", "mine", "mhc", "sandwich", "post_ln", *map(str, range(6))]
    looks = choose_looks(names)
    assert len({*looks}) == len(names)
    assert (looks[0], looks[2]) == (LOOKS["post_ln"], LOOKS["mhc"])
