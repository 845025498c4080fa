"""Tests of `addnorm.lab.comparison` and `addnorm.lab.results` on planted results; nothing is trained."""

import math
from dataclasses import replace

import pytest
from rich.console import Console

from addnorm.lab.results import Difference, difference, t_quantile
from addnorm.lab.theory import init_stacks, measure_init
from addnorm.lab.verdict import gradient_ratio, share_of
from support.lab_runs import compared, planted

INF = math.inf


def sentences(about, *runs, **protocol):
    """Return the sentences of one topic."""
    return [entry.claim for entry in compared(*runs, **protocol).verdict if entry.topic == about]


def seeds(wiring, *losses, **options):
    return [planted(wiring, loss, seed=seed, diverged=loss == INF, **options) for seed, loss in enumerate(losses)]


def test_scope_follows_from_protocol():
    (sentence,) = sentences("scope", planted("a"))
    assert sentence.startswith(
        "This is an illustration, not evidence: 1 run of 10 steps (1 depth, 1 learning rate, 1 seed;"
    )
    many = seeds("a", 1.0, 1.1, 1.2) + seeds("a", 1.0, 1.1, 1.2, lr=3e-3)
    (sentence,) = sentences("scope", *many, seeds=(0, 1, 2), rates=(1e-3, 3e-3))
    assert sentence.startswith("6 runs of 10 steps (1 depth, 2 learning rates, 3 seeds;")
    assert "illustration" not in sentence
    (sentence,) = sentences("scope", *many, seeds=(0, 1), rates=(1e-3, 3e-3))
    assert sentence.startswith("This is an illustration")
    assert sentences("scope") == ["Only untrained stacks were measured. Nothing here shows how a wiring trains."]


@pytest.mark.parametrize(
    ("a", "b", "clear"),
    [
        ([1.0, 1.0], [1.2, 1.2], True),
        ([1.0, 1.0], [1.05, 1.13], False),
        ([1.0, 1.5, 2.0], [1.05, 1.55, 2.05], True),  # paired: equal differences despite different seeds
        ([1.0, 1.0, 1.0], [1.005, 1.005, 1.005], False),  # significant but too small
        ([1.0, 1.0, 1.0], [1.05, 1.1, 1.18], False),  # 2.9 standard errors: chance in one of ten for three seeds
        ([1.0, 1.0, 1.0], [1.08, 1.1, 1.12], True),
        ([1.0, 1.0], [1.0, INF], True),
        ([INF, 1.0], [1.0, INF], False),
    ],
)
def test_ranking_requires_more_than_chance(a, b, clear):
    runs = [*seeds("a", *a), *seeds("b", *b)]
    (sentence,) = sentences("loss", *runs)
    if clear:
        assert sentence.startswith("At 2 layers a has the lowest test loss, below b: a 1")
    elif INF in a and INF in b:
        assert sentence.startswith("At 2 layers no wiring trained with every seed: a diverged")
    else:
        assert sentence.startswith("At 2 layers there is no clear difference between a and b: a ")
    (turned,) = sentences("loss", *seeds("a", *b), *seeds("b", *a))
    assert ("b has the lowest test loss, below a" in turned) == clear


def test_differences_have_simultaneous_intervals():
    runs = [*seeds("a", 1.0, 1.1, 1.2), *seeds("b", 1.1, 1.22, 1.29), *seeds("c", 2.0, 2.1, 2.2)]
    assert sentences("difference", *runs) == [
        "Loss above that of a at 2 layers, with 95% intervals over 3 seeds, which hold together for all 3 pairs: b +0.103 ± 0.067, "
        "c +1.000 ± 0.000."
    ]
    assert sentences("difference", planted("a", 1.0), planted("b", 2.0)) == []


@pytest.mark.parametrize(
    ("freedom", "quantiles"),
    [(1, (12.706, 63.657)), (3, (3.182, 5.841)), (30, (2.042, 2.750))],
)
def test_t_quantiles_are_those_of_the_tables(freedom, quantiles):
    assert [round(t_quantile(p, freedom), 3) for p in (0.05, 0.01)] == list(quantiles)


