"""Tests of files of recordings: exact round trips, atomic writes, one-sentence errors for other files."""

import json
import sys

import pytest

from addnorm.stream.record import store
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import Balance, RecordedSite
from support.recordings import INF, NAN, WRITES, filled


def full_recording():
    rec = filled(*WRITES, (5, 1, "out", "rms", NAN), (5, 2, "out", "rms", INF), (5, 3, "out", "rms", -INF))
    rec.add(7, 1, "norm_in", "rstd", 0.1)  # no binary fraction
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


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_failed_write_keeps_the_old_file(tmp_path, suffix, monkeypatch):
    path = tmp_path / f"run{suffix}"
    full_recording().save(path)
    before = path.read_bytes()
    monkeypatch.setattr(store, "_head", lambda recording: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Recording().save(path)
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]


def test_parquet_is_a_tidy_table(tmp_path):
    pandas = pytest.importorskip("pandas")
    rec = full_recording()
    rec.save(tmp_path / "run.parquet")
    frame = pandas.read_parquet(tmp_path / "run.parquet")
    assert [*frame.columns] == ["step", "site", "layer", "role", "statistic", "value"]
    assert len(frame) == len(rec.table())


def change(**changes):
    """Return a function that changes keys of a document."""
    return lambda document: {**document, **changes}


SITE = {"id": "a", "path": "a", "kind": "other", "layer": 0, "stream": "stream", "equation": ""}


ROW = {"site": 0, "role": "out", "statistic": "rms", "steps": [0], "values": [1.0]}


WRONG = {
    "another schema": (change(schema="torch.profiler"), "schema 'torch.profiler', expected 'addnorm.recording'"),
    "a list": (lambda document: [document], "schema None"),
    "newer": (change(schema_version=2), "version 2, expected at most 1: install a newer addnorm"),
    "version 0": (change(schema_version=0), "version 0, expected 1 or more"),
    "version as text": (change(schema_version="1"), "'schema_version' is '1', expected a whole number"),
    "no sites": (lambda d: {k: v for k, v in d.items() if k != "sites"}, "'sites' is missing, expected a list"),
    "a site that is none": (change(sites=[1]), "'id' is missing, expected a text"),
    "a layer that is none": (change(sites=[{**SITE, "layer": "0"}]), "'layer' is '0', expected a whole number"),
    "one id twice": (change(sites=[SITE, SITE]), "wrong sites (2 sites have the id 'a'"),
    "facts": (change(metadata=[]), "'metadata' is '[]', expected an object"),
    "maps": (
        change(memory_maps={"s": {"sources": ["a"], "shares": [[0.5, 0.5]]}}),
        "rows of another length, expected 1 shares",
    ),
    "balances": (change(balances=[]), "'balances' is '[]', expected an object"),
    "a balance that is none": (change(balances={"s": 1}), "'sources' is missing, expected a list"),
    "amounts": (
        change(balances={"s": {"sources": ["a"], "amounts": [0.5, 0.5]}}),
        "balance of 's' has 2 amounts, expected 1, one for each source",
    ),
    "a length that is none": (
        change(balances={"s": {"sources": [], "amounts": [], "stream_norm": "long", "closure": 0.0}}),
        "values that are no numbers",
    ),
    "shares": (change(memory_maps={"s": {"sources": ["a"], "shares": [[None]]}}), "values that are no numbers"),
    "lengths": (change(series=[{**ROW, "steps": [0, 1]}]), "1 values at 2 steps"),
    "steps": (change(series=[{**ROW, "steps": [0.5]}]), "expected a whole number, its step, for each value"),
    "huge step": (change(series=[{**ROW, "steps": [2**70]}]), "a wrong number"),
    "site out of range": (change(series=[{**ROW, "site": 99}]), "site is 99"),
    "unknown statistic": (change(series=[{**ROW, "statistic": "zzz"}]), "out zzz is not recorded"),
    "values as text": (change(series=[{**ROW, "values": ["1.0"]}]), "no numbers, expected numbers, or NaN, Infinity"),
    "series": (change(series={}), "'series' is '{}', expected a list"),
}


def assert_one_sentence(text, path, part):
    assert text.startswith(f"{path} is ")
    assert part in text
    assert "\n" not in text


@pytest.mark.parametrize(("edit", "message"), WRONG.values(), ids=WRONG)
def test_wrong_document_raises_one_sentence(tmp_path, edit, message):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(edit(full_recording().to_dict())))
    with pytest.raises(ValueError, match=r".") as raised:
        Recording.load(path)
    assert_one_sentence(str(raised.value), path, message)


@pytest.mark.parametrize("name", ["run.json", "run.parquet"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"PAR1" * 5, b"[" * 100_000])
def test_broken_files_raise(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"run\.\w+ is no (JSON|Parquet)"):
        Recording.load(path)


def test_other_parquet_raises(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table, path = arrow.table({"a": [1]}), tmp_path / "other.parquet"
    parquet.write_table(table, path)
    with pytest.raises(ValueError, match="without the metadata 'addnorm"):
        Recording.load(path)
    parquet.write_table(
        table.replace_schema_metadata({"addnorm.recording": json.dumps(store._head(Recording()))}), path
    )
    with pytest.raises(ValueError, match="a table without the column 'step'"):
        Recording.load(path)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"step": [None]}, "expected a whole number, its step"),
        ({"step": [0.5]}, "expected a whole number, its step"),
        ({"site": ["b"]}, "a wrong number (site is -1"),
        ({"value": ["one"]}, "values that are no numbers"),
        ({"value": [None]}, "values that are no numbers"),
        ({"role": [["out"]]}, "a table that cannot be read"),
        ({"step": [[0]]}, "a table that cannot be read"),
    ],
)
def test_parquet_of_wrong_types_raises_one_sentence(tmp_path, column, message):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"step": [0], "site": ["a"], "role": ["out"], "statistic": ["rms"], "value": [1.0]} | column
    head = json.dumps(store._head(Recording([RecordedSite("a", "a", "other", 0)])))
    path = tmp_path / "odd.parquet"
    parquet.write_table(arrow.table(columns).replace_schema_metadata({"addnorm.recording": head}), path)
    with pytest.raises(ValueError, match=r".") as raised:
        Recording.load(path)
    assert_one_sentence(str(raised.value), path, message)


def test_unknown_suffix_and_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"run.pkl', expected one that ends in .json or .parquet"):
        Recording().save(tmp_path / "run.pkl")
    with pytest.raises(FileNotFoundError):
        Recording.load(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError):
        Recording.load(tmp_path / "none.parquet")


@pytest.mark.parametrize(
    ("module", "use", "message"),
    [
        ("pandas", lambda rec, folder: rec.to_pandas(), r"needed to make a DataFrame: pip install 'addnorm\[data\]'"),
        (
            "pyarrow",
            lambda rec, folder: rec.save(folder / "a.parquet"),
            r"write Parquet: pip install 'addnorm\[data\]'",
        ),
        ("matplotlib.pyplot", lambda rec, folder: rec.plot.stream(), r"draw: pip install 'addnorm\[plot\]'"),
    ],
)
def test_missing_package_names_its_extra(tmp_path, monkeypatch, module, use, message):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=message):
        use(filled((0, 1, "out", "rms", 1.0)), tmp_path)
    assert [*tmp_path.iterdir()] == []
