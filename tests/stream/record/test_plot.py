"""Tests of drawings of a recording: values on the Axes, marks for values off the scale, several recordings on one Axes."""

import itertools
import math

import pytest

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex, to_rgb

from addnorm.stream.record import axes
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import ROLES
from support.pairwise import rotate
from support.recordings import sites

DRAWINGS = ("stream", "gradients", "writes", "similarity", "memory_map")
BY_DEPTH = DRAWINGS[:-1]
STATISTICS = (
    ("out", "rms"), ("out", "max"), ("out", "similarity"), ("grad", "l2"), ("params", "grad_l2"), ("write", "ratio"),
    ("write", "cosine"), ("norm_in", "rstd"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def pyplot(monkeypatch):
    from matplotlib import pyplot  # not at the top: every process collects every file

    pyplot.switch_backend("Agg")
    monkeypatch.setattr(pyplot, "show", lambda: pytest.fail("show was called"))
    yield pyplot
    pyplot.close("all")


def recorded(layers=3, streams=("stream",), value=lambda k: 1.0 / (k + 1), without=(), model="Toy"):
    """Return a recording in which every statistic of sublayer k (0 for x_0) is value(k)."""
    n = 2 * layers + 1
    all_sites = {stream: sites(layers, stream) for stream in streams}
    rec = Recording(itertools.chain(*all_sites.values()), {"model": model})
    for place, site in enumerate(rec.sites):
        roles = {"start": ("out", "grad"), "final": ()}.get(site.kind, ROLES)
        for role, name in STATISTICS:
            if role in roles and role not in without:
                rec.add(10, place, role, name, value(place % (n + 1)))
        if site.kind == "final":
            rec.add(10, place, "norm_final", "rstd", 0.5)
    rows = [[1 / (k + 1) if source <= k else 0.0 for source in range(n)] for k in range(n)]
    rec.memory_maps = {stream: ([site.id for site in own][:n], rows) for stream, own in all_sites.items()}
    return rec


def lines(ax):
    """Return the (x, y) of each line that connects points."""
    connecting = [
        line for line in ax.lines if line.get_linestyle() not in ("None", "none") and len(line.get_xdata()) > 0
    ]
    return [([*line.get_xdata()], [*line.get_ydata()]) for line in connecting if line.get_transform() == ax.transData]


def texts(ax):
    legend = ax.get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend else []


def panels(ax):
    found = [panel for panel in ax.figure.axes if panel.get_label() != "<colorbar>"]
    assert found
    return found


RECORDINGS = ({}, {"layers": 1}, {"layers": 65}, {"streams": ("encoder", "decoder")})


@pytest.mark.parametrize(("name", "options"), rotate([*DRAWINGS], RECORDINGS, 1))
def test_drawings_return_their_axes_and_can_be_saved(name, options, tmp_path, pyplot):
    draw = getattr(recorded(**options).plot, name)
    own = pyplot.Figure(figsize=(6, 4)).add_subplot()
    assert draw(ax=own) is own
    new = draw()
    new.figure.savefig(tmp_path / "a.png")
    for ax in (own, new):
        assert ax.get_title(loc="left").endswith("Toy, step 10")


def test_stream_draws_rms_and_max_by_depth():
    ax = recorded(1, value=lambda k: [1.0, 2.0, 3.0][k]).plot.stream()
    assert lines(ax) == [([0, 1, 2], [1.0, 2.0, 3.0])] * 2
    assert texts(ax) == ["rms", "max", "attention", "feed-forward"]
    assert ax.get_xlabel() == "depth in sublayers"
    assert (ax.get_yscale(), ax.get_ylim()[0]) == ("linear", 0.0)
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["x_0", "1", "2"]


@pytest.mark.parametrize("name", BY_DEPTH[1:])
def test_two_quantities_share_the_depths(name):
    upper, lower = panels(getattr(recorded().plot, name)())
    assert upper.get_xlim() == lower.get_xlim()
    assert upper.get_shared_x_axes().joined(upper, lower)
    assert upper.get_ylabel() != lower.get_ylabel()
    assert (upper.get_xlabel(), lower.get_xlabel()) == ("", "depth in sublayers")


@pytest.mark.parametrize("name", BY_DEPTH)
def test_two_recordings_differ_in_colour_dash_and_fill(name):
    before, after = recorded(model="A"), recorded(4, model="B", value=lambda k: 300.0 + k)
    ax = getattr(before.plot, name)(label="before")
    count = len(panels(ax))
    assert getattr(after.plot, name)(ax=ax, label="after") is ax
    assert len(panels(ax)) == count
    handles = ax.get_legend().legend_handles[: 4 if name == "stream" else 2]
    assert len({handle.get_color() for handle in handles}) == len(handles)
    assert len({str(handle._unscaled_dash_pattern) for handle in handles}) == len(handles)
    fills = {(handle.get_fillstyle(), to_hex(handle.get_markerfacecolor()) == "#ffffff") for handle in handles}
    assert len(fills) == len(handles)
    assert any("before" in text for text in texts(ax))
    assert any("after" in text for text in texts(ax))
    title = ax.get_title(loc="left")
    assert title.endswith("step 10")
    assert "Toy" not in title  # the title leaves out the two models
    assert ax.get_xlim()[1] > 8
    for panel in panels(ax):
        assert panel.get_yscale() == ("linear" if "cos" in panel.get_ylabel() else "log")


def test_recordings_without_labels_get_numbers():
    ax = recorded().plot.writes()
    assert texts(ax) == ["attention", "feed-forward"]  # one series needs no name
    recorded().plot.writes(ax=ax)
    assert texts(ax)[:2] == ["Toy", "Toy (2)"]


def test_line_keywords_and_their_short_names():
    ax = recorded().plot.gradients(c="#123456", lw=3, ls=":", marker="x", alpha=0.5)
    for panel in panels(ax):
        drawn = [line for line in panel.lines if line.get_linestyle() == ":"]
        assert {line.get_color() for line in panel.lines} == {"#123456"}
        assert [line.get_linewidth() for line in drawn] == [3]
        assert {line.get_marker() for line in panel.lines if line not in drawn} == {"x"}


def test_kinds_have_markers():
    ax = recorded().plot.stream()
    markers = {line.get_marker(): len(line.get_xdata()) for line in ax.lines if line.get_linestyle() == "None"}
    assert markers == {">": 1, "o": 3, "s": 3}


def test_nan_and_inf_are_crosses():
    rec = recorded(value=lambda k: {2: math.nan, 3: math.inf}.get(k, 1.0 + k))
    for name in BY_DEPTH:
        ax = getattr(rec.plot, name)()
        getattr(rec.plot, name)(ax=ax)  # the marks are drawn once
        for panel in panels(ax):
            crosses = [line for line in panel.lines if line.get_marker() == "x"]
            assert [{*line.get_xdata()} for line in crosses] in ([{2, 3}], [{2}])  # 1 / inf is 0
            assert any("NaN" in text for text in texts(panel))


def test_zeros_on_a_log_axis_are_triangles():
    ax = recorded(value=lambda k: [1.0, 0.0, 100.0, 0.0, 1.0, 2.0, 3.0][k]).plot.writes()
    (mark,) = [line for line in ax.lines if line.get_marker() == "v"]
    assert [*mark.get_xdata()] == [1, 3]
    assert "0, off the log axis" in texts(ax)


def test_streams_follow_each_other():
    rec = recorded(1, ("encoder", "decoder"))
    ax = rec.plot.stream()
    assert [x for x, _ in lines(ax)] == [[0, 1, 2], [4, 5, 6]] * 2
    assert [tick.get_text() for tick in ax.get_xticklabels(minor=True)] == ["encoder", "decoder"]
    alone = rec.plot.stream(stream="decoder")
    assert [x for x, _ in lines(alone)] == [[0, 1, 2]] * 2


def test_step_selects_values():
    rec = recorded(1, value=lambda k: 1.0)
    for place in range(3):
        rec.add(20, place, "out", "rms", 7.0)
    assert lines(rec.plot.stream())[0][1] == [7.0] * 3
    assert lines(rec.plot.stream(step=10))[0][1] == [1.0] * 3


def test_missing_values_raise_and_draw_nothing(pyplot):
    rec = recorded(without=("grad", "params"))
    with pytest.raises(ValueError, match=r"no values of gradients: record with grads=True, and call loss\.backward"):
        rec.plot.gradients()
    assert pyplot.get_fignums() == []


def test_one_of_two_quantities():
    rec = recorded(without=("params",))
    assert [panel.get_ylabel() for panel in panels(rec.plot.gradients())] == ["‖∂loss / ∂stream‖"]
    rec = recorded(without=("out",))
    assert [panel.get_ylabel() for panel in panels(rec.plot.similarity())] == ["σ"]


def test_several_norms_are_several_lines():
    rec = recorded()
    for place, site in enumerate(rec.sites):
        if site.kind not in ("start", "final"):
            rec.add(10, place, "norm_branch", "rstd", 3.0)
    upper, lower = panels(rec.plot.similarity())
    assert texts(lower) == ["of the input", "of the output"]
    assert "of the input" not in texts(upper)


def test_axes_without_a_grid_and_cleared_axes(pyplot):
    figure = pyplot.Figure()
    ax = figure.add_axes((0.1, 0.2, 0.5, 0.6))
    recorded().plot.gradients(ax=ax)
    upper, lower = panels(ax)
    assert lower.get_position().y0 == pytest.approx(0.2)
    assert upper.get_position().y1 == pytest.approx(0.8)
    assert lower.get_position().y1 < upper.get_position().y0
    ax = recorded().plot.stream(label="old")
    ax.clear()
    recorded().plot.stream(ax=ax, label="new")
    assert not any("old" in text for text in texts(ax))


def test_memory_map_leaves_cells_before_a_write_blank():
    ax = recorded(1).plot.memory_map()
    cells = ax.collections[0].get_array()
    assert cells.shape == (3, 3)  # source, depth
    assert cells[0].tolist() == pytest.approx([1, 1 / 2, 1 / 3])
    assert [bool(blank) for blank in cells.mask[2]] == [True, True, False]
    colours = ax.collections[0].get_cmap().colors
    assert {colour[:3] for colour in colours} == {to_rgb(axes.COLOURS[0])}
    assert [colours[0][3], colours[-1][3]] == pytest.approx([0.04, 1.0])
    assert {text.get_text() for text in ax.texts} == {"1.00", "0.50", "0.33"}
    assert len(ax.figure.axes) == 2  # with the colour bar


def test_memory_map_with_negative_shares_and_keywords():
    rec = recorded(15)
    ax = rec.plot.memory_map(cmap="viridis")
    assert ([*ax.texts], ax.collections[0].get_cmap().name) == ([], "viridis")
    rec.memory_maps = {"stream": (["a", "b"], [[1.5, -0.5]])}
    mesh = rec.plot.memory_map().collections[0]
    assert (mesh.norm.vmin, mesh.norm.vmax) == (-0.5, 1.5)
    assert mesh.to_rgba(-0.5)[:3] == pytest.approx(to_rgb(axes.COLOURS[1])), (
        "negative shares have a colour of their own"
    )
    assert mesh.to_rgba(1.5)[:3] == pytest.approx(to_rgb(axes.COLOURS[0]))
    limited = rec.plot.memory_map(vmin=-1.0, vmax=2.0).collections[0].norm
    assert (limited.vmin, limited.vmax) == (-1.0, 2.0)
    assert [mesh.norm(share) for share in (-0.5, 1.5)] == pytest.approx([0, 1])
    assert mesh.norm(0.02) - mesh.norm(-0.001) > 0.05, "small shares differ in colour"
    assert mesh.norm.inverse(mesh.norm(0.02)) == pytest.approx(0.02)


def test_memory_maps_of_several_streams():
    rec = recorded(1, ("encoder", "decoder"))
    assert len(panels(rec.plot.memory_map())) == 2
    assert "decoder" in rec.plot.memory_map(stream="decoder").get_title(loc="left")
    with pytest.raises(ValueError, match="stream is 'x', expected one of encoder, decoder"):
        rec.plot.memory_map(stream="x")
    with pytest.raises(ValueError, match="has no memory map: there is one where the writes add up"):
        Recording().plot.memory_map()
