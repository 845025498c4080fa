"""Tests of the data of the recording view: numbers, labels, balance, badges, invalid files and invalid requests."""

import itertools
import json
import math
import re
from pathlib import Path

import pytest

from addnorm._util.jsonio import to_jsonable
from addnorm.explorer.recording import MAX_CELLS, MAX_STEPS, Recordings
from addnorm.explorer.recording import _label as labels
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import Balance, RecordedSite
from support.explorer_recordings import STEPS

POST, _, SCALED, TWO = range(4)


@pytest.fixture(scope="module")
def served(recordings):
    """Return the explorer's `Recordings` of the shared files."""
    return Recordings(recordings)


@pytest.fixture
def serve(tmp_path):
    """Return a function that saves a recording and returns the explorer's `Recordings` of the file."""
    return lambda rec: Recordings([rec.save(tmp_path / "run.json")])


def answer(recordings, number=0, **query):
    """Return the response that the page gets, after a round trip through JSON."""
    result = recordings.compute(recordings.parse({"recording": number, **query}))
    return json.loads(json.dumps(to_jsonable(result), allow_nan=False))


def make(kinds="a other", numbers=(1.0,), **more):
    """Return a recording of sites, such as "x_0 start a attention", whose last one has one number at each step."""
    words = kinds.split()
    rec = Recording([RecordedSite(*pair, 0) for pair in zip(words[::2], words[::2], words[1::2], strict=True)], **more)
    for step, number in enumerate(numbers):
        rec.add(step, len(rec.sites) - 1, "out", "rms", number)
    return rec


# Responses.


def test_labels_of_sites(served):
    result = answer(served, POST)
    named = ["x_0", *(f"{kind} {layer}" for layer in (1, 2, 3) for kind in ("attention", "feed-forward"))]
    assert [site["label"] for site in result["sites"]] == result["map"]["depths"] == named
    assert result["map"]["places"] == [*range(len(named))]
    assert {*result["map"]["sources"]} == {*named, "norm biases"}
    decoder = [site["label"] for site in answer(served, TWO, stream="decoder")["sites"]]
    assert [*decoder[1:4], decoder[-1]] == ["attention 1", "cross-attention 1", "feed-forward 1", "final norm"]
    assert labels([RecordedSite(name, name, "other", 0) for name in ("a", "b")]) == ["other 1, a", "other 1, b"]


def test_map_counts_several_adds(serve):
    shares = [[1.0, 0.0, 0.0], [0.5, 0.25, 0.25]]
    rec = make("x_0 start a attention b other", memory_maps={"stream": (["x_0", "a", "b"], shares)})
    assert answer(serve(rec))["map"]["depths"] == ["x_0", "after add 1"]


def test_statistic_over_steps(served, recordings):
    rec = next(iter(recordings.values()))
    curve = answer(served, what="out.rms", depth=2)["time"]
    assert (curve["depth"], curve["steps"]) == (2, [*range(STEPS)])
    assert curve["values"] == [value for _, value in rec.over_time(2, "out", "rms")]
    for depth in ({}, {"depth": 0}, {"depth": 999}, {"depth": -3}):  # else the last that has one
        assert answer(served, what="write.ratio", **depth)["time"]["depth"] == 6
    assert answer(served, what="norm_in.sigma")["time"] is None
    assert answer(served)["time"] is None


def test_non_finite_numbers_are_words(serve):
    recordings = serve(make("x_0 start f other", (math.nan, math.inf)))
    assert answer(recordings, step=0)["series"] == {"out.rms": [None, "NaN"]}
    assert answer(recordings, what="out.rms")["time"]["values"] == ["NaN", "Infinity"]


def test_long_recording_is_thinned():
    n, steps = 300, 5000
    names = ["x_0", *(f"f{k}" for k in range(n))]
    shares = [[1 / (depth + 1) if k <= depth else 0.0 for k in range(n + 1)] for depth in range(n + 1)]
    rec = make(" other ".join([*names, ""]), range(steps), memory_maps={"stream": (names, shares)})
    recordings = Recordings()
    recordings.paths, recordings.loaded = ["run.json"], [rec]
    (listed,) = recordings.describe()
    assert (len(listed["steps"]), listed["steps"][-1], listed["count"]) == (MAX_STEPS, steps - 1, steps)
    result = answer(recordings, what="out.rms")
    assert result["time"]["values"] == [float(step) for step in result["time"]["steps"]]
    assert (len(result["time"]["steps"]), result["time"]["count"]) == (MAX_STEPS, steps)
    places, starts = result["map"]["places"], result["map"]["starts"]
    assert len(places) == len(result["map"]["depths"]) == len(result["map"]["shares"]) == MAX_CELLS
    assert (places[0], places[-1], starts[:2], result["map"]["sources"][0]) == (0, n, [0, 1], "other 1, x_0")
    for place, column in zip(places, result["map"]["shares"], strict=True):
        groups = itertools.pairwise([*starts, n + 1])
        assert column == pytest.approx([sum(shares[place][a:b]) for a, b in groups])


# Badges.


def states(result):
    return {badge["name"]: (badge["state"], badge["text"]) for badge in result["badges"]}


