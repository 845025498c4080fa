"""Tests of the report of a comparison: the drawn page of a whole one, and the pages of partial and unusual ones."""

import math
import re
from dataclasses import replace

import pytest

from addnorm import lab, report
from addnorm.lab import theory
from addnorm.lab.train import one_thread
from addnorm.report import Findings, Table
from support.lab_runs import TEXT, quick
from support.report_pages import blocks_of, check_page, figure, head, titles

WIRINGS = ("post_ln", "pre_ln")


@pytest.fixture(scope="module")
def comparison():
    """Return a tiny comparison of two wirings, two rates and two seeds, with shallow untrained stacks."""
    protocol = quick(rates=(1e-3, 1e-2), warm_ups=(0, 4), seeds=(0, 1), steps=5, every=4)
    with one_thread():
        trained = lab.compare(WIRINGS, protocol, text=TEXT, jobs=1, at_init=False)
        init_stacks = theory.init_stacks(["pre_ln", "post_ln", "no_norm"], [2, 4], [0, 1])
        init_stacks += theory.init_stacks(["mhc"], [8], [0, 1])  # with several streams, whose statistics are others
        return replace(trained, stacks=[theory.measure_init(job) for job in init_stacks])


@pytest.fixture(scope="module")
def page(comparison):
    """Return the page of the whole comparison."""
    return report.build_comparison_page(comparison, {"command": "addnorm compare <here>"})


def arm_of(comparison, wiring):
    """Return the settings of a wiring."""
    return next(arm for arm in comparison.arms if arm.wiring == wiring)


def group_of(comparison, wiring):
    """Return the best group without warm-up."""
    return arm_of(comparison, wiring).best_with(False)


def mean(runs, number):
    return pytest.approx(sum(map(number, runs)) / len(runs))


def build_page(comparison, runs, **changes):
    """Return the page of a comparison with other runs and, unless they are passed, no untrained stacks."""
    page = report.build_comparison_page(replace(comparison, runs=[*runs], **({"stacks": []} | changes)))
    check_page(report.render(page))
    return page


def without_statistics(run):
    """Return a run without the statistics after its training."""
    return {name: value for name, value in run.items() if name not in ("after", "ablation")}


def test_comparison_page_is_self_contained(page):
    document = check_page(report.render(page))
    assert [one["text"] for one in document.all("h1")] == ["post_ln and pre_ln compared"]
    assert titles(page) == [
        "Learning", "By depth: 2 layers", "Before training", "Published results", "Settings",
    ]  # fmt: skip
    assert "addnorm compare <here>" in [one["text"] for one in document.all("dd")], "facts are escaped"
    figures = blocks_of(page, "figure")
    assert len(figures) == 10
    assert all(one.table.rows for one in figures)
    assert all(one.svg != one.narrow for one in figures)


def test_page_has_every_sentence_of_the_verdict(comparison, page):
    top = {one.claim for one in page.verdict}
    assert page.verdict[0].claim.startswith("This is an illustration, not evidence")
    beside = {item.claim for block in blocks_of(page, "findings") for item in block.items}
    assert not top & beside
    assert top | beside == {one.claim for one in comparison.verdict}


def test_learning_figure_has_the_losses(comparison, page):
    table = figure(page, "Learning").table
    assert head(table)[0] == "step"
    assert table.rows[0][1] == mean(group_of(comparison, "post_ln").runs, lambda run: run["losses"][0])


def test_training_figure_has_every_recorded_step(comparison, page):
    table = figure(page, "During training").table
    runs = group_of(comparison, "pre_ln").runs
    assert [row[0] for row in table.rows] == runs[0]["recorded"]["steps"] == [0, 4]
    for name, number in (("relative change of the logits in a step", lambda recorded, k: recorded["logit_change"][k]),
                         ("gradient at x_0 over x_L", lambda recorded, k: recorded["gradient"][k][0] / recorded["gradient"][k][-1]),
                         ("cos(token, token) at x_L", lambda recorded, k: recorded["similarity"][k][-1])):  # fmt: skip
        column = head(table).index(f"pre_ln, no warm-up: {name}")
        for k, row in enumerate(table.rows):
            assert row[column] == mean(runs, lambda run, k=k, number=number: number(run["recorded"], k))


