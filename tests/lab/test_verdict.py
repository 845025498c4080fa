"""addnorm.lab.verdict: each sentence follows from numbers, both ways; planted results, nothing is trained."""

import math
import random
import statistics

import pytest
from rich.console import Console

from addnorm.lab.verdict import Difference, difference, ratio, share
from support.lab_runs import compared, planted

INF = math.inf


def said(about, *runs, **protocol):
    """The sentences about something."""
    return [one.sentence for one in compared(*runs, **protocol).verdict if one.about == about]


def seeds(wiring, *losses, **options):
    return [planted(wiring, loss, seed=seed, diverged=loss == INF, **options) for seed, loss in enumerate(losses)]


def test_what_it_is_follows_from_the_protocol():
    (one,) = said("scope", planted("a"))
    assert one.startswith("An illustration, not evidence: 1 run of 10 steps (1 depth, 1 learning rate, 1 seed;")
    many = seeds("a", 1.0, 1.1, 1.2) + seeds("a", 1.0, 1.1, 1.2, lr=3e-3)
    (one,) = said("scope", *many, seeds=(0, 1, 2), rates=(1e-3, 3e-3))
    assert one.startswith("6 runs of 10 steps (1 depth, 2 learning rates, 3 seeds;")
    assert "illustration" not in one
    (one,) = said("scope", *many, seeds=(0, 1), rates=(1e-3, 3e-3))
    assert one.startswith("An illustration")
    assert "nothing was trained" in said("scope")[0]


@pytest.mark.parametrize(
    ("a", "b", "clear"),
    [
        ([1.0], [1.2], True),
        ([1.0], [1.09], False),
        ([1.0, 1.0], [1.2, 1.2], True),
        ([1.0, 1.0], [1.05, 1.13], False),
        ([1.0, 1.5, 2.0], [1.05, 1.55, 2.05], True),  # paired: the seeds differ, the difference does not
        ([1.0, 1.0, 1.0], [1.005, 1.005, 1.005], False),  # sure and nothing
        ([1.0, 1.0, 1.0], [1.0, 1.1, 1.3], False),  # 1.5 standard errors
        (
            [1.0, 1.0, 1.0],
            [1.05, 1.1, 1.18],
            False,
        ),  # 2.9 standard errors, which of three seeds are chance in one of ten
        ([1.0, 1.0, 1.0], [1.08, 1.1, 1.12], True),
        ([1.0, 1.0], [1.0, INF], True),
        ([INF, 1.0], [1.0, INF], False),
        ([INF, INF], [INF, INF], False),
    ],
)
def test_wirings_are_told_apart_only_where_it_is_more_than_chance(a, b, clear):
    runs = [*seeds("a", *a), *seeds("b", *b)]
    (one,) = said("loss", *runs)
    if clear:
        assert one.startswith("At 2 layers a ends lowest, below b: a 1")
    elif INF in a and INF in b:
        assert one.startswith("At 2 layers no wiring trained with every seed: a diverged")
    else:
        assert one.startswith("At 2 layers a and b are not told apart: a ")
    (turned,) = said("loss", *seeds("a", *b), *seeds("b", *a))
    assert ("b ends lowest, below a" in turned) == clear


def test_of_three_equal_wirings_seldom_one_is_told_apart():
    draws = random.Random(0)
    false = 0
    for _ in range(1000):
        found = [draws.gauss(0, 1) for _ in range(3)]
        false += Difference(statistics.fmean(found), statistics.stdev(found) / math.sqrt(3), 3).clear
    assert 25 <= false <= 75, "five of a hundred"


def test_those_that_are_level_with_the_best_are_named():
    runs = [planted("a", 1.0), planted("b", 1.05), planted("c", 2.0), planted("d", INF, diverged=True)]
    assert said("loss", *runs) == [
        "At 2 layers a ends lowest, below c and d; b is not told apart from it: a 1.000 (rate 0.001, no warm-up), b 1.050 "
        "(rate 0.001, no warm-up), c 2.000 (rate 0.001, no warm-up), d diverged (rate 0.001, no warm-up), in nats a character."
    ]
    assert said("loss", planted("a")) == [], "of one wiring there is nothing to rank"


def test_where_nothing_was_learned_nothing_is_ranked():
    (one,) = said("loss", planted("a", 2.71), planted("b", 2.95))
    assert one.startswith("At 2 layers no wiring learned more than how often each character occurs: a 2.710")
    assert "a ends lowest" in said("loss", planted("a", 2.69), planted("b", 2.95))[0]


def test_each_depth_has_its_own_verdict():
    runs = [planted("a", 1.0), planted("b", 2.0), planted("a", 2.0, n=4), planted("b", 1.0, n=4)]
    first, second = said("loss", *runs)
    assert "At 2 layers a ends lowest" in first
    assert "At 4 layers b ends lowest" in second


def test_a_wiring_is_chosen_on_validation_and_judged_on_test():
    runs = [planted("a", 1.0, lr=1e-3, validation=1.5), planted("a", 1.4, lr=1e-2, validation=1.3), planted("b", 1.2)]
    found = compared(*runs)
    arm = found.arms[0]
    assert (arm.best.lr, arm.best.loss()) == (1e-2, 1.4)
    assert "b ends lowest, below a" in said("loss", *runs)[0]


def test_a_setting_that_diverged_once_is_not_chosen():
    runs = [*seeds("a", 1.0, INF, 1.0, lr=1e-2), *seeds("a", 2.0, 2.0, 2.0, lr=1e-3)]
    assert compared(*runs).arms[0].best.lr == 1e-3
    assert said("failures", *runs) == ["1 of 6 runs of a diverged."]


