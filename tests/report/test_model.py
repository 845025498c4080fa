"""Tests of the report of a model: drawings, numbers, findings, and pages of partial measurements."""

import math
from types import SimpleNamespace

import pytest
import torch

import addnorm
from addnorm.lab.train import one_thread
from addnorm.report import Finding, build_model_page, render
from addnorm.report.model_findings import ablation_findings, recording_findings
from addnorm.stream.ablate import Ablations
from addnorm.stream.find.unknown import Unknown
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import RecordedSite
from support.families import shake
from support.instrumented_model import record
from support.random_programs import random_program
from support.report_pages import blocks_of, check_page, figure, head, tables, titles
from support.stacks import torch_encoder
from support.stream_steps import X, make_steps


@pytest.fixture(scope="module")
def measured():
    """Return a small pre-LN model, its measurements, and its page with all its drawings."""
    with one_thread():
        model = torch_encoder(True, norm=torch.nn.LayerNorm(16))
        inspection = addnorm.inspect(model, X)
        with addnorm.record(model) as recording:
            (model(X) * torch.randn(16)).sum().backward()
        ablations = addnorm.ablate_each(inspection, X, loss=lambda y: y[..., 0].square().mean())
    page = build_model_page(inspection, recording, ablations, {"inputs": "drawn"})
    return SimpleNamespace(model=model, inspection=inspection, recording=recording, ablations=ablations, page=page)


def findings_of(page):
    blocks = [block for section in page.sections if section.title == "Findings" for block in section.blocks]
    return [item.claim for block in blocks for item in block.items]


def test_model_page_has_all_sections(measured):
    page = measured.page
    document = check_page(render(page))
    assert titles(page) == [
        "Findings", "The wiring", "Forward and backward by depth", "Sources of the stream",
        "Ablations", "Settings",
    ]  # fmt: skip
    assert [element["text"] for element in document.all("h1")] == ["TransformerEncoder"]
    assert len(document.all("figure")) == 5
    assert page.tiles["Wiring"] == "pre_ln"
    assert "drawn" in [element["text"] for element in document.all("dd")]
    all_tables = tables(document)
    for page_figure in blocks_of(page, "figure"):  # tables keep all digits
        rows = [
            [cell if isinstance(cell, float) else "" if cell is None else str(cell) for cell in row]
            for row in page_figure.table.rows
        ]
        assert [head(page_figure.table), *rows] in all_tables


def test_model_page_begins_with_model_inputs_date_loss(measured):
    date = measured.recording.metadata["date"]
    expected = {"model": "TransformerEncoder", "inputs": "drawn", "date": date, "loss": "that of the caller"}
    assert list(measured.page.facts.items()) == list(expected.items())
    text = render(measured.page)
    places = [text.index(f"<dd>{value}</dd>") for value in expected.values()]
    assert places == sorted(places)
    assert places[-1] < text.index('<dl class="tiles">')
    given = {"loss": "cross entropy", "seed": "7"}
    page = build_model_page(measured.inspection, facts=given)
    assert page.facts == {"model": "TransformerEncoder", "loss": "cross entropy"}
    assert "seed" in render(page)


def test_figures_have_the_recorded_numbers(measured):
    expected = {
        "The stream and the gradient": [("out", "rms"), ("out", "max"), ("grad", "l2"), ("params", "grad_l2")],
        "Writes relative to the stream": [("write", "ratio"), ("write", "cosine")],
        "Similarity of the tokens": [("out", "similarity"), ("norm_in", "sigma"), ("norm_final", "sigma")],
    }
    for title, statistics in expected.items():
        table = figure(measured.page, title).table
        for column, (role, statistic) in enumerate(statistics, 3):
            shown = {row[0]: row[column] for row in table.rows if row[column] is not None}
            assert shown == {site.id: value for site, value in measured.recording.series(role, statistic)}, statistic
            assert shown
    shares = figure(measured.page, "Sources of the stream").table
    sources, rows = measured.recording.memory_maps["stream"]
    assert [row[0] for row in shares.rows] == sources
    assert [[*depth] for depth in zip(*(row[1:] for row in shares.rows), strict=True)] == rows


