"""The report of a comparison: its figures have the numbers of the runs, its sentences are the comparison's own."""

import math
import re
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from addnorm import lab, report
from addnorm.lab import theory
from addnorm.lab.train import one_thread
from addnorm.report import Figure, Findings, Table
from pages import checked, tables

WIRINGS = ("post_ln", "pre_ln")


@pytest.fixture(scope="module")
def made():
    """Two wirings, two rates, two seeds, tiny; with shallow stacks at init."""
    protocol = lab.Protocol(n_layers=2, rates=(1e-3, 1e-2), warm_ups=(0, 4), seeds=(0, 1), steps=8, d=16, n_heads=2, tokens=8,
                            batch=2, every=4)  # fmt: skip
    text = lab.Text("counting", "one two three four five six seven eight nine ten " * 40)
    with one_thread():
        runs = [{**lab.train(run, text), "addnorm": "0", "torch": "0", "date": "2000-01-01"} for run in protocol.runs(
            [lab.Run(name).wiring for name in WIRINGS])]  # fmt: skip
        stacks = [theory.at_init(job) for job in theory.jobs(["pre_ln", "post_ln", "no_norm"], [2, 4], [0, 1])]
    facts = {"name": "counting", "characters": len(text.text), "symbols": len(text.characters), "digest": text.digest,
             "entropy": text.entropy, "uniform": text.uniform}  # fmt: skip
    return lab.Comparison(WIRINGS, protocol, runs, stacks, facts)


@pytest.fixture(scope="module")
def page(made):
    return report.of_comparison(made, {"command": "addnorm compare <here>"})


def figure(page, title):
    (found,) = (
        one for section in page.sections for one in section.blocks if isinstance(one, Figure) and title in one.title
    )
    return found


def test_the_page_is_one_file_that_needs_nothing(page):
    found = checked(report.render(page))
    assert [one["text"] for one in found.all("h1")] == ["post_ln and pre_ln compared"]
    assert [section.title for section in page.sections] == [
        "Learning", "By depth: 2 layers", "Before training", "Published figures", "Settings",
    ]  # fmt: skip
    assert "addnorm compare <here>" in [one["text"] for one in found.all("dd")], "what is given is escaped"


def test_every_figure_has_its_data_as_a_table(page):
    figures = [one for section in page.sections for one in section.blocks if isinstance(one, Figure)]
    assert len(figures) == 10
    for one in figures:
        assert one.table.rows, one.title
        assert one.svg != one.narrow
    assert len(tables(checked(report.render(page)))) >= len(figures)


def test_the_verdict_is_the_comparisons_and_says_first_that_it_is_an_illustration(made, page):
    said = [one.sentence for one in made.verdict]
    top = [one.text for one in page.verdict]
    assert top[0].startswith("An illustration, not evidence")
    assert set(top) <= set(said)
    beside = [item.text for section in page.sections for block in section.blocks if isinstance(block, Findings)
              for item in block.items]  # fmt: skip
    assert {*top, *beside} == set(said), "each sentence stands in the report"


def test_the_learning_curves_are_the_losses(made, page):
    table = figure(page, "Learning").table
    assert table.head[0] == "step"
    group = made.arms[0].best_where(lambda g: not g.warm_up)
    first = sum(run["losses"][0] for run in group.runs) / 2
    assert table.rows[0][1] == pytest.approx(first)


def test_what_training_does_is_told_at_every_recorded_step(made, page):
    table = figure(page, "While training").table
    group = made.arms[1].best_where(lambda g: not g.warm_up)
    assert [row[0] for row in table.rows] == group.runs[0]["recorded"]["steps"] == [0, 4]
    for name, number in (("logits moved by a step", lambda recorded, k: recorded["moved"][k]),
                         ("gradient at x₀ over x_L", lambda recorded, k: recorded["gradient"][k][0] / recorded["gradient"][k][-1]),
                         ("cos(token, token) at x_L", lambda recorded, k: recorded["similarity"][k][-1])):  # fmt: skip
        column = table.head.index(f"pre_ln, no warm-up: {name}")
        for k, row in enumerate(table.rows):
            assert row[column] == pytest.approx(sum(number(run["recorded"], k) for run in group.runs) / 2)


def test_by_depth_has_every_number_of_every_wiring(made, page):
    table = figure(page, "before training").table
    column = table.head.index("pre_ln: gradient at the stream")
    group = next(arm for arm in made.arms if arm.wiring == "pre_ln").groups[0]
    for k, row in enumerate(table.rows):
        expected = sum(run["recorded"]["gradient"][0][k] for run in group.runs) / 2
        assert row[column] == pytest.approx(expected)
    assert [row[0] for row in table.rows] == ["x_0", "attention 1", "feed-forward 1", "attention 2", "feed-forward 2"]


