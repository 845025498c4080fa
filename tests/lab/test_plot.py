"""addnorm.lab.plot: what is drawn are the numbers; what diverged is a cross, and nothing is left out in silence."""

import math

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from addnorm.lab import compare, plot
from support.lab_runs import TEXT, compared, planted, quick

INF = math.inf


@pytest.fixture
def ax():
    return Figure().subplots()


@pytest.fixture(scope="module")
def found():
    return compare(["post_ln", "pre_ln"], quick(warm_ups=(0, 5), seeds=(0, 1)), text=TEXT, jobs=1, at_init=False)


def drawn(ax):
    """The points of each series with a name."""
    return {
        line.get_label(): [*zip(line.get_xdata(), line.get_ydata(), strict=True)]
        for line in ax.lines
        if line.get_label()[0] != "_"
    }


def series(ax):
    """The heights of every line."""
    return [[round(float(y), 6) for y in line.get_ydata()] for line in ax.lines]


def means(values):
    return [round(sum(at) / len(at), 6) for at in zip(*values, strict=True)]


def test_a_learning_curve_is_the_mean_of_the_seeds_smoothed(ax):
    runs = [planted("a", seed=seed, losses=[seed + 1.0, seed + 2.0, seed + 6.0]) for seed in (0, 1)]
    assert plot.curves(compared(*runs), 2, ax) is ax
    assert drawn(ax)["a"] == [(1.0, 1.5), (2.0, 2.0), (3.0, 3.5)]
    assert plot.smoothed([float(k) for k in range(20)])[-1] == 14.5


def test_with_and_without_warm_up_are_one_colour_and_two_dashes():
    runs = [planted(name, warm_up=warm_up) for name in "ab" for warm_up in (0, 100)]
    shown = plot.chosen(compared(*runs), 2)
    assert [one.label for one in shown] == ["a, no warm-up", "a, warm-up", "b, no warm-up", "b, warm-up"]
    colours = [one.style["color"] for one in shown]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    assert shown[0].style["linestyle"] != shown[1].style["linestyle"]


def test_twelve_wirings_are_told_apart():
    runs = [planted(f"wiring {k}") for k in range(12)]
    styles = [tuple(map(str, one.style.values())) for one in plot.chosen(compared(*runs), 2)]
    assert len(set(styles)) == 12


def test_a_rate_that_diverged_is_a_cross_at_the_top(ax):
    runs = [planted("a", 1.0, lr=1e-3), planted("a", 2.0, lr=1e-3, seed=1), planted("a", INF, lr=1e-2, diverged=True)]
    plot.rates(compared(*runs), 2, ax)
    assert drawn(ax)["a, no warm-up"] == [(1e-3, 1.5)]
    crosses = [line for line in ax.lines if line.get_marker() == "x"]
    assert [line.get_xdata()[0] for line in crosses] == [1e-2]
    points = [line.get_ydata() for line in ax.lines if line.get_marker() == "."]
    assert sorted(map(float, points[0])) == [1.0, 2.0]


@pytest.mark.parametrize("after", [False, True])
def test_by_depth_are_the_means_over_the_seeds(found, after):
    shown = plot.chosen(found, 2)
    figure = plot.by_depth(shown, plot.BACKWARD, Figure(figsize=(7, 6)), after=after)
    group = shown[0].group
    values = [run["after"]["gradient"] if after else run["recorded"]["gradient"][0] for run in group.runs]
    assert means(values) in series(figure.axes[0])
    assert len(figure.axes) == len(plot.BACKWARD)


def test_ablation_is_the_mean_over_the_seeds(found, ax):
    shown = plot.best(found, 2)
    plot.ablation(shown, ax)
    runs = shown[1].group.runs
    assert means([[one["rise"] for one in run["ablation"]] for run in runs]) in series(ax)


def test_where_nothing_was_recorded_it_says_so(ax):
    shown = plot.chosen(compared(planted("a")), 2)
    with pytest.raises(ValueError, match="nothing was recorded by depth"):
        plot.by_depth(shown, plot.FORWARD, Figure(), after=False)
    with pytest.raises(ValueError, match="nothing was ablated"):
        plot.ablation(shown, ax)


def test_a_figure_of_runs_that_all_diverged_is_drawn(ax):
    plot.curves(compared(planted("a", INF, diverged=True, losses=[math.nan])), 2, ax)
    plot.rates(compared(planted("a", INF, diverged=True, losses=[math.nan])), 2, ax)
    ax.figure.canvas.draw()
