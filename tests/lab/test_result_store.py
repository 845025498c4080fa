"""Tests of `addnorm.lab.result_store`."""

import json
import math
import os
from pathlib import Path

import pytest

from addnorm._util.files import UnwritableError
from addnorm.lab.result_store import ResultStore, read_progress, write_progress

ONE = {"kind": "run", "key": "one", "test": 1.5}
OTHER = {"kind": "untrained", "key": "two", "stacks": [math.inf, -math.inf, None, "text ü\ud800"]}


def write_results(folder, *results):
    with ResultStore(folder).writing() as store:
        for result in results:
            store.append(result)
    return store


def read_results(folder):
    with ResultStore(folder).writing() as store:
        return store.results


def test_result_store_reads_back_results(tmp_path):
    write_results(tmp_path / "a" / "b", ONE, OTHER)
    assert read_results(tmp_path / "a" / "b") == {"one": ONE, "two": OTHER}
    nan = {**ONE, "test": math.nan}
    write_results(tmp_path, nan)
    assert math.isnan(read_results(tmp_path)["one"]["test"])
    assert all(json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()), "plain JSON"


@pytest.mark.parametrize("cut", [1, 2, 10, 30])
def test_result_store_drops_only_a_torn_last_line(tmp_path, cut):
    file = write_results(tmp_path, ONE).file
    before = file.read_bytes()
    write_results(tmp_path, OTHER)
    with file.open("r+b") as torn:
        torn.truncate(file.stat().st_size - cut)
    with ResultStore(tmp_path).writing() as store:
        assert store.results == {"one": ONE}
        assert file.read_bytes() == before
        store.append(OTHER)
    assert read_results(tmp_path) == {"one": ONE, "two": OTHER}


@pytest.mark.parametrize("line", ["{torn", "[]", "3", '{"key": "x"}', '{"kind": "run"}', '{"kind": "run", "key": []}', "",
                                  "\N{BROKEN BAR}", "\udcff\udcfe", "[" * 100_000])  # fmt: skip
def test_result_store_refuses_lines_that_are_no_results(tmp_path, line):
    file = write_results(tmp_path, ONE, OTHER).file
    first, last = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + line.encode(errors="surrogateescape") + b"\n" + last)
    before = file.read_bytes()
    with pytest.raises(
        ValueError, match=r"results\.jsonl has no result in line 2.*: remove the line, or choose another"
    ) as error:
        read_results(tmp_path)
    assert "\n" not in str(error.value)
    assert file.read_bytes() == before


@pytest.mark.parametrize("text", ['{"loss": 1.0}', "mine 1\nmine 2", '{"kind":"run","key":"a"}\nloss 2'])
def test_result_store_keeps_a_foreign_last_line(tmp_path, text):
    (tmp_path / "results.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"results\.jsonl has no result in line [12]"):
        read_results(tmp_path)
    assert (tmp_path / "results.jsonl").read_text() == text


def test_result_store_ignores_unknown_kinds(tmp_path):
    file = write_results(tmp_path, ONE).file
    with file.open("a") as more:
        more.write('{"kind": "of another version", "key": "one"}\n')
    assert read_results(tmp_path) == {"one": ONE}
    assert b"another version" in file.read_bytes()


def test_result_store_allows_one_writer(tmp_path):
    again = ResultStore(tmp_path).writing()
    with ResultStore(tmp_path).writing(), pytest.raises(ValueError, match="which another comparison is writing"):
        again.__enter__()
    assert read_results(tmp_path) == {}


@pytest.mark.parametrize("taken", [".", "results.jsonl/x", "lock/x", "open"])
def test_result_store_refuses_unwritable_directories(tmp_path, taken):
    folder = tmp_path / "out"
    if taken == "open":
        folder.mkdir()
        (folder / "open").touch()
    elif taken == ".":
        folder.touch()
    else:
        (folder / taken).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"out is '.*', which cannot be written \(.+\): choose another directory\.$"):
        ResultStore(folder)


def test_result_store_refuses_null_bytes():
    with pytest.raises(ValueError, match="which cannot be written"):
        ResultStore(Path("a\0b"))


def test_result_store_keeps_results_on_full_disk(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with ResultStore(tmp_path).writing() as store:
        store.append(ONE)
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(
            UnwritableError, match=r"which cannot be written any more \(No space left on device\): free some space"
        ):
            store.append(OTHER)
        assert store.results == {"one": ONE}
    monkeypatch.undo()
    assert read_results(tmp_path)["one"] == ONE


def test_append_deletes_open_files_of_that_run(tmp_path):
    with ResultStore(tmp_path).writing() as store:
        for name in ("one.pt", "one.json", ".one.pt.123.tmp", "two.pt"):
            (store.open / name).touch()
        store.append(ONE)
        assert [path.name for path in store.open.iterdir()] == ["two.pt"]


def test_progress_files_survive_damage(tmp_path):
    path = tmp_path / "one.json"
    assert read_progress(path) is None
    for step, loss in ((3, 1.5), (4, math.inf)):
        write_progress(path, step, loss)
        assert read_progress(path) == (step, loss)
    write_progress(path, 5, math.nan)
    assert math.isnan(read_progress(path)[1])
    for damage in ("", "[3", "[]", "{}", '["a", "b"]', "\ud800"):
        path.write_bytes(damage.encode("utf-8", "surrogatepass"))
        assert read_progress(path) is None
    write_progress(tmp_path / "nowhere" / "one.json", 1, 1.0)  # errors are ignored
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]
