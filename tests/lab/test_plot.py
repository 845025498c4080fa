"""Tests of `addnorm.lab.plot`: the drawn numbers are the measured ones."""

import math

import pytest

pytest.importorskip("matplotlib")

from addnorm.lab import compare, plot
from support.lab_runs import TEXT, compared, planted, quick

INF = math.inf


@pytest.fixture
def figure():
    from matplotlib.figure import Figure  # not at the top: every process collects every file

    return Figure(figsize=(7, 6))


@pytest.fixture
def ax(figure):
    return figure.subplots()


@pytest.fixture(scope="module")
def comparison():
    return compare(["post_ln", "pre_ln"], quick(warm_ups=(0, 5), seeds=(0, 1)), text=TEXT, jobs=1, at_init=False)


def labelled_series(ax):
    """Return the points of each labelled series."""
    return {
        line.get_label(): [*zip(line.get_xdata(), line.get_ydata(), strict=True)]
        for line in ax.lines
        if line.get_label()[0] != "_"
    }


def series(ax):
    """Return the y values of every line."""
    return [[round(float(y), 6) for y in line.get_ydata()] for line in ax.lines]


def means(values):
    return [round(sum(at) / len(at), 6) for at in zip(*values, strict=True)]


def test_plot_learning_draws_smoothed_mean(ax):
    runs = [planted("a", seed=seed, losses=[seed + 1.0, seed + 2.0, seed + 6.0]) for seed in (0, 1)]
    assert plot.plot_learning(compared(*runs), 2, ax) is ax
    assert labelled_series(ax)["a"] == [(1.0, 1.5), (2.0, 2.0), (3.0, 3.5)]
    assert plot.smooth([float(k) for k in range(20)])[-1] == 14.5


def test_groups_by_warm_up_share_colour_not_dash():
    runs = [planted(name, warm_up=warm_up) for name in "ab" for warm_up in (0, 100)]
    groups = plot.groups_by_warm_up(compared(*runs), 2)
    assert [line.label for line in groups] == ["a, no warm-up", "a, warm-up", "b, no warm-up", "b, warm-up"]
    colours = [line.style["color"] for line in groups]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    assert groups[0].style["linestyle"] != groups[1].style["linestyle"]


def test_twelve_wirings_have_different_styles():
    runs = [planted(f"wiring {k}") for k in range(12)]
    styles = [tuple(map(str, line.style.values())) for line in plot.groups_by_warm_up(compared(*runs), 2)]
    assert len(set(styles)) == 12


def test_plot_rates_marks_divergence_with_cross(ax):
    runs = [planted("a", 1.0, lr=1e-3), planted("a", 2.0, lr=1e-3, seed=1), planted("a", INF, lr=1e-2, diverged=True)]
    plot.plot_rates(compared(*runs), 2, ax)
    assert labelled_series(ax)["a, no warm-up"] == [(1e-3, 1.5)]
    crosses = [line for line in ax.lines if line.get_marker() == "x"]
    assert [line.get_xdata()[0] for line in crosses] == [1e-2]
    points = [line.get_ydata() for line in ax.lines if line.get_marker() == "."]
    assert sorted(map(float, points[0])) == [1.0, 2.0]


@pytest.mark.parametrize("after", [False, True])
def test_plot_by_depth_draws_means_over_seeds(comparison, figure, after):
    groups = plot.groups_by_warm_up(comparison, 2)
    figure = plot.plot_by_depth(groups, plot.BACKWARD, figure, after=after)
    group = groups[0].group
    values = [run["after"]["gradient"] if after else run["recorded"]["gradient"][0] for run in group.runs]
    assert means(values) in series(figure.axes[0])
    assert len(figure.axes) == len(plot.BACKWARD)


def test_plot_ablation_draws_means_over_seeds(comparison, ax):
    groups = plot.best_groups(comparison, 2)
    plot.plot_ablation(groups, ax)
    runs = groups[1].group.runs
    assert means([[ablation["rise"] for ablation in run["ablation"]] for run in runs]) in series(ax)


def test_plots_without_numbers_raise(ax):
    groups = plot.groups_by_warm_up(compared(planted("a")), 2)
    with pytest.raises(ValueError, match="nothing was recorded by depth"):
        plot.plot_by_depth(groups, plot.FORWARD, ax.figure, after=False)
    with pytest.raises(ValueError, match="nothing was ablated"):
        plot.plot_ablation(groups, ax)


def test_plots_of_diverged_runs_are_drawn(ax):
    plot.plot_learning(compared(planted("a", INF, diverged=True, losses=[math.nan])), 2, ax)
    plot.plot_rates(compared(planted("a", INF, diverged=True, losses=[math.nan])), 2, ax)
    ax.figure.canvas.draw()
