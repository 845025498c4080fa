"""Tests of the data of the recording view: numbers, labels, balance, badges, invalid files and invalid requests."""

import json
import math
import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import addnorm
from addnorm import explorer
from addnorm._util.jsonio import to_jsonable
from addnorm.explorer.recording import MAX_CELLS, MAX_STEPS, NAMES, Recordings
from addnorm.explorer.recording import _label as labels
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import Balance, RecordedSite

D, STEPS = 16, 3


def recorded(model, *inputs, steps=STEPS):
    with addnorm.record(model) as rec:
        for _ in range(steps):
            model(*inputs).square().mean().backward()
    return rec


@pytest.fixture(scope="module")
def post_ln():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, 2, 32, batch_first=True, dropout=0.0)
    return recorded(nn.TransformerEncoder(layer, 3), torch.randn(2, 5, D))


@pytest.fixture(scope="module")
def two_streams():
    torch.manual_seed(0)
    kind = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    layer = nn.TransformerEncoderLayer(D, 2, 32, **kind)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(D), enable_nested_tensor=False)
    model = nn.Transformer(D, 2, 2, 2, 32, custom_encoder=encoder, **kind)
    return recorded(model, torch.randn(2, 5, D), torch.randn(2, 4, D), steps=1)


class Scaled(nn.Module):
    """Model whose stream is multiplied by a parameter between the adds."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.scale = nn.Linear(D, D), nn.Linear(D, D), nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x):
        x = (x + torch.tanh(self.one(x))) * self.scale
        return x + torch.tanh(self.two(x))


@pytest.fixture
def of(tmp_path):
    """Return a function that saves recordings and returns the explorer's `Recordings` of the files."""

    def make(*recordings, suffix=".json"):
        return Recordings([rec.save(tmp_path / f"run{k}{suffix}") for k, rec in enumerate(recordings)])

    return make


def answer(recordings, number=0, **query):
    """Return the response that the page gets, after a round trip through JSON."""
    result = recordings.compute(recordings.parse(number, {name: str(value) for name, value in query.items()}))
    return json.loads(json.dumps(to_jsonable(result), allow_nan=False))


# Responses.


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_numbers_equal_recording(of, post_ln, suffix):
    recordings = of(post_ln, suffix=suffix)
    for step in range(STEPS):
        result = answer(recordings, step=step)
        assert (result["step"], result["last"]) == (step, step == STEPS - 1)
        ids = [site["id"] for site in result["sites"]]
        assert ids == [site.id for site in post_ln.sites]
        assert {"out.rms", "write.ratio", "write.cosine", "grad.l2", "params.grad_l2", "norm_out.sigma"} <= {
            *result["series"]
        }
        for name, values in result["series"].items():
            expected = {site.id: value for site, value in post_ln.series(*name.split("."), step=step)}
            assert {site_id: value for site_id, value in zip(ids, values, strict=True) if value is not None} == expected
        sources, shares = post_ln.memory_maps["stream"]
        assert result["map"]["shares"] == shares
        assert len(result["map"]["sources"]) == len(sources)


def test_labels_of_sites(of, post_ln, two_streams):
    result = answer(of(post_ln))
    named = ["x_0", *(f"{kind} {layer}" for layer in (1, 2, 3) for kind in ("attention", "feed-forward"))]
    assert [site["label"] for site in result["sites"]] == named
    assert result["map"]["depths"] == named
    assert result["map"]["places"] == [*range(len(named))]
    assert {*result["map"]["sources"]} == {*named, "norm biases"}
    decoder = answer(of(two_streams), stream="decoder")
    assert [site["label"] for site in decoder["sites"]][1:4] == ["attention 1", "cross-attention 1", "feed-forward 1"]
    assert decoder["sites"][-1]["label"] == "final norm"
    alike = [RecordedSite(name, name, "other", 0) for name in ("a", "b")]
    assert labels(alike) == ["other 1, a", "other 1, b"]