def test_ablation_figure_has_every_sublayer(measured):
    drawing, ablations = figure(measured.page, "without each"), measured.ablations
    assert [row[0] for row in drawing.table.rows] == [each.site.id for each in ablations]
    assert [row[3] for row in drawing.table.rows] == [each.output_change for each in ablations]
    assert [row[6] for row in drawing.table.rows] == [each.loss_change for each in ablations]
    assert drawing.svg.count('class="bar"') == 2 * 2 + 2, "a series for each kind in each panel, and the legend"
    without_loss = Ablations(
        type(each)(each.site, None, None, 0.25, math.nan if place == 1 else each.output_change)
        for place, each in enumerate(ablations)
    )
    page = build_model_page(measured.inspection, None, without_loss)
    drawing = figure(page, "without each")
    assert drawing.table.columns[-1].header == "KL divergence"
    assert "NaN or infinite" in drawing.svg
    check_page(render(page))


def test_findings_are_computed(measured):
    text = " ".join(findings_of(measured.page))
    site, ratio = max(measured.recording.series("write", "ratio"), key=lambda pair: pair[1])
    assert f"is that of the {site.kind} of layer {site.layer + 1}, {100 * ratio:.1f}%" in text
    share = measured.recording.memory_maps["stream"][1][-1][0]
    assert f"{100 * share:.1f}% of the final stream is from x_0" in text
    largest = max(measured.ablations, key=lambda ablation: ablation.output_change)
    assert f"The output changes most without the {largest.site.kind} of layer {largest.site.layer + 1}, by" in text
    assert "There are no massive activations" in text


def recorded(**values):
    """Return a recording of three sublayers from lists by role and statistic: out_rms=[...]."""
    sites = [RecordedSite("x_0", "", "start", None)]
    sites += [RecordedSite(f"layers.{k}", "", "attention", k) for k in range(3)]
    rec = Recording(sites, {"model": "Toy"})
    for name, series in values.items():
        role, statistic = name.rsplit("_", 1)
        for place, value in enumerate(series, len(sites) - len(series)):
            rec.add(0, place, role, statistic, value)
    return rec


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"out_rms": [1.0, 2.0, 3.0, 4.0]}, "The root mean square of the stream is 1.00 at x_0 and 4.00 at its end: it changes by a factor of 4.0."),
        ({"write_ratio": [0.5, 1e-5, 1e-4]}, "In 2 of 3 sublayers the write has less than 0.100% of the stream's norm: the attention of layer 2, the attention of layer 3."),
        ({"write_cosine": [0.5, -0.5, 0.0]}, "In 1 of 3 sublayers the write opposes the stream, most strongly in the attention of layer 2: cosine -0.50."),
        ({"out_similarity": [0.1, 0.5, 0.8, 0.99]}, "is 0.10 at x_0 and 0.99 at the end: the tokens are nearly equal"),
        ({"out_massive": [0.0, 0.0, 3.0, 7.0]}, "Massive activations occur from the attention of layer 2 on: at most 7, after the attention of layer 3"),
        ({"out_top": [1.0, 2.0, 30.0, 4.0]}, "no massive activations; the largest magnitude is 30 times the median, after the attention of layer 2"),
        ({"grad_l2": [8.0, 4.0, 2.0, 1.0]}, "The norm of the stream's gradient at x_0 is 8.0 times that at its end."),
        ({"write_unchanged": [0.0, 0.25, 0.0]}, "25.0% of the stream's elements do not change when the attention of layer 2 adds"),
        ({"out_rms": [1.0, math.nan, math.inf, 4.0]}, "2 of the recorded numbers are NaN or infinite; the first in depth is rms of out at layers.0."),
    ],
)  # fmt: skip
def test_recording_findings(values, words):
    texts = [finding.claim for finding in recording_findings(recorded(**values))]
    assert any(words in text for text in texts), texts


def test_empty_recording_has_no_findings():
    assert recording_findings(Recording()) == []
    assert [*ablation_findings(())] == []