def test_ranking_names_wirings_without_clear_difference():
    runs = [planted("a", 1.0), planted("b", 1.05), planted("c", 2.0), planted("d", INF, diverged=True)]
    assert sentences("loss", *runs) == [
        "At 2 layers a has the lowest test loss, below c and d; there is no clear difference between it and b: a 1.000 (rate "
        "0.001, no warm-up), b 1.050 (rate 0.001, no warm-up), c 2.000 (rate 0.001, no warm-up), d diverged (rate 0.001, no warm-up), in nats a character."
    ]
    assert sentences("loss", planted("a")) == [], "a single wiring has no rank"


def test_ranking_requires_learning():
    (sentence,) = sentences("loss", planted("a", 2.71), planted("b", 2.95))
    assert sentence.startswith("At 2 layers no wiring learned more than how often each character occurs: a 2.710")
    assert "a has the lowest test loss" in sentences("loss", planted("a", 2.69), planted("b", 2.95))[0]


def test_ranking_is_per_depth():
    runs = [planted("a", 1.0), planted("b", 2.0), planted("a", 2.0, n=4), planted("b", 1.0, n=4)]
    first, second = sentences("loss", *runs)
    assert "At 2 layers a has the lowest test loss" in first
    assert "At 4 layers b has the lowest test loss" in second


def test_setting_is_chosen_on_validation_and_judged_on_test():
    runs = [planted("a", 1.0, lr=1e-3, validation=1.5), planted("a", 1.4, lr=1e-2, validation=1.3), planted("b", 1.2)]
    comparison = compared(*runs)
    arm = comparison.arms[0]
    assert (arm.best.lr, arm.best.loss()) == (1e-2, 1.4)
    assert "b has the lowest test loss, below a" in sentences("loss", *runs)[0]


def test_setting_that_diverged_once_is_not_chosen():
    runs = [*seeds("a", 1.0, INF, 1.0, lr=1e-2), *seeds("a", 2.0, 2.0, 2.0, lr=1e-3)]
    assert compared(*runs).arms[0].best.lr == 1e-3
    assert sentences("failures", *runs) == ["1 of 6 runs of a diverged."]


@pytest.mark.parametrize(
    ("without", "with_it", "says"),
    [
        (INF, 1.0, "a needs it (diverged without, 1.000 with)"),
        (1.5, 1.0, "a is better with it (1.500 without, 1.000 with)"),
        (1.0, 1.5, "a is worse with it (1.000 without, 1.500 with)"),
        (1.0, INF, "a is worse with it (1.000 without, diverged with)"),
        (1.0, 1.05, "a shows no clear difference (1.000 without, 1.050 with)"),
        (INF, INF, "a diverges with and without it"),
    ],
)
def test_warm_up_finding(without, with_it, says):
    runs = [
        planted("a", loss, warm_up=warm_up, diverged=loss == INF) for loss, warm_up in ((without, 0), (with_it, 100))
    ]
    assert sentences("warm-up", *runs) == [f"Warm-up at 2 layers: {says}."]
    assert sentences("warm-up", runs[0]) == sentences("warm-up", runs[1]) == []


def test_failures_count_runs_that_learned_nothing():
    (nothing,) = sentences("failures", planted("a", 2.75), planted("b", 2.69))
    assert nothing.startswith("1 of 1 run of a learned nothing: the test loss is above 2.70,")
    assert sentences("failures", planted("a", 2.69), planted("b", 1.0)) == []


@pytest.mark.parametrize(
    ("losses", "edge"),
    [((1.0, 1.5, 2.0), True), ((1.5, 1.0, 2.0), False), ((2.0, 1.5, 1.0), True), ((INF, INF, INF), False)],
)
def test_grid_finding_names_rate_at_the_edge(losses, edge):
    runs = [
        planted("a", loss, lr=lr, diverged=loss == INF) for loss, lr in zip(losses, (1e-3, 3e-3, 1e-2), strict=True)
    ]
    assert bool(sentences("grid", *runs)) == edge
    assert sentences("grid", runs[0]) == [], "a single rate is no grid"


