"""Tests of the report of a comparison."""

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
from support.pages import checked, tables

WIRINGS = ("post_ln", "pre_ln")


@pytest.fixture(scope="module")
def made():
    """Return a tiny comparison of two wirings, two rates and two seeds, with shallow untrained stacks."""
    protocol = lab.Protocol(num_layers=2, rates=(1e-3, 1e-2), warm_ups=(0, 4), seeds=(0, 1), steps=8, d_model=16, nhead=2, tokens=8,
                            batch=2, every=4)  # fmt: skip
    text = lab.Text("counting", "one two three four five six seven eight nine ten " * 40)
    with one_thread():
        runs = [{**lab.train(run, text), "addnorm": "0", "torch": "0", "date": "2000-01-01"} for run in protocol.runs(
            [lab.Run(name).wiring for name in WIRINGS])]  # fmt: skip
        stacks = [
            theory.measure_init(job) for job in theory.init_stacks(["pre_ln", "post_ln", "no_norm"], [2, 4], [0, 1])
        ]
    facts = {"name": "counting", "characters": len(text.text), "symbols": len(text.characters), "digest": text.digest,
             "entropy": text.entropy, "uniform": text.uniform}  # fmt: skip
    return lab.Comparison(WIRINGS, protocol, runs, stacks, facts)


@pytest.fixture(scope="module")
def page(made):
    return report.build_comparison_page(made, {"command": "addnorm compare <here>"})


def figure(page, title):
    (found,) = (
        one for section in page.sections for one in section.blocks if isinstance(one, Figure) and title in one.title
    )
    return found


def test_comparison_page_is_self_contained(page):
    found = checked(report.render(page))
    assert [one["text"] for one in found.all("h1")] == ["post_ln and pre_ln compared"]
    assert [section.title for section in page.sections] == [
        "Learning", "By depth: 2 layers", "Before training", "Published results", "Settings",
    ]  # fmt: skip
    assert "addnorm compare <here>" in [one["text"] for one in found.all("dd")], "facts are escaped"


def test_every_figure_has_a_table(page):
    figures = [one for section in page.sections for one in section.blocks if isinstance(one, Figure)]
    assert len(figures) == 10
    for one in figures:
        assert one.table.rows, one.title
        assert one.svg != one.narrow
    assert len(tables(checked(report.render(page)))) >= len(figures)


def test_page_has_every_sentence_of_the_verdict(made, page):
    said = [one.sentence for one in made.verdict]
    top = [one.text for one in page.verdict]
    assert top[0].startswith("This is an illustration, not evidence")
    assert set(top) <= set(said)
    beside = [item.text for section in page.sections for block in section.blocks if isinstance(block, Findings)
              for item in block.items]  # fmt: skip
    assert {*top, *beside} == set(said), "each sentence is in the report"


def test_learning_figure_has_the_losses(made, page):
    table = figure(page, "Learning").table
    assert table.head[0] == "step"
    group = made.arms[0].best_where(lambda g: not g.warm_up)
    first = sum(run["losses"][0] for run in group.runs) / 2
    assert table.rows[0][1] == pytest.approx(first)


def test_training_figure_has_every_recorded_step(made, page):
    table = figure(page, "During training").table
    group = made.arms[1].best_where(lambda g: not g.warm_up)
    assert [row[0] for row in table.rows] == group.runs[0]["recorded"]["steps"] == [0, 4]
    for name, number in (("relative change of the logits in a step", lambda recorded, k: recorded["logit_change"][k]),
                         ("gradient at x₀ over x_L", lambda recorded, k: recorded["gradient"][k][0] / recorded["gradient"][k][-1]),
                         ("cos(token, token) at x_L", lambda recorded, k: recorded["similarity"][k][-1])):  # fmt: skip
        column = table.head.index(f"pre_ln, no warm-up: {name}")
        for k, row in enumerate(table.rows):
            assert row[column] == pytest.approx(sum(number(run["recorded"], k) for run in group.runs) / 2)