def test_depth_figure_has_every_number(comparison, page):
    table = figure(page, "before training").table
    column = head(table).index("pre_ln: ‖∂loss / ∂stream‖")
    runs = arm_of(comparison, "pre_ln").groups[0].runs
    for k, row in enumerate(table.rows):
        assert row[column] == mean(runs, lambda run, k=k: run["recorded"]["gradient"][0][k])
    assert [row[0] for row in table.rows] == ["x_0", "attention 1", "feed-forward 1", "attention 2", "feed-forward 2"]


def test_map_and_ablation_figures_have_the_trained_numbers(comparison, page):
    table = figure(page, "Sources of the stream").table
    for wiring in WIRINGS:
        rows = [row for row in table.rows if row[0] == wiring]
        for depth in range(2, len(head(table))):
            assert sum(row[depth] for row in rows) == pytest.approx(1.0, abs=1e-5)
    table = figure(page, "Without each sublayer").table
    runs = arm_of(comparison, "post_ln").best.runs
    for k, row in enumerate(table.rows):
        assert row[head(table).index("post_ln")] == mean(runs, lambda run, k=k: run["ablation"][k]["rise"])


def test_init_figures_have_the_stacks_numbers(comparison, page):
    table = figure(page, "Gradients against depth").table
    rows = {row[0]: dict(zip(head(table), row, strict=True)) for row in table.rows}
    for row in comparison.at_init:
        cells = rows[row["num_layers"]]
        assert cells[f"{row['wiring']}: last layer's ‖∂loss / ∂W₂‖"] == row["weight_gradient"][-1]
        assert cells[f"{row['wiring']}: ‖∂loss / ∂x_0‖"] == row["gradient"][0]
    assert len(figure(page, "Forward and backward by depth, 4 layers").table.rows) == 9


def test_published_results_have_measured_numbers(comparison, page):
    table, numbers, sources = next(section for section in page.sections if section.title == "Published results").blocks
    assert len(sources.rows) == len(comparison.checks)
    assert [row[2] for row in numbers.rows] == [
        value for check in comparison.checks for value in check.measured.values()
    ]
    assert [row[0] for row in table.rows] == [check.name for check in comparison.checks]
    assert "not measured" in [row[1] for row in table.rows], "some results need deeper stacks"


def test_setting_table_lists_every_setting(page):
    (table,) = (block for block in page.sections[0].blocks if isinstance(block, Table))
    assert len(table.rows) == 2 * 2 * 2
    assert sum(row[-1] == "yes" for row in table.rows) == 2, "each wiring has one best setting"


# Partial comparisons.


def test_page_without_training_shows_failed_results(comparison):
    stacks = [
        {**one, "variance": [9.0] * len(one["variance"])} if one["wiring"] == "post_ln" else one
        for one in comparison.stacks
    ]
    page = build_page(comparison, [], stacks=stacks)
    assert titles(page) == ["Before training", "Published results", "Settings"]
    assert page.verdict[0].claim.startswith("Only untrained stacks were measured")
    assert page.facts == {}
    assert "Python" in page.sections[-1].blocks[0].items["this report"]
    table = page.sections[1].blocks[0]
    assert "bad" in table.styles
    assert [row[1] == "does not hold" for row in table.rows] == [style == "bad" for style in table.styles]
    assert [one.verdict for one in page.verdict if "published results" in one.claim] == ["refuted"]


def test_page_of_diverged_runs(comparison):
    lost = {"test": math.nan, "validation": math.nan, "diverged": True}
    page = build_page(comparison, (
        without_statistics(run) | lost | {"losses": [*run["losses"][:3], math.nan]}
        if run["settings"]["wiring"] == "post_ln" else run
        for run in comparison.runs
    ))  # fmt: skip
    assert titles(page) == ["Learning", "By depth: 2 layers", "Settings"]
    text = report.render(page)
    assert re.search(r"8 of 8 runs of post_ln( and \d of 8 runs of pre_ln)? diverged", text)
    assert re.search(r"post_ln diverged \(rate", text)
    assert "diverged" in page.tiles.values()


def test_page_of_unrecorded_runs(comparison):
    bare = {"losses": [3.0 + 1 / (k + 1) for k in range(250)], "sites": [], "map": None}
    page = build_page(comparison, (
        without_statistics(run) | bare | {"recorded": {**run["recorded"], "steps": []}} for run in comparison.runs
    ))  # fmt: skip
    assert titles(page) == ["Learning", "Settings"]
    steps = [row[0] for row in figure(page, "Learning").table.rows]
    assert (steps[0], steps[-1]) == (1, 250), "the last step is in the table"
    assert 50 < len(steps) <= 102