@pytest.mark.parametrize(
    ("without", "with_it", "says"),
    [
        (INF, 1.0, "a needs it (diverged without, 1.000 with)"),
        (1.5, 1.0, "a gains by it (1.500 without, 1.000 with)"),
        (1.0, 1.5, "a loses by it (1.000 without, 1.500 with)"),
        (1.0, INF, "a loses by it (1.000 without, diverged with)"),
        (1.0, 1.05, "a is not told apart with and without it (1.000 without, 1.050 with)"),
        (INF, INF, "a diverges either way"),
    ],
)
def test_what_warm_up_brings(without, with_it, says):
    runs = [
        planted("a", loss, warm_up=warm_up, diverged=loss == INF) for loss, warm_up in ((without, 0), (with_it, 100))
    ]
    assert said("warm-up", *runs) == [f"Warm-up, at 2 layers: {says}."]
    assert said("warm-up", runs[0]) == said("warm-up", runs[1]) == []


def test_runs_that_learned_nothing_are_counted_by_the_frequencies_of_the_characters():
    nothing = said("failures", planted("a", 2.75), planted("b", 2.69))
    assert len(nothing) == 1
    assert nothing[0].startswith("The run of a learned nothing: less than 0.1 nats below 2.80")
    assert said("failures", planted("a", 2.69), planted("b", 1.0)) == []


@pytest.mark.parametrize(
    ("losses", "edge"),
    [((1.0, 1.5, 2.0), True), ((1.5, 1.0, 2.0), False), ((2.0, 1.5, 1.0), True), ((INF, INF, INF), False)],
)
def test_a_best_rate_at_the_edge_of_the_grid_is_told(losses, edge):
    runs = [
        planted("a", loss, lr=lr, diverged=loss == INF) for loss, lr in zip(losses, (1e-3, 3e-3, 1e-2), strict=True)
    ]
    assert bool(said("grid", *runs)) == edge
    assert said("grid", runs[0]) == [], "one rate is no grid"


RECORDED = {"steps": [0], "moved": [0.1], "gradient": [[1.0, None, 4.0]]}
AFTER = {
    "gradient": [30.0, None, 1.0],
    "map": {"sources": ["x_0", "one", "two", "norm biases"], "shares": [[1, 0, 0, 0], [0.5, 0.2, 0.004, 0.296]]},
}


def test_the_gradient_and_the_shares_are_those_that_were_measured():
    run = planted("a", recorded=RECORDED, after=AFTER, ablation=[{"rise": 0.5}, {"rise": 0.1}, {"rise": math.nan}])
    (gradient,), (memory,), (ablated,) = (said(about, run) for about in ("gradient", "memory", "ablation"))
    assert "0.25" in gradient
    assert "30" in gradient
    assert "(without warm-up)" in gradient
    assert "x_0 has 50 % and the last write 0.4 %" in memory
    assert "a +0.300 in the median, +0.500 at most" in ablated
    assert "(without warm-up)" not in said("gradient", {**run, "settings": {**run["settings"], "warm_up": 5}})[0]


def test_of_runs_in_which_nothing_was_recorded_nothing_is_said():
    found = {one.about for one in compared(planted("a", 1.0), planted("b", 2.0)).verdict}
    assert found == {"scope", "loss"}


def test_ratio_and_share_of_what_there_is():
    assert ratio(None) is None
    assert ratio({"gradient": [1.0, None]}) is None
    assert ratio({"gradient": [1.0, 0.0]}) is None
    assert ratio({"gradient": [None, 3.0, 2.0]}) == 1.5
    assert share({"map": None}, 0) is None
    assert (share(AFTER, 0), share(AFTER, -1)) == (0.5, 0.004)


def test_differences_are_of_the_seeds_that_both_have():
    found = compared(
        planted("a", 1.0, seed=0), planted("a", 3.0, seed=1), planted("b", 2.5, seed=1), planted("b", 9.0, seed=2)
    )
    one, other = found.groups
    assert difference(one, other) == Difference(0.5, pytest.approx(math.nan, nan_ok=True), 1)
    assert difference(one, compared(planted("c", seed=7)).groups[0]).seeds == 0


def test_each_finding_of_a_difference_has_its_criterion():
    for n in range(1, 5):
        runs = [*seeds("a", *[1.0] * n), *seeds("b", *[2.0] * n)]
        (one,) = [one for one in compared(*runs).verdict if one.about == "loss"]
        assert ("standard errors" in one.criterion) == (n > 2)
        assert one.numbers == {"a": 1.0, "b": 2.0}
    (one,) = [one for one in compared(*seeds("a", INF), *seeds("b", INF)).verdict if one.about == "loss"]
    assert one.criterion == "there is no seed with which both trained"


@pytest.mark.parametrize("width", [1, 30, 80, 200])
def test_it_prints_at_any_width_and_marks_what_a_wiring_is_judged_by(width):
    runs = [*seeds("a", 1.0, 1.1), *seeds("a", 1.5, INF, lr=1e-2), *seeds("b", INF, INF)]
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    with console.file:
        console.print(compared(*runs))
    text = console.export_text()
    if width >= 80:
        rows = [line.split() for line in text.splitlines() if (line[:1] in "ab" and "0.001" in line) or "0.01" in line]
        assert ["a", "2", "0.001", "0", "1.050", "1.000", "1.100"] in rows
        assert ["a", "2", "0.01", "0", "-", "1.500", "-", "1"] in rows
