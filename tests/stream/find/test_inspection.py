"""Tests of an `Inspection` as table, HTML, JSON and repr."""

import io
import json
import math

import pytest
import torch
from rich.console import Console
from torch import nn

import addnorm
from addnorm import inspect
from addnorm._util.numbers import format_number
from support.families import shake
from support.stacks import encoder
from support.stream_steps import D, X, inspect_steps, noise, repeat, run_layers


def inspect_encoder(wiring="pre_ln", layers=3, **options):
    return inspect(shake(encoder(wiring, layers, **options)), X)


def render(inspection, width=100):
    console = Console(width=width, file=io.StringIO())
    console.print(inspection)
    return console.file.getvalue()


def test_table_has_one_line_for_equal_layers():
    text = render(inspect_encoder(layers=12))
    assert "1-12" in text
    assert text.count("attention") == 1
    assert "stack.layers.0-11.connections.0.sublayer" in text
    assert text.splitlines()[0] == "Encoder, evaluation: pre_ln"


def test_table_has_lines_for_different_layers():
    text = render(inspect_encoder(addnorm.wirings.mix_ln(1)))
    assert "N(x + f(x))" in text
    assert list(dict.fromkeys(line.split()[0] for line in text.splitlines() if line[:1].isdigit())) == ["1", "2-3"]


@pytest.mark.parametrize("wiring", addnorm.wirings.CONSTRUCTORS)
def test_inspection_fits_width(wiring):
    inspection = inspect_encoder(addnorm.wirings.get(wiring, **addnorm.wirings.catalog.EXAMPLES.get(wiring, {})))
    for width in (40, 80, 120, 300):
        assert all(len(line.rstrip()) <= width for line in render(inspection, width).splitlines())


def test_only_a_stream_that_closes_is_proved():
    inspection = inspect_encoder()
    worst = format_number(max(site.closure for site in inspection.sites), 2)
    assert f"equal the model's up to a relative error of {worst}" in " ".join(render(inspection).split())
    open_stream = inspect_steps(repeat(lambda m, k, x: (x + m.branch(k, x)).clamp(-0.1, 0.1), 3))
    assert all(site.closes for site in open_stream.sites)
    assert "proved" not in render(open_stream)


def test_equation_has_final_norm_of_model():
    assert inspect_encoder().streams[0].equation == "x' = x + f(N(x)),   y = N(x_L)"
    assert inspect_encoder(final_norm=False).streams[0].equation == "x' = x + f(N(x))"


def test_table_has_one_line_for_each_reason():
    run = repeat(lambda m, k, x: m.others[k](m.norms[k](x + m.mlps[k](x))), count=6)
    inspection = inspect_steps(run)
    text = render(inspection, 120)
    assert len(inspection.unknown) == 5
    assert text.count("norms follow the add") == 1
    assert "mlps.0, mlps.1, mlps.2 and 2 more: 2 norms follow the add" in text


@pytest.mark.parametrize("wiring", ["pre_ln", "admin", "rezero", "deepnorm", "b2t"])
def test_to_dict_is_json_of_wiring(wiring):
    inspection = inspect_encoder(wiring)
    read = json.loads(json.dumps(inspection.to_dict(), allow_nan=False))
    assert read["wiring"] == wiring
    assert read["closes"] is True
    assert len(read["streams"][0]["sites"]) == len(inspection.sites)
    assert read["streams"][0]["axis"] == -1


def test_to_dict_is_json_without_proof():
    model = shake(encoder())
    for x in (X * math.nan, X[:0]):
        read = json.loads(json.dumps(inspect(model, x).to_dict(), allow_nan=False))
        assert read["closure"] is None
        assert read["closes"] is False
    nothing = inspect(nn.Linear(D, D), X)
    assert json.loads(json.dumps(nothing.to_dict(), allow_nan=False))["streams"] == []
    assert "not understood the model" in render(nothing)


def test_site_by_name_and_number():
    inspection = inspect_encoder()
    assert inspection.site(0) is inspection.sites[0]
    assert inspection.site(inspection.sites[3].id) is inspection.sites[3]
    with pytest.raises(KeyError, match=r"site is 'stack.layers.9.connections.0.sublayer', expected 'stack.layers"):
        inspection.site("stack.layers.9.connections.0.sublayer")


def test_sites_have_unique_ids():
    run = repeat(lambda m, k, x: x + torch.relu(x @ m.gates[k].weight))  # no module is called
    ids = [site.id for site in inspect_steps(run).sites]
    assert ids == ["feed-forward", "feed-forward#2", "feed-forward#3", "feed-forward#4"]


def test_repr_of_inspection_stream_and_site():
    inspection = inspect_encoder()
    assert repr(inspection).startswith("<Inspection of Encoder: pre_ln, 6 sublayers, closure ")
    assert repr(inspection.streams[0]) == "<stream: 6 sublayers, pre_ln>"
    assert repr(inspection.sites[0]) == "<stack.layers.0.connections.0.sublayer: x' = x + f(N(x))>"


def test_inspect_keeps_sums_beside_the_streams_apart():
    def run(m, x):
        y = m.gates[0](m.last(run_layers(m, x, last=3)))
        return y + m.mlps[3](y)

    inspection = inspect_steps(run)
    assert (inspection.wiring, inspection.closes, inspection.unknown) == ("pre_ln", True, ())
    (part,) = inspection.outside
    assert part.reason.startswith("a single add x + f(x)")
    assert part.source.startswith("add, test_inspection.py:")
    assert f"outside of the streams: the model: {part.reason} ({part.source})" in " ".join(str(inspection).split())
    assert inspection.to_dict()["outside"] == [{"path": "", "reason": part.reason, "source": part.source}]


def test_inspect_says_the_line_of_each_reason():
    def run(m, x):
        for k in range(3):
            x = x + m.branch(k, x)
            x = x.flip(-1) if k == 1 else x.clamp(-0.1, 0.1)  # both are no rows
        return x

    line = run.__code__.co_firstlineno
    sources = {u.reason.split(",")[0]: u.source for u in inspect_steps(run).unknown}
    assert sources["values of the stream are clamped or replaced on the way"] == f"clamp, test_inspection.py:{line + 3}"
    assert sources["features of the stream are moved"] == f"add, test_inspection.py:{line + 2}"


@pytest.mark.parametrize("training", [False, True])
def test_inspect_names_batch_norms_after_the_add(training):
    norms = [nn.BatchNorm1d(16) for _ in range(3)]
    for norm in norms:
        norm.running_mean.copy_(noise(16))

    run = repeat(lambda m, k, x: norms[k].train(training)((x + m.mlps[k](x)).mT).mT, count=3)
    unknown = inspect_steps(run).unknown
    assert any(part.reason.startswith("x' = BatchNorm(x + f(x))") for part in unknown)


@pytest.mark.parametrize("tool", [addnorm.inspect, addnorm.decompose, addnorm.fuse])
def test_error_without_inputs_says_how_to_pass_them(tool):
    with pytest.raises(TypeError, match="positional argument") as raised:
        tool(nn.Sequential(nn.Linear(4, 4)))
    assert ["pass them after it" in note for note in raised.value.__notes__] == [True]