def test_missing_numbers_are_named(comparison):
    """Use an interrupted comparison: post_ln has the second seed only, pre_ln has no statistics after training."""
    runs = []
    for run in comparison.runs:
        first_seed = run["settings"]["seed"] == 0
        if first_seed or run["settings"]["wiring"] == "pre_ln":
            runs.append({**run, "after": None, "ablation": [], **({"sites": []} if first_seed else {})})
        else:
            runs.append(run)
    depth = figure(build_page(comparison, runs[1:]), "after training")
    assert not depth.caption.endswith("parameters."), "the caption names what is missing"
    assert "pre_ln" not in re.sub(r'aria-label="[^"]*"', "", depth.svg)


def test_nan_shares_leave_out_the_map(comparison):
    runs = []
    for run in comparison.runs:
        after = run["after"]
        shares = [[math.nan] * len(after["map"]["sources"])] * len(after["map"]["shares"])
        gradient = [math.nan, math.inf, *after["gradient"][2:]]
        runs.append({**run, "after": {**after, "gradient": gradient, "map": {**after["map"], "shares": shares}}})
    drawn = [one.title for one in blocks_of(build_page(comparison, runs), "figure")]
    assert "Sources of the stream, after training" not in drawn, "all cells would be empty"


def test_findings_are_beside_their_depth(comparison):
    """Check the findings by depth, which are measured at 3 layers but not at 2."""
    deeper = [{**run, "settings": {**run["settings"], "num_layers": 3}} for run in comparison.runs]
    page = build_page(comparison, [*map(without_statistics, comparison.runs), *deeper])
    for n in (2, 3):
        (section,) = (section for section in page.sections if section.title == f"By depth: {n} layers")
        texts = [item.claim for block in section.blocks if isinstance(block, Findings) for item in block.items]
        assert texts
        assert all(re.search(rf"\b{n} (trained )?layers", text) for text in texts)


# Other wirings.


def with_wirings(comparison, count):
    """Return a comparison of many wirings with the same runs."""
    names = [f"wiring({k}, norm='<b>&\"')" for k in range(count)]
    own = [run for run in comparison.runs if run["settings"]["wiring"] == "pre_ln"]
    runs = [{**run, "settings": {**run["settings"], "wiring": name}} for name in names for run in own]
    return replace(comparison, compared=tuple(names), runs=runs, stacks=[])


def test_many_wirings_get_several_drawings(comparison):
    many = with_wirings(comparison, 12)
    page = build_page(many, many.runs)
    text = report.render(page)
    assert page.title == "12 residual wirings compared"
    drawn = [one.title for one in blocks_of(page, "figure")]
    for words in ("Learning, 2 layers", "Forward and backward by depth, after training", "Without each sublayer"):
        parts = [title for title in drawn if title.startswith(words)]
        assert len(parts) == 2, "wirings of one drawing differ in style"
        assert all(sum(name in title for title in parts) == 1 for name in many.compared)
    assert "<b>" not in text


def test_undrawn_wirings_are_named(comparison):
    names = [f"w{k}" for k in range(8)]
    stacks = [{**one, "wiring": name} for name in names for one in comparison.stacks if one["wiring"] == "pre_ln"]
    page = build_page(comparison, [], compared=tuple(names), stacks=stacks)
    assert figure(page, "Gradients against depth").caption.endswith("Only in the table: w7.")


def test_comparison_page_begins_with_model_inputs_date_loss(page):
    assert [*page.facts] == ["model", "inputs", "date", "loss"]
    assert page.facts["model"].startswith(
        "character model, 2 layers, d_model = 16, 2 heads, feed-forward 64, LayerNorm, "
    )
    assert page.facts["inputs"] == "counting, 5 steps of 4 sequences of 8 characters"
    assert page.sections[-1].blocks[0].items["results made with"].startswith("addnorm ")


def test_tiles_show_the_best_losses(comparison):
    many = with_wirings(comparison, 6)
    best = {"test": 1.0, "validation": 1.0}
    runs = [{**run, **best} if "(5," in run["settings"]["wiring"] else run for run in many.runs]
    tiles = build_page(many, runs).tiles
    assert len(tiles) == 5
    assert any("(5," in name for name in tiles)