def test_depth_figure_has_every_number(made, page):
    table = figure(page, "before training").table
    column = table.head.index("pre_ln: gradient at the stream")
    group = next(arm for arm in made.arms if arm.wiring == "pre_ln").groups[0]
    for k, row in enumerate(table.rows):
        expected = sum(run["recorded"]["gradient"][0][k] for run in group.runs) / 2
        assert row[column] == pytest.approx(expected)
    assert [row[0] for row in table.rows] == ["x_0", "attention 1", "feed-forward 1", "attention 2", "feed-forward 2"]


def test_memory_map_shares_sum_to_one(page):
    table = figure(page, "Sources of the stream").table
    for wiring in ("post_ln", "pre_ln"):
        rows = [row for row in table.rows if row[0] == wiring]
        for depth in range(2, len(table.head)):
            assert sum(row[depth] for row in rows) == pytest.approx(1.0, abs=1e-5)


def test_ablation_figure_has_the_rise_of_the_loss(made, page):
    table = figure(page, "Without each sublayer").table
    best = next(arm for arm in made.arms if arm.wiring == "post_ln").best
    expected = [sum(run["ablation"][k]["rise"] for run in best.runs) / 2 for k in range(4)]
    assert [row[table.head.index("post_ln")] for row in table.rows] == pytest.approx(expected)


def test_init_figures_have_the_stacks_numbers(made, page):
    table = figure(page, "Gradients against depth").table
    rows = {(row[0], row[1]): row[2:] for row in table.rows}
    for row in made.at_init:
        assert rows[row["wiring"], row["num_layers"]] == [row["weight_gradient"][-1], row["gradient"][0]]
    assert len(figure(page, "Forward and backward by depth, 4 layers").table.rows) == 9


def test_published_results_have_measured_numbers(made, page):
    table, every, sources = next(section for section in page.sections if section.title == "Published results").blocks
    assert len(sources.rows) == len(made.checks)
    assert [row[2] for row in every.rows] == [value for check in made.checks for value in check.measured.values()]
    assert [row[0] for row in table.rows] == [check.name for check in made.checks]
    assert "not measured" in [row[1] for row in table.rows], "some results need deeper stacks"


def test_failed_published_result_is_highlighted(made):
    broken = [
        {**one, "variance": [9.0] * len(one["variance"])} if one["wiring"] == "post_ln" else one for one in made.stacks
    ]
    page = report.build_comparison_page(replace(made, runs=[], stacks=broken))
    table = next(section for section in page.sections if section.title == "Published results").blocks[0]
    assert table.highlighted
    assert all(table.rows[k][1] == "does not hold" for k in table.highlighted)
    assert [one.state for one in page.verdict if "published results" in one.text] == ["refuted"]


def test_setting_table_lists_every_setting(made, page):
    (table,) = (one for one in page.sections[0].blocks if isinstance(one, Table))
    assert len(table.rows) == 2 * 2 * 2
    assert sum(row[-1] == "yes" for row in table.rows) == 2, "each wiring has one best setting"


def test_page_without_training(made):
    page = report.build_comparison_page(replace(made, runs=[]))
    checked(report.render(page))
    assert [section.title for section in page.sections] == ["Before training", "Published results", "Settings"]
    assert page.verdict[0].text.startswith("Only untrained stacks were measured")


def test_page_without_stacks(made):
    page = report.build_comparison_page(replace(made, stacks=[]))
    assert [section.title for section in page.sections] == ["Learning", "By depth: 2 layers", "Settings"]


def test_page_of_diverged_runs(made):
    runs = [
        {**run, "losses": [*run["losses"][:3], math.nan], "test": math.nan, "validation": math.nan, "diverged": True, "after": None}
        if run["settings"]["wiring"] == "post_ln" else run
        for run in made.runs
    ]  # fmt: skip
    for run in runs:
        if run["diverged"]:
            del run["after"]
            run.pop("ablation", None)
    page = report.build_comparison_page(replace(made, runs=runs, stacks=[]))
    text = report.render(page)
    checked(text)
    assert re.search(r"[Aa]ll 8 runs of post_ln( and \d of 8 runs of pre_ln)? diverged", text)
    assert re.search(r"post_ln diverged \(rate", text)