def test_map_of_many_sublayers_is_thinned(of):
    n = 300
    sites = [RecordedSite("x_0", "", "start", None), *(RecordedSite(f"f{k}", f"f{k}", "other", k) for k in range(n))]
    shares = [[1 / (depth + 1) if k <= depth else 0.0 for k in range(n + 1)] for depth in range(n + 1)]
    rec = Recording(sites, memory_maps={"stream": ([site.id for site in sites], shares)})
    rec.add(0, 1, "write", "l2", 1.0)
    drawn = answer(of(rec))["map"]
    places, starts = drawn["places"], drawn["starts"]
    assert len(places) == len(drawn["depths"]) == len(drawn["shares"]) == MAX_CELLS
    assert (places[0], places[-1], starts[:2], drawn["sources"][0]) == (0, n, [0, 1], "x_0")
    for place, column in zip(places, drawn["shares"], strict=True):
        ends = [*starts[1:], n + 1]
        assert column == pytest.approx([sum(shares[place][a:b]) for a, b in zip(starts, ends, strict=True)])


def test_map_counts_several_adds(of):
    sites = [
        RecordedSite("x_0", "", "start", None),
        RecordedSite("a", "a", "attention", 0),
        RecordedSite("b", "b", "other", 0),
    ]
    rec = Recording(sites, memory_maps={"stream": (["x_0", "a", "b"], [[1.0, 0.0, 0.0], [0.5, 0.25, 0.25]])})
    rec.add(0, 1, "write", "l2", 1.0)
    assert answer(of(rec))["map"]["depths"] == ["x_0", "after add 1"]


def test_balance_adds_up_to_stream_norm(of, post_ln):
    sheet = answer(of(post_ln), step=0)["balance"]
    assert (sheet["refused"], sheet["step"], sheet["closes"]) == ("", STEPS - 1, True)
    rows = sheet["rows"]
    assert math.fsum(row["amount"] for row in rows) == pytest.approx(sheet["length"], rel=1e-6)
    assert math.fsum(row["part"] for row in rows) == pytest.approx(1.0, abs=1e-6)
    assert sheet["error"] == abs(sheet["length"] - math.fsum(row["amount"] for row in rows)) / sheet["length"]
    by_depth = sorted(rows, key=lambda row: row["depth"])
    assert [by_depth[0]["kind"], by_depth[-1]["kind"]] == ["start", "norms"]
    written = {site.id: value for site, value in post_ln.series("write", "l2")}
    assert {row["source"]: row["written"] for row in by_depth[1:-1]} == written
    assert by_depth[0]["written"] == dict(post_ln.over_time("x_0", "out", "l2"))[STEPS - 1]
    assert by_depth[-1]["written"] is None


def test_streams_are_separate(of, two_streams):
    recordings = of(two_streams)
    assert recordings.describe()[0]["streams"] == ["encoder", "decoder"]
    results = {name: answer(recordings, stream=name) for name in ("encoder", "decoder")}
    assert answer(recordings)["stream"] == "encoder"
    assert [len(result["sites"]) for result in results.values()] == [6, 8]
    for name, result in results.items():
        (opening,) = [row for row in result["balance"]["rows"] if row["kind"] == "start"]
        assert (opening["source"], opening["label"]) == ("x_0", "x_0")
        assert (
            opening["written"]
            == dict(two_streams.series("out", "l2", stream=name))[two_streams.sites[0 if name == "encoder" else 6]]
        )
        assert result["balance"]["length"] == two_streams.balances[name].stream_norm


def test_statistic_over_steps(of, post_ln):
    recordings = of(post_ln)
    curve = answer(recordings, what="out.rms", depth=2)["time"]
    assert (curve["depth"], curve["steps"]) == (2, [0, 1, 2])
    assert curve["values"] == [value for _, value in post_ln.over_time(2, "out", "rms")]
    for depth in ({}, {"depth": 0}, {"depth": 999}, {"depth": -3}):  # else the last that has one
        assert answer(recordings, what="write.ratio", **depth)["time"]["depth"] == 6
    assert answer(recordings, what="norm_in.sigma")["time"] is None
    assert answer(recordings)["time"] is None


def test_non_finite_numbers_are_words(of):
    rec = Recording([RecordedSite("x_0", "", "start", None), RecordedSite("f", "f", "other", 0)])
    for step, value in enumerate((math.nan, math.inf)):
        rec.add(step, 1, "out", "rms", value)
    recordings = of(rec)
    assert answer(recordings, step=0)["series"] == {"out.rms": [None, "NaN"]}
    assert answer(recordings, what="out.rms")["time"]["values"] == ["NaN", "Infinity"]