def test_the_memory_map_has_shares_that_sum_to_one(page):
    table = figure(page, "Of what the stream is made").table
    for wiring in ("post_ln", "pre_ln"):
        rows = [row for row in table.rows if row[0] == wiring]
        for depth in range(2, len(table.head)):
            assert sum(row[depth] for row in rows) == pytest.approx(1.0, abs=1e-5)


def test_the_ablation_is_the_rise_of_the_loss(made, page):
    table = figure(page, "Without each sublayer").table
    best = next(arm for arm in made.arms if arm.wiring == "post_ln").best
    expected = [sum(run["ablation"][k]["rise"] for run in best.runs) / 2 for k in range(4)]
    assert [row[table.head.index("post_ln")] for row in table.rows] == pytest.approx(expected)


def test_at_init_the_figures_are_those_of_the_stacks(made, page):
    table = figure(page, "Gradients against depth").table
    rows = {(row[0], row[1]): row[2:] for row in table.rows}
    for row in made.at_init:
        assert rows[row["wiring"], row["n_layers"]] == [row["weight_gradient"][-1], row["gradient"][0]]
    assert len(figure(page, "Forward and backward by depth, 4 layers").table.rows) == 9


def test_published_figures_stand_beside_what_was_measured(made, page):
    table, every, sources = next(section for section in page.sections if section.title == "Published figures").blocks
    assert len(sources.rows) == len(made.checks)
    assert [row[2] for row in every.rows] == [value for check in made.checks for value in check.measured.values()]
    assert [row[0] for row in table.rows] == [check.name for check in made.checks]
    assert "not measured" in [row[1] for row in table.rows], "these stacks are too shallow for some"


def test_a_figure_that_is_not_met_stands_out(made):
    broken = [
        {**one, "variance": [9.0] * len(one["variance"])} if one["wiring"] == "post_ln" else one for one in made.stacks
    ]
    page = report.of_comparison(replace(made, runs=[], stacks=broken))
    table = next(section for section in page.sections if section.title == "Published figures").blocks[0]
    assert table.marked
    assert all(table.rows[k][1] == "does not hold" for k in table.marked)
    assert [one.state for one in page.verdict if "published figures" in one.text] == ["refuted"]


def test_every_setting_is_listed_with_its_seeds(made, page):
    (table,) = (one for one in page.sections[0].blocks if isinstance(one, Table))
    assert len(table.rows) == 2 * 2 * 2
    assert sum(row[-1] == "yes" for row in table.rows) == 2, "each wiring is judged by one"


def test_without_training_there_are_the_stacks_alone(made):
    page = report.of_comparison(replace(made, runs=[]))
    checked(report.render(page))
    assert [section.title for section in page.sections] == ["Before training", "Published figures", "Settings"]
    assert page.verdict[0].text.startswith("Untrained stacks only")


def test_without_stacks_there_is_the_training_alone(made):
    page = report.of_comparison(replace(made, stacks=[]))
    assert [section.title for section in page.sections] == ["Learning", "By depth: 2 layers", "Settings"]


def test_runs_that_diverged_are_told_and_drawn(made):
    runs = [
        {**run, "losses": [*run["losses"][:3], math.nan], "test": math.nan, "validation": math.nan, "diverged": True, "after": None}
        if run["settings"]["wiring"] == "post_ln" else run
        for run in made.runs
    ]  # fmt: skip
    for run in runs:
        if run["diverged"]:
            del run["after"]
            run.pop("ablation", None)
    page = report.of_comparison(replace(made, runs=runs, stacks=[]))
    text = report.render(page)
    checked(text)
    assert re.search(r"8 of 8 runs of post_ln( and \d of 8 runs of pre_ln)? diverged", text)
    assert re.search(r"post_ln diverged \(rate", text)


def test_runs_of_which_nothing_was_recorded_have_curves_alone(made):
    runs = [{**run, "sites": [], "recorded": {**run["recorded"], "steps": []}, "map": None} for run in made.runs]
    for run in runs:
        run.pop("after", None)
        run.pop("ablation", None)
    page = report.of_comparison(replace(made, runs=runs, stacks=[]))
    assert [section.title for section in page.sections] == ["Learning", "Settings"]


def test_the_same_results_are_the_same_page(made):
    few = replace(made, stacks=[], runs=[{**run, "sites": []} for run in made.runs])
    assert report.render(report.of_comparison(few)) == report.render(report.of_comparison(few))