RECORDED = {"steps": [0], "logit_change": [0.1], "gradient": [[1.0, None, 4.0]]}
AFTER = {
    "gradient": [30.0, None, 1.0],
    "map": {"sources": ["x_0", "one", "two", "norm biases"], "shares": [[1, 0, 0, 0], [0.5, 0.2, 0.004, 0.296]]},
}


def test_findings_show_measured_gradient_shares_ablation():
    run = planted("a", n=1, recorded=RECORDED, after=AFTER, ablation=[{"rise": 0.5}, {"rise": 0.1}, {"rise": math.nan}])
    (gradient,), (memory,), (ablated,) = (sentences(about, run) for about in ("gradient", "memory", "ablation"))
    assert "a 0.25 before training and 30 after (without warm-up)" in gradient
    assert "after 1 trained layer, in a 50% is from x_0 and 0.4% from the last write" in memory
    assert "1 trained layer, in nats: a median +0.300, largest +0.500" in ablated
    assert "(without warm-up)" not in sentences("gradient", {**run, "settings": {**run["settings"], "warm_up": 5}})[0]


def test_unrecorded_runs_have_no_depth_findings():
    topics = {entry.topic for entry in compared(planted("a", 1.0), planted("b", 2.0)).verdict}
    assert topics == {"scope", "loss"}


def test_gradient_ratio_and_share_skip_missing_numbers():
    assert gradient_ratio(()) is None
    assert gradient_ratio([1.0, None]) is None
    assert gradient_ratio([1.0, 0.0]) is None
    assert gradient_ratio([None, 3.0, 2.0]) == 1.5
    assert share_of({"map": None}, 0) is None


def test_difference_pairs_common_seeds():
    comparison = compared(
        planted("a", 1.0, seed=0), planted("a", 3.0, seed=1), planted("b", 2.5, seed=1), planted("b", 9.0, seed=2)
    )
    first, other = comparison.groups
    assert difference(first, other) == Difference(0.5, pytest.approx(math.nan, nan_ok=True), 1)
    assert difference(first, compared(planted("c", seed=7)).groups[0]).seeds == 0


def test_loss_finding_states_its_criterion():
    for n in range(1, 5):
        runs = [*seeds("a", *[1.0] * n), *seeds("b", *[2.0] * n)]
        (finding,) = [entry for entry in compared(*runs).verdict if entry.topic == "loss"]
        assert ("standard errors" in finding.criterion) == (n > 2)
        assert finding.numbers == {"a": 1.0, "b": 2.0}
    (finding,) = [entry for entry in compared(*seeds("a", INF), *seeds("b", INF)).verdict if entry.topic == "loss"]
    assert finding.criterion == "no seed trained under both settings"


def test_untrained_wirings_are_described_without_training():
    stacks = [measure_init(stack) for stack in init_stacks(["pre_ln", "mhc"], depths=[2], seeds=[0])]
    comparison = replace(compared(), compared=("pre_ln", "mhc", "parallel"), stacks=stacks)
    one, several, unknown = [finding for finding in comparison.verdict if finding.topic == "untrained"]
    assert one.claim.startswith(
        "Untrained pre_ln, 2 layers: from x_0 to x_L the root mean square of the stream changes by a factor of "
    )
    assert one.numbers["growth"] == pytest.approx(math.sqrt(stacks[0]["variance"][-1] / stacks[0]["variance"][0]))
    assert several.claim.startswith(
        f"Untrained mhc, 2 layers: the largest read is {max(stacks[1]['read']):.3g} times x_0"
    )
    assert unknown.claim == "Untrained stacks of parallel are not measured: the toy model has none of their kind."


@pytest.mark.parametrize("width", [1, 100])
def test_comparison_prints_at_any_width(width):
    runs = [*seeds("a", 1.0, 1.1), *seeds("a", 1.5, INF, lr=1e-2), *seeds("b", INF, INF)]
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    with console.file:
        console.print(compared(*runs))
    text = console.export_text()
    if width >= 100:
        rows = [line.split() for line in text.splitlines() if (line[:1] in "ab" and "0.001" in line) or "0.01" in line]
        assert ["a", "2", "0.001", "none", "1.050", "1.050", "1.000,", "1.100", "none", "yes"] in rows
        assert ["a", "2", "0.01", "none", "inf", "inf", "1.500,", "inf", "1"] in rows