# Badges.


def states(result):
    return {badge["name"]: (badge["state"], badge["text"]) for badge in result["badges"]}


def test_badges_of_proved_model(of, post_ln, two_streams):
    result = states(answer(of(post_ln)))
    assert result["wiring"] == ("proved", "post-LN")
    assert result["equations"][0] == "proved"
    assert re.fullmatch(r"6 sublayers closed, relative error at most \S+e-0[678]", result["equations"][1])
    assert result["x_L = x_0 + all writes"] == ("none", "not a plain sum")
    assert result["balance"][0] == "proved"
    assert result["understood"] == ("proved", "everything")
    result = answer(of(two_streams), stream="decoder")
    assert states(result)["x_L = x_0 + all writes"][0] == "proved"
    assert "LayerNorm 1e-5" in result["badges"][0]["more"]


def test_badges_of_open_model(of):
    rec = recorded(Scaled(), torch.randn(2, 5, D))
    result = answer(of(rec))
    assert states(result)["wiring"] == ("open", "not a known wiring")
    assert states(result)["balance"] == ("open", "does not add up")
    assert result["balance"] == {
        "refused": "The components of the stream do not add up: the stream is multiplied or masked between add 1 and add 2."
    }
    assert result["map"] is None
    site = next(iter(rec.metadata["streams"]["stream"]["sites"].values()))
    site |= {"closes": False, "closure": "Infinity"}
    rec.metadata["unknown"] = [{"path": "head", "reason": "it reads the stream twice"}]
    badges = {badge["name"]: badge for badge in answer(of(rec))["badges"]}
    assert badges["equations"]["text"] == "1 of 2 sublayers does not close"
    assert badges["equations"]["more"].endswith("the largest error is inf")
    assert badges["understood"]["text"] == "1 place not understood"
    assert badges["understood"]["more"] == "head: it reads the stream twice"


def test_changed_amounts_do_not_close(of, post_ln):
    path = of(post_ln).paths[0]
    rec = Recording.load(path)
    sheet = rec.balances["stream"]
    rec.balances["stream"] = Balance(
        sheet.sources, (1.01 * sheet.amounts[0], *sheet.amounts[1:]), sheet.stream_norm, 9, 1e-7
    )
    result = answer(of(rec))
    assert result["balance"]["closes"] is False
    assert states(result)["balance"][0] == "open"


def test_older_file_reports_missing_entries(of, post_ln):
    document = post_ln.to_dict()
    del document["balances"], document["metadata"]["streams"], document["metadata"]["unknown"]
    recordings = of(post_ln)
    Path(recordings.paths[0]).write_text(json.dumps(document))
    result = answer(Recordings(recordings.paths))
    assert {state for state, _ in states(result).values()} == {"none"}
    assert states(result)["wiring"] == ("none", "post-LN")  # reported for the whole model then, without its proof
    sheet = result["balance"]
    assert (sheet["length"], sheet["closes"]) == (None, True)
    assert [row["part"] for row in sheet["rows"]] == post_ln.memory_maps["stream"][1][-1]
    document["memory_maps"] = {}
    Path(recordings.paths[0]).write_text(json.dumps(document))
    assert answer(Recordings(recordings.paths))["balance"]["refused"].startswith("Not recorded")


ODD = [None, 1, "text", [], {}, [1], {"stream": 1}, {"stream": {"sites": 1}}, {"stream": {"sites": {"a": {"closure": "x"}}}},
       {"stream": {"wiring": 3, "remarks": "no", "equation": 5, "closure": [], "sites": {"a": 1}}}]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=str)
@pytest.mark.parametrize("fact", ["streams", "unknown", "wiring", "closure", "model"])
def test_odd_metadata_breaks_nothing(of, fact, odd):
    rec = Recording([RecordedSite("a", "a", "other", 0)], {fact: odd}, {"stream": ([], [])})
    rec.add(0, 0, "out", "rms", 1.0)
    result = answer(of(rec))
    assert all(badge["state"] != "proved" or badge["name"] == "understood" for badge in result["badges"])
    assert all(isinstance(text, str) and len(text) < 2000 for badge in result["badges"] for text in badge.values())


