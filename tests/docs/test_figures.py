"""Tests of docs/_build/figures.py and its numbers: the figures of the docs show what the library computes."""

import functools
import re
import statistics

import pytest
import torch
import torch.nn.functional as F

import addnorm
from addnorm import trace
from addnorm.lab.toy_model import ToyModel
from support.loading import ROOT, load

PAGE = ROOT / "docs/add_norm.md"
STREAMS = ROOT / "docs/several_streams.md"
FIGURES = [path.stem for path in (ROOT / "docs/figures").glob("*.svg")]


@pytest.fixture(scope="module")
def figures():
    """Return the script, with stacks that are measured once."""
    module = load("docs/_build/figures.py")
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((module.numbers, "by_depth"), (module.stream_numbers, "streams_by_depth")):
            patch.setattr(owner, name, functools.cache(getattr(owner, name)))
        yield module


@pytest.fixture
def numbers(figures):
    return figures.numbers


def test_by_depth_measures_every_sublayer(numbers):
    stacks = numbers.by_depth()
    assert [*stacks] == ["pre_ln", "post_ln", "no_residual", "no_norm"]
    for wiring, by_depth in stacks.items():
        assert len(by_depth.cosine) == len(by_depth.rms) == 2 * numbers.LAYERS + 1
        models = [ToyModel(numbers.LAYERS, wiring, seed).record() for seed in numbers.SEEDS]
        ends = [(model.states[0][0].detach(), model.states[-1][0].detach()) for model in models]
        cosine = statistics.fmean(float(F.cosine_similarity(*pair, dim=-1).mean()) for pair in ends)
        rms = statistics.fmean(model.statistics()["stream"][-1] for model in models)
        assert (by_depth.cosine[0], by_depth.cosine[-1]) == pytest.approx((1, cosine), rel=1e-4, abs=1e-4)
        assert by_depth.rms[-1] == pytest.approx(rms, rel=1e-3)


def test_worked_example_is_the_trace_of_its_numbers(numbers):
    t = trace.trace([1, 2, 3], [0.5, -1, 1.5])
    assert numbers.example().output == t.output
    steps = dict(numbers.workflow())
    assert len(steps) == 7
    assert steps["Start with a token vector x"] == "x = [1, 2, 3]"
    assert steps["Get what the sublayer returned"] == "Sublayer(x) = [0.5, −1, 1.5]"
    assert steps["Add: z = x + Sublayer(x)"] == "z = [1.5, 1, 4.5]"
    assert "μ = 2.33, σ² = 2.39, √(σ² + ε) = 1.55\n" in steps["Normalize over the features"]
    assert steps["Scale and shift by γ and β"] == "γ = [1, 1, 1], β = [0, 0, 0]"
    assert steps["Send y to the next block"] == "y = [−0.54, −0.86, 1.40]"


def test_encoder_layer_is_that_of_the_library(numbers):
    flow = numbers.encoder_layer()
    torch.manual_seed(0)
    encoder = addnorm.nn.Encoder(1, numbers.WIDTH, 2, wiring="post_ln").eval()
    torch.testing.assert_close(encoder(flow.x[None])[0], flow.y_2)
    first, second = (connection.sublayer for connection in encoder.stack.connections)
    torch.testing.assert_close(first(flow.x[None])[0], flow.attention)
    torch.testing.assert_close(second(flow.y[None])[0], flow.feed_forward)
    for x, write, z, y in ((flow.x, flow.attention, flow.z, flow.y), (flow.y, flow.feed_forward, flow.z_2, flow.y_2)):
        torch.testing.assert_close(z, x + write)
        torch.testing.assert_close(y, F.layer_norm(z, (numbers.WIDTH,)))
    assert numbers.token_rms(flow.y) == pytest.approx([1] * 5, abs=1e-4)
    assert max(numbers.token_rms(flow.z)) > 3 * min(numbers.token_rms(flow.x))


def values_of(panel):
    """Return the numbers of each series of a chart's panel."""
    return {series.label: [y for _, y in series.points] for series in panel.series}


def test_curves_are_the_measured_numbers(figures, numbers):
    stacks = numbers.by_depth()
    left, right = map(values_of, figures.signal_and_scale().panels)
    assert left == {stacks[wiring].name: stacks[wiring].cosine for wiring in ("pre_ln", "post_ln", "no_residual")}
    assert right == {stacks[wiring].name: stacks[wiring].rms for wiring in ("no_norm", "pre_ln", "post_ln")}
    assert f"pre-LN falls slowly to {stacks['pre_ln'].cosine[-1]:.2f}" in PAGE.read_text()