def test_badges_of_proved_model(served):
    result = states(answer(served, POST))
    assert result["wiring"] == ("proved", "post-LN")
    assert result["equations"][0] == result["balance"][0] == "proved"
    assert re.fullmatch(r"6 sublayers closed, relative error at most \S+e-[678]", result["equations"][1])
    assert result["x_L = x_0 + all writes"] == ("none", "not a plain sum")
    assert result["understood"] == ("proved", "everything")
    result = answer(served, TWO, stream="decoder")
    assert states(result)["x_L = x_0 + all writes"][0] == "proved"
    assert "LayerNorm 1e-5" in result["badges"][0]["more"]


def test_badges_of_open_model(served, serve, recordings):
    result = answer(served, SCALED)
    assert states(result)["wiring"] == ("open", "not a known wiring")
    assert states(result)["balance"] == ("open", "does not add up")
    reason = "the stream is multiplied or masked between add 1 and add 2."
    assert result["balance"] == {"refused": f"The components of the stream do not add up: {reason}"}
    assert result["map"] is None
    rec = Recording.load([*recordings][SCALED])
    site = next(iter(rec.metadata["streams"]["stream"]["sites"].values()))
    site |= {"closes": False, "closure": "Infinity"}
    rec.metadata["unknown"] = [{"path": "head", "reason": "it reads the stream twice"}]
    badges = {badge["name"]: (badge["text"], badge["more"]) for badge in answer(serve(rec))["badges"]}
    assert badges["equations"][0] == "1 of 2 sublayers not closed"
    assert badges["equations"][1].endswith("the largest error is inf")
    assert badges["understood"] == ("1 place not understood", "head: it reads the stream twice")


def test_changed_amounts_do_not_close(serve, recordings):
    rec = Recording.load([*recordings][POST])
    sheet = rec.balances["stream"]
    amounts = (1.01 * sheet.amounts[0], *sheet.amounts[1:])
    rec.balances["stream"] = Balance(sheet.sources, amounts, sheet.stream_norm, 9, 1e-7)
    result = answer(serve(rec))
    assert result["balance"]["closes"] is False
    assert states(result)["balance"][0] == "open"


def test_file_without_proofs_reports_missing_entries(serve, recordings):
    rec = Recording.load(next(iter(recordings)))
    for entry in ("streams", "unknown"):
        del rec.metadata[entry]
    rec.balances.clear()
    result = answer(serve(rec))
    assert {*states(result).values()} == {("none", "not recorded")}
    assert result["balance"]["refused"].startswith("Not recorded")


ODD = [None, 1, "text", [], {}, [1], {"stream": 1}, {"stream": {"sites": 1}}, {"stream": {"sites": {"a": {"closure": "x"}}}},
       {"stream": {"wiring": 3, "remarks": "no", "equation": 5, "closure": [], "sites": {"a": 1}}}]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=str)
@pytest.mark.parametrize("fact", ["streams", "unknown", "wiring", "closure", "model"])
def test_odd_metadata_breaks_nothing(serve, fact, odd):
    badges = answer(serve(make(metadata={fact: odd}, memory_maps={"stream": ([], [])})))["badges"]
    assert all(badge["state"] != "proved" or badge["name"] == "understood" for badge in badges)
    assert all(isinstance(text, str) and len(text) < 2000 for badge in badges for text in badge.values())


# Valid and invalid requests.


@pytest.mark.parametrize(
    ("number", "query", "says"),
    [
        (4, {}, "recording is 4, expected a whole number from 0 to 3."),
        (0, {"step": "x"}, "step is 'x', expected a whole number from 0 to 3."),
        (0, {"stream": "../etc"}, "stream is '../etc', expected one of stream."),
        (0, {"what": "out.rsm"}, "what is 'out.rsm', expected one of out.rms, "),
        (0, {"what": "read.rms"}, "what is 'read.rms', expected"),
        (0, {"depth": 1.5}, "depth is 1.5, expected a whole number from -1000000000 to 1000000000."),
        (
            0,
            {"file": "/etc/passwd"},
            "the request has 'file', which is unknown, expected recording, step, stream, what, depth.",
        ),
    ],
)
def test_parse_rejects_wrong_params(served, number, query, says):
    with pytest.raises(ValueError, match=r"\A.*\Z") as raised:
        served.parse({"recording": number, **query})
    assert says in raised.value.args[0]


def test_without_recordings():
    none = Recordings()
    assert none.describe() == []
    with pytest.raises(ValueError, match="the explorer has no recording, expected one or more: start addnorm explore"):
        none.parse({})


def test_empty_recording_is_rejected(serve):
    with pytest.raises(ValueError, match="is an empty recording"):
        serve(make(numbers=()))


def test_equal_file_names_show_paths(tmp_path, recordings):
    rec = next(iter(recordings.values()))
    names = [str(tmp_path / name) for name in ("before/run.json", "after/run.json", "other.json")]
    for name in names:
        Path(name).parent.mkdir(exist_ok=True)
        rec.save(name)
    listed = Recordings(names).describe()
    assert [entry["name"] for entry in listed] == [*names[:2], "other.json"]
    assert [entry["path"] for entry in listed] == names
