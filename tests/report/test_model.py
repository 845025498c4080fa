"""Tests of the report of a model."""

import math
import re

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

import addnorm
from addnorm.report import Finding, build_model_page, render
from addnorm.report.model_findings import ablation_findings, recording_findings
from addnorm.stream.ablate import Ablations
from addnorm.stream.find.inspection import Unknown
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import RecordedSite
from support.pages import checked, tables


@pytest.fixture(scope="module")
def made():
    """Return a small pre-LN model, its measurements, and its page."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, torch.nn.LayerNorm(16), enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 16)
    found = addnorm.inspect(model, x)
    with addnorm.record(model) as rec:
        (model(x) * torch.randn(16)).sum().backward()
    done = addnorm.ablate_each(found, x, loss=lambda y: y[..., 0].square().mean())
    torch.set_num_threads(threads)
    return model, found, rec, done, build_model_page(found, rec, done, {"inputs": "drawn"})


def figure(page, title):
    found = [one for section in page.sections for one in section.blocks if one.kind == "figure" and title in one.title]
    assert len(found) == 1, title
    return found[0]


def said(page):
    of = [one for section in page.sections if section.title == "Findings" for one in section.blocks]
    return [item.text for block in of for item in block.items]


def test_model_page_has_all_sections(made):
    page = made[-1]
    found = checked(render(page))
    assert [section.title for section in page.sections] == [
        "Findings", "The wiring", "Forward and backward by depth", "Sources of the stream",
        "Ablations", "Settings",
    ]  # fmt: skip
    assert [one["text"] for one in found.all("h1")] == ["TransformerEncoder"]
    assert len(found.all("figure")) == 5
    assert page.tiles["Wiring"] == "pre_ln"
    assert "drawn" in [one["text"] for one in found.all("dd")]


def test_figures_have_the_recorded_numbers(made):
    _, _, rec, _, page = made
    expected = {
        "The stream and the gradient": [("out", "rms"), ("out", "max"), ("grad", "l2"), ("params", "grad_l2")],
        "Writes relative to the stream": [("write", "ratio"), ("write", "cosine")],
        "Similarity of the tokens": [("out", "similarity"), ("norm_in", "sigma"), ("norm_final", "sigma")],
    }
    for title, statistics in expected.items():
        table = figure(page, title).table
        for column, (role, statistic) in enumerate(statistics, 3):
            shown = {row[0]: row[column] for row in table.rows if row[column] is not None}
            assert shown == {site.id: value for site, value in rec.series(role, statistic)}, statistic
            assert shown
    shares = figure(page, "Sources of the stream").table
    sources, rows = rec.memory_maps["stream"]
    assert [row[0] for row in shares.rows] == sources
    assert [[*depth] for depth in zip(*(row[1:] for row in shares.rows), strict=True)] == rows


def test_tables_keep_all_digits(made):
    page = made[-1]
    found = tables(checked(render(page)))
    figures = [one for section in page.sections for one in section.blocks if one.kind == "figure"]
    for one in figures:
        expected = [
            [cell if isinstance(cell, float) else "" if cell is None else str(cell) for cell in row]
            for row in one.table.rows
        ]
        assert [[*one.table.head], *expected] in found


def test_ablation_figure_has_every_sublayer(made):
    _, _, _, done, page = made
    one = figure(page, "without each")
    assert [row[0] for row in one.table.rows] == [each.site.id for each in done]
    assert [row[3] for row in one.table.rows] == [each.output_change for each in done]
    assert [row[6] for row in one.table.rows] == [each.loss_change for each in done]
    assert one.svg.count("fill: var(--series-1)") >= 2  # attention's bars
    assert "url(#ablation-wide-" in one.svg  # the stripes of the others
    assert not re.findall(r"#[0-9a-fA-F]{6}", one.svg)
    without_loss = Ablations(
        type(each)(each.site, None, None, 0.25, math.nan if place == 1 else each.output_change)
        for place, each in enumerate(done)
    )
    page = build_model_page(made[1], None, without_loss)
    one = figure(page, "without each")
    assert one.table.head[-1] == "KL divergence"
    assert "NaN or infinite" in one.svg
    checked(render(page))


def test_depth_panels_are_aligned(made):
    svg = figure(made[-1], "The stream and the gradient").svg
    left = re.findall(r'd="M ([\d.]+) [^"]+" style="fill: var\(--paper\)"', svg)
    assert len(left) == 3
    assert len({*left}) == 1


def test_findings_are_computed(made):
    _, _, rec, done, page = made
    text = " ".join(said(page))
    ratios = rec.series("write", "ratio")
    most = max(ratios, key=lambda one: one[1])
    assert f"is that of the {most[0].kind} of layer {most[0].layer + 1}, {100 * most[1]:.1f}%" in text
    share = rec.memory_maps["stream"][1][-1][0]
    assert f"{100 * share:.1f}% of the final stream is from x₀" in text
    largest = max(done, key=lambda one: one.output_change)
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
        ({"out_rms": [1.0, 2.0, 3.0, 4.0]}, "The stream grows by a factor of 4.0 from x₀ to its end: root mean square 1.00, then 4.00."),
        ({"out_rms": [1.0, 1.0, 1.0, 1.05]}, "The stream keeps its norm from x₀"),
        ({"out_rms": [1.0, 1.0, 1.0, 0.25]}, "The stream shrinks to 25.0% from x₀"),
        ({"write_ratio": [0.5, 1e-5, 1e-4]}, "2 of 3 sublayers write less than 0.100% of the stream's norm: the attention of layer 2, the attention of layer 3."),
        ({"write_cosine": [0.5, -0.5, 0.0]}, "The attention of layer 2 writes against the stream: cosine -0.50."),
        ({"write_cosine": [-0.2, -0.5, -0.3]}, "All 3 sublayers write against the stream, most strongly the attention of layer 2: cosine -0.50."),
        ({"out_similarity": [0.1, 0.5, 0.8, 0.99]}, "is 0.10 at x₀ and 0.99 at the end: the tokens are nearly equal"),
        ({"out_massive": [0.0, 0.0, 3.0, 7.0]}, "Massive activations occur from the attention of layer 2 on: at most 7, after the attention of layer 3"),
        ({"out_top": [1.0, 2.0, 30.0, 4.0]}, "no massive activations; the largest magnitude is 30 times the median, after the attention of layer 2"),
        ({"grad_l2": [8.0, 4.0, 2.0, 1.0]}, "The norm of the gradient at x₀ is 8.0 times that at the stream's end."),
        ({"write_unchanged": [0.0, 0.25, 0.0]}, "25.0% of the stream's elements do not change when the attention of layer 2 adds"),
        ({"out_rms": [1.0, math.nan, math.inf, 4.0]}, "2 of the recorded numbers are NaN or infinite; the first in depth is rms of out at layers.0."),
    ],
)  # fmt: skip
def test_recording_findings(values, words):
    found = recording_findings(recorded(**values))
    assert any(words in one.text for one in found), [one.text for one in found]


def test_empty_recording_has_no_findings():
    assert recording_findings(Recording()) == []
    assert ablation_findings(()) == []


def test_page_of_inspection_alone(made):
    page = build_model_page(made[1])
    assert [section.title for section in page.sections] == ["The wiring", "Settings"]
    found = checked(render(page))
    assert not found.all("figure")
    (rows,) = tables(found)
    assert [row[0] for row in rows[1:]] == [site.location for site in made[1].sites]


def test_page_of_forward_recording(made):
    model, found, *_ = made
    with torch.no_grad(), addnorm.record(model, grads=False) as rec:
        model(torch.randn(2, 5, 16))
    page = build_model_page(found, rec)
    assert "gradient" not in " ".join(said(page))
    assert figure(page, "The stream, by depth").table.head == ["sublayer", "layer", "kind", "stream rms", "stream max"]
    checked(render(page))


def test_model_page_is_deterministic(made):
    _, found, rec, done, page = made
    assert render(build_model_page(found, rec, done, {"inputs": "drawn"})) == render(page)


def test_unclosed_and_unknown_sites_are_shown(made):
    found = addnorm.inspect(made[0], torch.randn(2, 5, 16))
    found.sites[1].closes, found.sites[1].closure = False, 0.5
    found.unknown = (Unknown("a<b>", "it is <i>odd</i>"), Unknown("", "nobody knows"))
    page = build_model_page(found)
    refuted = [one for one in page.verdict if one.state == "refuted"]
    assert refuted == [
        Finding(
            f"1 of 4 sublayers do not close: x' = x + f(N(x)) has a relative error of 0.50 at {found.sites[1].id}.",
            "refuted",
        )
    ]
    text = render(page)
    shown = checked(text)
    assert "<i>" not in text
    assert tables(shown)[1] == [["where", "why"], ["a<b>", "it is <i>odd</i>"], ["the model", "nobody knows"]]
    assert text.count('<tr class="wrong">') == 1


def test_title_and_facts_are_escaped(made):
    evil = "</style><script>alert(1)</script>"
    text = render(build_model_page(made[1], title=evil, facts={evil: evil}, footer=[evil]))
    checked(text)
    assert "<script" not in text


def test_page_of_encoder_decoder():
    pytest.importorskip("transformers")
    from addnorm.stream.models.load import load

    loaded = load("t5", layers=2, tokens=6)
    loaded.model.eval()
    found = addnorm.inspect(loaded.model, *loaded.args, **loaded.kwargs)
    with torch.no_grad(), addnorm.record(loaded.model, grads=False) as rec:
        loaded.model(*loaded.args, **loaded.kwargs)
    page = build_model_page(found, rec)
    titles = [section.title for section in page.sections]
    assert titles[1:3] == ["The wiring of the encoder", "The wiring of the decoder"]
    assert figure(page, "Sources of the stream of the decoder")
    assert any(text.startswith("In the decoder: the stream") for text in said(page))
    checked(render(page))


class One(torch.nn.Module):
    """Model of one pre-LN sublayer without a final norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.f = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + self.f(self.norm(x))


def test_page_of_one_sublayer():
    torch.manual_seed(0)
    model, x = One(), torch.randn(2, 4, 8)
    found = addnorm.inspect(model, x)
    with addnorm.record(model, grads=False) as rec:
        model(x)
    page = build_model_page(found, rec)
    assert page.verdict[0].text.startswith("The only sublayer is recomputed in float64 from its equation")
    wiring = next(one.text for one in page.verdict if one.text.startswith("The wiring is pre_ln"))
    assert "A final norm follows" not in wiring
    (beside,) = (text for text in said(page) if text.startswith("The write of"))
    assert "least" not in beside


def test_nan_map_is_left_out():
    model, x = One(), torch.randn(2, 4, 8)
    x[0, 0, 0] = math.nan
    found = addnorm.inspect(model, x)
    with addnorm.record(model, grads=False) as rec:
        model(x)
    page = build_model_page(found, rec)
    checked(render(page))
    assert "Sources of the stream" not in [section.title for section in page.sections]
    assert any("NaN or infinite" in text for text in said(page))
