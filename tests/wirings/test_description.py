"""Tests of descriptions of wirings."""

import pytest

from addnorm import Row, Wiring, wirings
from addnorm.wirings import Stage

SUM = "So the stream is a plain sum: x_0 and every write."
NO_SUM = "no plain sum of writes"
# docs/wirings.md has the descriptions of all wirings with their default options.
CASES = [
    (wirings.pre_ln(), SUM),
    (wirings.post_ln(), NO_SUM),
    (wirings.parallel(2), "reads its own norm of the stream;", SUM),
    (wirings.mhc(2, "mean"), "The 2 streams", "the norm of the mean of the streams.", NO_SUM),
    (wirings.mhc(single_pass=True), "with weights c⁻ that the sublayer before computed;", NO_SUM),
    (wirings.attention_residuals(2, True, 3), "what it returns is added to the newest state.",
     "has 3 inputs, each the norm of a sum of the norms of all states so far with its own weights p;"),
    (Wiring("own", lambda at: Row(b=1 / at.number)), "b_l: from 1 to 0.08333 in 12 layers, from 1 to 0.01 in 100.", SUM),
    (Wiring("own", Stage(2, (1, 0), ((0, 1), (1, 0)), (1, 0)), embedding=(1.0, 0.5)), "begin as multiples", "; u becomes v.", NO_SUM),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case[0]))
def test_description_follows_the_stages(case):
    wiring, *facts = case
    described = wiring.describe()
    assert [fact for fact in facts if fact not in described] == []
    for sentence in (SUM, NO_SUM):
        assert (sentence in described) == any(sentence in fact for fact in facts), sentence