# Valid and invalid requests.


@pytest.mark.parametrize(
    ("number", "query", "error", "says"),
    [
        (1, {}, LookupError, "recording is 1, expected a number from 0 to 0."),
        (-1, {}, LookupError, "recording is -1, expected a number from 0 to 0."),
        (0, {"step": "x"}, ValueError, "step is 'x', expected a whole number."),
        (0, {"step": "9" * 99}, ValueError, "expected a whole number."),
        (0, {"step": "7"}, ValueError, "step is 7, expected a recorded step, from 0 to 2."),
        (0, {"stream": "../etc"}, ValueError, "stream is '../etc', expected one of stream."),
        (0, {"what": "out.rsm"}, ValueError, "what is 'out.rsm', expected 'out.rms'."),
        (0, {"what": "read.rms"}, ValueError, "what is 'read.rms', expected"),
        (0, {"depth": "1.5"}, ValueError, "depth is '1.5', expected a whole number."),
        (
            0,
            {"file": "/etc/passwd"},
            ValueError,
            "the request has 'file', which is unknown, expected step, stream, what, depth.",
        ),
    ],
)
def test_parse_rejects_wrong_params(of, post_ln, number, query, error, says):
    with pytest.raises(error) as raised:
        of(post_ln).parse(number, query)
    assert says in raised.value.args[0]
    assert "\n" not in raised.value.args[0]


def test_without_recordings():
    none = Recordings()
    assert none.describe() == []
    with pytest.raises(LookupError, match="recording is 0, expected none: start addnorm explore with --recording FILE"):
        none.parse(0, {})


def test_folder_and_empty_recording_are_rejected(tmp_path, of):
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ValueError, match="cannot be read"):
        Recordings([tmp_path / "folder.json"])
    with pytest.raises(ValueError, match="is an empty recording"):
        of(Recording([RecordedSite("a", "a", "other", 0)]))


def test_equal_file_names_show_paths(tmp_path, post_ln):
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
        post_ln.save(tmp_path / folder / "run.json")
    post_ln.save(tmp_path / "other.json")
    paths = [tmp_path / "before" / "run.json", tmp_path / "after" / "run.json", tmp_path / "other.json"]
    listed = Recordings(paths).describe()
    assert [entry["name"] for entry in listed] == [str(paths[0]), str(paths[1]), "other.json"]
    assert listed[2] == {
        "name": "other.json", "path": str(paths[2]), "model": "TransformerEncoder", "streams": ["stream"], "steps": [0, 1, 2],
        "count": 3,
    }  # fmt: skip


def test_long_recording_has_small_response(of):
    n, steps = 100, 5000
    sites = [RecordedSite("x_0", "", "start", None), *(RecordedSite(f"s{k}", f"s{k}", "other", k) for k in range(n))]
    rec = Recording(sites)
    for name in ("out.rms", "write.ratio"):
        for step in range(0, 2 * steps, 2):
            rec.add(step, 1 + step % n, *name.split("."), 1.0)
            rec.add(step, n, *name.split("."), float(step))
    rec.memory_maps = {"stream": ([site.id for site in sites], [[1.0 / (n + 1)] * (n + 1)] * (n + 1))}
    recordings = Recordings()
    recordings.paths, recordings.loaded = ["run.json"], [rec]
    (listed,) = recordings.describe()
    assert (len(listed["steps"]), listed["steps"][0], listed["steps"][-1], listed["count"]) == (
        MAX_STEPS,
        0,
        2 * steps - 2,
        steps,
    )
    assert set(listed["steps"]) <= set(rec.steps)
    begun = time.process_time()
    result = answer(recordings, what="out.rms")
    assert time.process_time() - begun < 1.0  # usually a twentieth of it
    assert len(json.dumps(result)) < 1e6
    assert (len(result["time"]["steps"]), result["time"]["count"]) == (MAX_STEPS, steps)
    assert result["time"]["values"] == [float(step) for step in result["time"]["steps"]]


def test_page_series_exist_on_server():
    panels = (Path(explorer.__file__).parent / "static" / "recording" / "panels.js").read_text()
    drawn = set(re.findall(r'\["(\w+\.\w+)",', panels))
    assert len(drawn) >= 10
    assert drawn <= set(NAMES)
