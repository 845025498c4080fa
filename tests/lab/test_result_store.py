"""addnorm.lab.result_store: what is written stays, what is torn is dropped, and there is one writer."""

import json
import math
import os
from pathlib import Path

import pytest

from addnorm.lab.result_store import Journal, restored, step_of, tell_step

ONE = {"kind": "run", "key": "one", "test": 1.5}
OTHER = {"kind": "init", "key": "two", "found": [math.inf, -math.inf, None, "text ü\ud800"]}


def written(folder, *results):
    with Journal(folder).writing() as journal:
        for result in results:
            journal.append(result)
    return journal


def found(folder):
    with Journal(folder).writing() as journal:
        return journal.found


def test_what_was_written_is_there_again(tmp_path):
    written(tmp_path / "a" / "b", ONE, OTHER)
    assert found(tmp_path / "a" / "b") == {"one": ONE, "two": OTHER}
    nan = {**ONE, "test": math.nan}
    written(tmp_path, nan)
    assert math.isnan(found(tmp_path)["one"]["test"])
    assert all(json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()), "plain JSON"


@pytest.mark.parametrize("cut", [1, 2, 10, 30])
def test_a_torn_last_line_is_dropped_and_the_others_stay_to_the_byte(tmp_path, cut):
    file = written(tmp_path, ONE).file
    before = file.read_bytes()
    written(tmp_path, OTHER)
    with file.open("r+b") as torn:
        torn.truncate(file.stat().st_size - cut)
    with Journal(tmp_path).writing() as journal:
        assert journal.torn
        assert journal.found == {"one": ONE}
        assert file.read_bytes() == before
        journal.append(OTHER)
    assert found(tmp_path) == {"one": ONE, "two": OTHER}


@pytest.mark.parametrize("line", ["{torn", "[]", "3", '{"key": "x"}', '{"kind": "run"}', '{"kind": "run", "key": []}', "",
                                  "\N{BROKEN BAR}", "[" * 100_000])  # fmt: skip
def test_a_line_that_is_no_result_is_refused_with_its_number_and_nothing_is_changed(tmp_path, line):
    file = written(tmp_path, ONE, OTHER).file
    first, last = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + line.encode() + b"\n" + last)
    before = file.read_bytes()
    with pytest.raises(
        ValueError, match=r"results\.jsonl has in line 2 no result.*: take the line out, or give another"
    ) as error:
        found(tmp_path)
    assert "\n" not in str(error.value)
    assert file.read_bytes() == before


def test_bytes_that_are_no_text_are_refused_as_such_a_line(tmp_path):
    file = written(tmp_path, ONE).file
    file.write_bytes(b"\xff\xfe\n" + file.read_bytes())
    with pytest.raises(ValueError, match="line 1"):
        found(tmp_path)


def test_results_of_a_kind_that_is_not_known_are_left_alone(tmp_path):
    file = written(tmp_path, ONE).file
    with file.open("a") as more:
        more.write('{"kind": "of another version", "key": "one"}\n')
    assert found(tmp_path) == {"one": ONE}
    assert b"another version" in file.read_bytes()


def test_there_is_one_writer_at_a_time(tmp_path):
    again = Journal(tmp_path).writing()
    with Journal(tmp_path).writing(), pytest.raises(ValueError, match="to which another comparison is writing"):
        again.__enter__()
    assert found(tmp_path) == {}


@pytest.mark.parametrize("taken", [".", "results.jsonl/x", "lock/x", "open"])
def test_a_directory_that_cannot_be_written_is_refused_in_a_sentence(tmp_path, taken):
    folder = tmp_path / "out"
    if taken == "open":
        folder.mkdir()
        (folder / "open").touch()
    elif taken == ".":
        folder.touch()
    else:
        (folder / taken).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"out is '.*', which cannot be written to \(.+\): give another directory\.$"):
        Journal(folder)


def test_a_name_with_a_null_byte_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="which cannot be written to"):
        Journal(Path("a\0b"))


def test_where_the_disk_is_full_it_is_said_and_what_was_there_stays(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with Journal(tmp_path).writing() as journal:
        journal.append(ONE)
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(
            ValueError, match=r"where no more can be written \(No space left on device\): the same call goes on"
        ):
            journal.append(OTHER)
        assert journal.found == {"one": ONE}
    monkeypatch.undo()
    assert found(tmp_path)["one"] == ONE


def test_a_result_takes_what_was_open_away_and_only_that(tmp_path):
    with Journal(tmp_path).writing() as journal:
        for name in ("one.pt", "one.json", ".one.pt.123.tmp", "two.pt"):
            (journal.open / name).touch()
        journal.append(ONE)
        assert [path.name for path in journal.open.iterdir()] == ["two.pt"]


def test_an_open_run_tells_where_it_stands(tmp_path):
    path = tmp_path / "one.json"
    assert step_of(path) is None
    for step, loss in ((3, 1.5), (4, math.inf)):
        tell_step(path, step, loss)
        assert step_of(path) == (step, loss)
    tell_step(path, 5, math.nan)
    assert math.isnan(step_of(path)[1])
    for damage in ("", "[3", "[]", "{}", '["a", "b"]', "\ud800"):
        path.write_bytes(damage.encode("utf-8", "surrogatepass"))
        assert step_of(path) is None
    tell_step(tmp_path / "nowhere" / "one.json", 1, 1.0)  # nothing hangs on it
    assert [one.name for one in tmp_path.iterdir()] == ["one.json"]


def test_numbers_that_json_has_not_come_back():
    assert restored({"a": ["Infinity", {"b": "-Infinity"}], "c": "infinity"}) == {
        "a": [math.inf, {"b": -math.inf}],
        "c": "infinity",
    }
