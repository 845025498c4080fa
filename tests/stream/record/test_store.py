"""Tests of files of recordings: exact round trips, atomic writes, one-sentence errors for other files."""

import json
import sys

import pytest

from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import Balance, RecordedSite
from support.recordings import INF, NAN, WRITES, filled


def full_recording():
    rec = filled(*WRITES, (5, 1, "out", "rms", NAN), (5, 2, "out", "rms", INF), (5, 3, "out", "rms", -INF))
    rec.add(7, 1, "norm_in", "rstd", 0.1)  # no binary fraction
    rec.add(7, 1, "in", "rms_3", 0.2)  # of one of several streams
    rec.metadata |= {"dtype": "bfloat16", "notes": ["é <b>", None, 1.5, True], "limits": {"eps": 1e-5}}
    rec.memory_maps = {"stream": (["x_0", "0.attn"], [[1.0, 0.0], [0.1, 0.9]])}
    rec.balances["stream"] = Balance(("x_0", "0.attn"), (0.25, 0.1), 0.35, 7, 1e-8)
    rec.balances["other"] = Balance(reason="tokens join or leave the stream before add 2")
    return rec


@pytest.mark.parametrize("suffix", [".json", ".addnorm.json", ".parquet"])
@pytest.mark.parametrize("make", [full_recording, Recording])
def test_files_keep_every_bit(tmp_path, suffix, make):
    rec, path = make(), tmp_path / f"run{suffix}"
    assert rec.save(str(path)) == path
    again = Recording.load(path)
    assert again.to_dict() == rec.to_dict()
    for name in ("sites", "metadata", "memory_maps", "balances", "steps"):
        assert str(getattr(again, name)) == str(getattr(rec, name))  # as text: NaN != NaN
    assert str(again.table()) == str(rec.table())
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_balances_are_optional(tmp_path):
    document = full_recording().to_dict()
    del document["balances"]
    (tmp_path / "old.json").write_text(json.dumps(document))
    old = Recording.load(tmp_path / "old.json")
    assert (old.balances, old.memory_maps) == ({}, full_recording().memory_maps)


def test_json_is_valid():
    def refuse(name):
        raise AssertionError(name)

    document = json.loads(json.dumps(full_recording().to_dict(), allow_nan=False), parse_constant=refuse)
    assert (document["schema"], document["schema_version"]) == ("addnorm.recording", 1)
    values = {row["site"]: row["values"] for row in document["series"] if row["role"] == "out"}
    assert values == {1: ["NaN"], 2: ["Infinity"], 3: ["-Infinity"]}


def test_metadata_is_written_as_json_types(tmp_path):
    torch = pytest.importorskip("torch")
    rec = Recording(metadata={"dtype": torch.bfloat16, "shape": torch.Size([2, 3]), "loss": NAN})
    rec.save(tmp_path / "run.json")
    assert Recording.load(tmp_path / "run.json").metadata == {"dtype": "torch.bfloat16", "shape": [2, 3], "loss": "NaN"}


def test_parquet_is_a_tidy_table(tmp_path):
    pandas = pytest.importorskip("pandas")
    rec = full_recording()
    rec.save(tmp_path / "run.parquet")
    frame = pandas.read_parquet(tmp_path / "run.parquet")
    assert [*frame.columns] == ["step", "site", "layer", "role", "statistic", "value"]
    assert len(frame) == len(rec.table())


def message_of(path):
    """Return the message of the error that reading a file raises: one sentence."""
    with pytest.raises(ValueError, match=r".") as raised:
        Recording.load(path)
    text = str(raised.value)
    assert text.startswith(f"{path} is ")
    assert "\n" not in text
    return text


SITE = {"id": "a", "path": "a", "kind": "other", "layer": 0, "stream": "stream", "equation": ""}
ROW = {"site": 0, "role": "out", "statistic": "rms", "steps": [0], "values": [1.0]}


@pytest.mark.parametrize(
    ("change", "words"),  # tests/cli/bad_inputs.txt has more
    [
        ({"schema_version": 0}, "version 0, expected 1 or more"),
        ({"schema_version": "1"}, "'schema_version' is '1', expected a whole number"),
        ({"sites": [1]}, "'id' is missing, expected a text"),
        ({"sites": [{**SITE, "layer": "0"}]}, "'layer' is '0', expected a whole number"),
        ({"sites": [SITE, SITE]}, "wrong sites (2 sites have the id 'a'"),
        ({"metadata": []}, "'metadata' is '[]', expected an object"),
        (
            {"memory_maps": {"s": {"sources": ["a"], "shares": [[0.5, 0.5]]}}},
            "rows of another length, expected 1 shares",
        ),
        ({"memory_maps": {"s": {"sources": ["a"], "shares": [[None]]}}}, "values that are no numbers"),
        ({"balances": []}, "'balances' is '[]', expected an object"),
        ({"balances": {"s": 1}}, "'sources' is missing, expected a list"),
        (
            {"balances": {"s": {"sources": ["a"], "amounts": [0.5, 0.5]}}},
            "balance of 's' has 2 amounts, expected 1, one for each source",
        ),
        (
            {"balances": {"s": {"sources": [], "amounts": [], "stream_norm": "long", "closure": 0.0}}},
            "values that are no numbers",
        ),
        ({"series": {}}, "'series' is '{}', expected a list"),
        ({"series": [{**ROW, "steps": [0, 1]}]}, "1 values at 2 steps"),
        ({"series": [{**ROW, "steps": [0.5]}]}, "expected a whole number, its step, for each value"),
        ({"series": [{**ROW, "steps": [2**70]}]}, "a wrong number"),
        ({"series": [{**ROW, "site": 99}]}, "site is 99"),
        ({"series": [{**ROW, "values": ["1.0"]}]}, "no numbers, expected numbers, or NaN, Infinity"),
    ],
)
def test_wrong_document_raises_one_sentence(tmp_path, change, words):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(full_recording().to_dict() | change))
    assert words in message_of(path)


HEAD = {"addnorm.recording": json.dumps(Recording([RecordedSite("a", "a", "other", 0)]).to_dict())}
COLUMNS = {"step": [0], "site": ["a"], "role": ["out"], "statistic": ["rms"], "value": [1.0]}


@pytest.mark.parametrize(
    ("columns", "head", "words"),
    [
        ({"a": [1]}, {}, "without the metadata 'addnorm"),
        ({"a": [1]}, HEAD, "a table without the column 'step'"),
        (COLUMNS | {"site": ["b"]}, HEAD, "a wrong number (site is -1"),
        (COLUMNS | {"role": [["out"]]}, HEAD, "a table that cannot be read"),
    ],
)
def test_wrong_parquet_raises_one_sentence(tmp_path, columns, head, words):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns).replace_schema_metadata(head), tmp_path / "odd.parquet")
    assert words in message_of(tmp_path / "odd.parquet")


def test_unknown_suffix_and_missing_package(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"run.pkl', expected one that ends in .json or .parquet"):
        Recording().save(tmp_path / "run.pkl")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"needed to make a DataFrame: pip install 'addnorm\[data\]'"):
        filled((0, 1, "out", "rms", 1.0)).to_pandas()