def test_page_of_unrecorded_runs(made):
    runs = [{**run, "sites": [], "recorded": {**run["recorded"], "steps": []}, "map": None} for run in made.runs]
    for run in runs:
        run.pop("after", None)
        run.pop("ablation", None)
    page = report.build_comparison_page(replace(made, runs=runs, stacks=[]))
    assert [section.title for section in page.sections] == ["Learning", "Settings"]


@pytest.mark.slow
def test_comparison_page_is_deterministic(made):
    few = replace(made, stacks=[], runs=[{**run, "sites": []} for run in made.runs])
    assert report.render(report.build_comparison_page(few)) == report.render(report.build_comparison_page(few))


def of_places(run, kinds, wiring):
    """Return the run as one of another wiring, whose sublayers have other names."""
    sites = [{"id": "x_0", "kind": "start", "layer": None}]
    sites += [{"id": f"{kind} {k // 2 + 1}", "kind": kind, "layer": k // 2} for k, kind in enumerate(kinds)]
    size = len(sites)

    def cut(values):
        return [*values[:size], *[None] * (size - len(values))]

    by_depth = ("stream", "ratio", "similarity", "gradient", "parameters")
    recorded = {**run["recorded"], **{name: [cut(values) for values in run["recorded"][name]] for name in by_depth}}
    run = {
        "after": run["recorded"] | {name: run["recorded"][name][0] for name in by_depth}
    } | run  # a run that diverged
    after = {**run["after"], **{name: cut(run["after"][name]) for name in by_depth}}
    after["map"] = {"sources": [site["id"] for site in sites], "shares": [[1.0] + [0.0] * (size - 1)] * size}
    gone = [{"site": site["id"], "kind": site["kind"], "rise": 0.5} for site in sites[1:]]
    return {**run, "settings": {**run["settings"], "wiring": wiring}, "sites": sites, "recorded": recorded, "after": after,
            "ablation": gone}  # fmt: skip


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_wirings_with_different_sublayers_are_aligned(made, first):
    """Check repeated names and different numbers of sites: parallel sublayers are one add, B2T has one add more."""
    runs = [run for run in made.runs if run["settings"]["wiring"] == "pre_ln"]
    odd = [of_places(run, ["attention", "other", "other", "attention", "other", "other"], "b2t") for run in runs]
    names = ("pre_ln", "b2t") if first else ("b2t", "pre_ln")
    page = report.build_comparison_page(replace(made, compared=names, runs=[*runs, *odd], stacks=[]))
    checked(report.render(page))
    table = figure(page, "before training").table
    assert [row[0] for row in table.rows][:3] in (
        ["x_0", "attention 1", "feed-forward 1 / other 1"], ["x_0", "attention 1", "other 1 / feed-forward 1"],
    )  # fmt: skip
    assert len(table.rows) == 7
    assert {len(figure(page, f"Without each sublayer, {n} sublayers").table.rows) for n in (4, 6)} == {4, 6}
    assert len(figure(page, "Sources of the stream").table.head) == 2 + 7


def many(made, count):
    """Return a comparison of many wirings with the same runs."""
    names = [f"wiring({k}, norm='<b>&\"')" for k in range(count)]
    own = [run for run in made.runs if run["settings"]["wiring"] == "pre_ln"]
    runs = [{**run, "settings": {**run["settings"], "wiring": name}} for name in names for run in own]
    return replace(made, compared=tuple(names), runs=runs, stacks=[])


@pytest.mark.slow
def test_many_wirings_get_several_drawings(made):
    found = many(made, 12)
    page = report.build_comparison_page(found)
    text = report.render(page)
    checked(text)
    assert page.title == "12 residual wirings compared"
    titles = [one.title for section in page.sections for one in section.blocks if isinstance(one, Figure)]
    for what in ("Learning, 2 layers", "Forward and backward by depth, after training", "Without each sublayer"):
        parts = [title for title in titles if title.startswith(what)]
        assert len(parts) == 2, "wirings of one drawing differ in style"
        assert all(sum(name in title for title in parts) == 1 for name in found.compared)
    assert "<b>" not in text


@pytest.mark.slow
def test_memory_maps_wrap_into_rows(made, recwarn):
    page = report.build_comparison_page(many(made, 5))
    svg = figure(page, "Sources of the stream").svg
    assert float(re.search(r'viewBox="0 0 [\d.]+ ([\d.]+)"', svg)[1]) > 6 * 72
    assert svg.count("share of the stream") == 1, "one scale for all"
    assert not [one for one in recwarn if "collapsed" in str(one.message)]


@pytest.mark.slow
def test_tiles_show_the_best_losses(made):
    found = many(made, 6)
    runs = [
        {**run, "test": 1.0, "validation": 1.0} if "(5," in run["settings"]["wiring"] else run for run in found.runs
    ]
    tiles = report.build_comparison_page(replace(found, runs=runs)).tiles
    assert len(tiles) == 5
    assert any("(5," in name for name in tiles)
    lost = [{**run, "diverged": True} for run in runs]
    assert "diverged" in report.build_comparison_page(replace(found, runs=lost)).tiles.values()


def test_findings_are_beside_their_depth(made):
    """Check the findings by depth, which are measured at 3 layers but not at 2."""
    deeper = [{**run, "settings": {**run["settings"], "num_layers": 3}} for run in made.runs]
    bare = [{name: value for name, value in run.items() if name not in ("after", "ablation")} for run in made.runs]
    page = report.build_comparison_page(replace(made, runs=[*bare, *deeper], stacks=[]))
    for section in page.sections:
        if n := re.fullmatch(r"By depth: (\d) layers", section.title):
            said = [item.text for block in section.blocks if isinstance(block, Findings) for item in block.items]
            assert said
            assert all(re.search(rf"\b{n[1]} (trained )?layers", text) for text in said)


def test_missing_numbers_are_named(made):
    """Use an interrupted comparison: post_ln has the second seed only, pre_ln has no statistics after training."""
    runs = []
    for run in made.runs:
        of = run["settings"]
        gone = of["wiring"] == "pre_ln" or of["seed"] == 0
        runs.append(
            {**run, "after": None, "ablation": [], **({"sites": []} if gone and of["seed"] == 0 else {})}
            if gone
            else run
        )
    page = report.build_comparison_page(replace(made, runs=runs[1:], stacks=[]))
    checked(report.render(page))
    one = figure(page, "after training")
    assert not one.caption.endswith("parameters."), "the caption names what is missing"
    assert "pre_ln" not in re.sub(r'aria-label="[^"]*"', "", one.svg)


def test_learning_table_has_the_last_step(made):
    runs = [{**run, "losses": [3.0 + 1 / (k + 1) for k in range(250)]} for run in made.runs]
    table = figure(report.build_comparison_page(replace(made, runs=runs, stacks=[])), "Learning").table
    steps = [row[0] for row in table.rows]
    assert steps[0] == 1
    assert steps[-1] == 250
    assert 50 < len(steps) <= 102


def test_undrawn_wirings_are_named(made):
    names = [f"w{k}" for k in range(9)]
    stacks = [{**one, "wiring": name} for name in names for one in made.stacks if one["wiring"] == "pre_ln"]
    page = report.build_comparison_page(replace(made, compared=tuple(names), runs=[], stacks=stacks))
    assert figure(page, "Gradients against depth").caption.endswith("Only in the table: w8.")


def test_settings_name_versions_without_training(made):
    page = report.build_comparison_page(replace(made, runs=[]))
    (facts,) = page.sections[-1].blocks
    assert "Python" in facts.items["this report"]


def test_nan_shares_leave_out_the_map(made):
    runs = []
    for run in made.runs:
        if "after" in run:
            after = run["after"]
            size = len(after["map"]["sources"])
            shares = [[math.nan] * size] * len(after["map"]["shares"])
            gradient = [math.nan, math.inf, *after["gradient"][2:]]
            runs.append({**run, "after": {**after, "gradient": gradient, "map": {**after["map"], "shares": shares}}})
        else:
            runs.append(run)
    page = report.build_comparison_page(replace(made, runs=runs, stacks=[]))
    checked(report.render(page))
    titles = [one.title for section in page.sections for one in section.blocks if isinstance(one, Figure)]
    assert "Sources of the stream, after training" not in titles, "all cells would be empty"