def test_unclosed_and_unknown_sites_are_shown(measured):
    inspection = addnorm.inspect(measured.model, X)
    inspection.sites[1].closes, inspection.sites[1].closure = False, 0.5
    inspection.unknown = (Unknown("a<b>", "it is <i>odd</i>"), Unknown("", "nobody knows"))
    page = build_model_page(inspection)
    sentence = f"The equations of 1 of 4 sublayers do not close: x' = x + f(N(x)) has a relative error of 0.50 at {inspection.sites[1].id}."
    assert [finding for finding in page.verdict if finding.verdict == "refuted"] == [Finding(sentence, "refuted")]
    text = render(page)
    assert tables(check_page(text))[1] == [
        ["where", "why"],
        ["a<b>", "it is <i>odd</i>"],
        ["the model", "nobody knows"],
    ]
    assert "<i>" not in text
    assert text.count('<tr class="wrong">') == 1


def test_page_of_encoder_decoder():
    from addnorm.stream.models.load import load

    loaded = load("t5", layers=2, tokens=6)
    loaded.model.eval()
    inspection = addnorm.inspect(loaded.model, *loaded.args, **loaded.kwargs)
    with torch.no_grad(), addnorm.record(loaded.model, grads=False) as recording:
        loaded.model(*loaded.args, **loaded.kwargs)
    page = build_model_page(inspection, recording)
    assert titles(page)[1:3] == ["The wiring of the encoder", "The wiring of the decoder"]
    assert figure(page, "Sources of the stream of the decoder")
    assert any(text.startswith("In the decoder: the root mean square of the stream") for text in findings_of(page))
    check_page(render(page))


@pytest.mark.parametrize("with_nan", [False, True])
def test_page_of_one_sublayer_and_of_nan(with_nan):
    model, x = make_steps(lambda m, x: x + m.branch(0, x)), X.clone()
    if with_nan:
        x[0, 0, 0] = math.nan
    inspection = addnorm.inspect(model, x)
    recording = record(model, x)
    page = build_model_page(inspection, recording)
    check_page(render(page))
    if with_nan:
        assert "Sources of the stream" not in titles(page)
        assert any("NaN or infinite" in text for text in findings_of(page))
        return
    assert page.verdict[0].claim.startswith("The equations of 1 of 1 sublayers, computed again in float64, differ")
    wiring = next(finding.claim for finding in page.verdict if finding.claim.startswith("The wiring is pre_ln"))
    assert "The output is" not in wiring


@pytest.mark.parametrize("wiring", ["mhc", "attention_residuals", "residual_scaling", "unknown"])
def test_page_of_a_program_has_its_matrices_and_numbers(wiring):
    model = (
        shake(addnorm.nn.Encoder(2, 16, nhead=2, wiring=wiring).eval()) if wiring != "unknown" else random_program(7)
    )
    inspection = addnorm.inspect(model, X)
    program = inspection.program or inspection.unnamed
    rec = record(model, X)
    ablations = addnorm.ablate_each(inspection, X) if inspection.program else None
    page = build_model_page(inspection, rec, ablations)
    check_page(render(page))
    assert {"The wiring", "The streams by depth", "Sources of the stream"} <= {*titles(page)}
    assert page.tiles["Wiring"] == inspection.wiring
    assert page.tiles["Width d"] == "16"
    assert "sublayers in 2 layers" in page.subtitle
    assert page.verdict[0].claim.startswith("The equations of 4 sublayers")
    streams, *matrices = blocks_of(page, "figure")[: 2 if wiring != "residual_scaling" else 1]
    sources = figure(page, "Sources of the stream")
    for row, statistics in zip(streams.table.rows, addnorm.stream.measure_streams(program), strict=True):
        assert row[0] == statistics.site
        assert row[3] == statistics.rms[0]
    assert all(figure.table.rows for figure in matrices)
    parts = addnorm.decompose(model, X).mean_shares(1)
    assert [row[2] for row in sources.table.rows] == pytest.approx(
        [parts.get(row[0], 0.0) for row in sources.table.rows]
    )