def test_cosine_of_streams_is_that_of_different_streams(figures):
    streams = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]], [[1.0, 1.0], [2.0, 2.0], [0.5, 0.5]]])
    assert figures.stream_numbers.stream_cosine(streams) == pytest.approx((-1 / 3 + 1) / 2)


def test_curves_of_streams_are_drawn_and_described(figures):
    curves = figures.stream_numbers.streams_by_depth()
    for panel, courses in zip(figures.several_streams().panels, curves, strict=True):
        assert values_of(panel) == {course.name: course.values for course in courses.values()}
    text = STREAMS.read_text()
    cosine, gain, read = ({wiring: course.values for wiring, course in courses.items()} for courses in curves)
    assert f"falls to {cosine['hyper_connections'][4]:.2f} within four sublayers" in text
    assert f"in mHC it stays at {cosine['mhc'][-1]:.2f}" in text
    assert min(cosine["mhc"]) > 0.95
    amplified = float(re.search(r"it grows to (\d+) after 32 sublayers, in mHC it is 1\.", text)[1])
    assert gain["hyper_connections"][-1] == pytest.approx(amplified, rel=0.01)
    assert gain["mhc"] == pytest.approx([1.0] * 33, abs=1e-3)
    assert f"in pre-LN it grows to {read['pre_ln'][-1]:.2f}" in text
    assert f"in attention residuals it falls to {read['attention_residuals'][-1]:.2f}" in text


def test_bars_are_the_vectors_of_the_trace(figures, numbers):
    names = ("x", "sublayer", "z", "centred", "normalized")
    for ax, name in zip(figures.add_then_norm().axes, names, strict=True):
        assert tuple(bar.get_height() for bar in ax.patches) == pytest.approx(numbers.example()[name].value)


def test_heat_maps_are_the_tensors_on_one_scale(figures, numbers):
    flow = numbers.encoder_layer()
    order = (flow.x, flow.attention, flow.z, flow.y, flow.y, flow.feed_forward, flow.z_2, flow.y_2)
    for ax, values in zip(figures.encoder_layer().axes, order, strict=False):  # the last axis is the colour bar
        mesh = ax.collections[0]
        assert mesh.get_array().tolist() == pytest.approx(values.numpy())
        assert mesh.get_clim() == (-4, 4)
    assert (torch.stack(order).abs() > 4).float().mean() < 0.02


def test_training_curves_are_the_measured_numbers(figures, numbers):
    document = numbers.document("norms")
    courses = numbers.training(figures.TRAINED_LAYERS)
    claims = {one["claim"].split(";")[0]: one["measured"] for one in document["claims"]}
    for key, panel in zip(("loss", "size", "shift"), figures.norms().panels, strict=True):
        assert values_of(panel) == {course.name: getattr(course, key) for course in courses.values()}
    for wiring, course in courses.items():
        depth = f"{figures.TRAINED_LAYERS} layers"
        assert max(course.shift) == pytest.approx(
            claims["The distribution of activations within layers shifts during training."][depth][wiring]
        )
        assert max(course.size) == pytest.approx(
            claims["With the norm, the inputs to the next layer stay in a consistent range."][depth][wiring], rel=1e-3
        )
        assert course.steps[-1] == document["protocol"]["steps"]


@pytest.mark.parametrize("name", FIGURES)
def test_figure_has_dark_colours_for_all_of_its_own(figures, name):
    """Colours without a dark one are those of the heat maps' cells."""
    text = (ROOT / f"docs/figures/{name}.svg").read_text()
    assert "@media (prefers-color-scheme: dark)" in text
    drawing = text.split("</style>")[1]
    used = {*re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", drawing)}
    cells = {*re.findall(r"fill: (#[0-9a-f]{6})", "".join(re.findall(r'<g id="QuadMesh.*?</g>', drawing, re.DOTALL)))}
    assert used - {colour.lower() for colour in figures.DARK} <= cells
    assert '<text style="' not in drawing or "fill: #222222" in drawing


def test_figures_are_reproducible_and_written_together(figures, tmp_path, monkeypatch):
    assert figures.main([str(tmp_path)]) == 0
    written = {path.stem: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(written) == sorted(FIGURES)
    assert figures.svg(figures.workflow) == written["workflow"]
    assert "<dc:date>" not in written["workflow"]
    monkeypatch.setattr(figures, "FIGURES", {"workflow": figures.workflow, "encoder-layer": lambda: 1 / 0})
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with pytest.raises(ZeroDivisionError):
        figures.main([str(tmp_path)])
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
