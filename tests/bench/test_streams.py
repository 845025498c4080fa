"""The benchmark of looking: what is said follows from the rows, and the committed results are of the whole matrix."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from addnorm import bench
from addnorm.bench import minilm, streams

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "stream.json"
SMALL = streams.Cell(1, 8, 1)


def test_the_text_fills_the_tokens():
    models, kwargs = streams.variants(streams.Cell(2, 16, 1))
    assert kwargs["input_ids"].shape == (2, 16)
    assert kwargs["attention_mask"].all()
    memory = [{p.data_ptr() for p in model.parameters()} for model in models.values()]
    assert not memory[0] & memory[1]


def test_a_cell_has_a_row_a_variant():
    rows = streams.measure(SMALL, rounds=1)
    assert sorted(row["variant"] for row in rows) == sorted(streams.VARIANTS)
    assert all(0 < row["q1_us"] <= row["median_us"] <= row["q3_us"] for row in rows)


def test_the_calls_tell_their_seconds_and_closures():
    rows = streams.calls(SMALL)
    assert [row["call"] for row in rows] == ["inspect", "decompose"]
    assert all(0 < row["median_s"] <= row["most_s"] and row["closure"] <= streams.CLOSURE for row in rows)


def test_the_summary_follows_from_the_rows():
    times = {"plain": 10.0, "recorded": 25.0, "without gradients": 15.0}
    rows = [{"batch": 1, "tokens": 8, "threads": 1, "variant": name, "median_us": time} for name, time in times.items()]
    called = [{"call": "inspect", "batch": 1, "tokens": 8, "median_s": 1.0, "most_s": 2.0, "closure": 1e-7}]
    found = {one["name"]: one for one in streams.summarize(rows, called)}
    recording = found["recording, 1 x 8 tokens: times the plain step"]
    assert (recording["value"], recording["met"]) == (2.5, False)
    assert found["inspect, 1 x 8 tokens: seconds, the slowest of 5"]["met"] is True
    assert found["inspect, 1 x 8 tokens: closure"]["met"] is True


def test_a_document_is_written_as_json(tmp_path):
    document = streams.run([SMALL], rounds=1)
    path = bench.write(document, tmp_path / "stream.json")
    assert json.loads(path.read_text()) == json.loads(json.dumps(document))


def test_an_interrupted_run_is_marked_as_partial(tmp_path, monkeypatch):
    def interrupted(cell, rounds):
        raise KeyboardInterrupt

    monkeypatch.setattr(streams, "measure", interrupted)
    lines = []
    document = streams.run([SMALL, SMALL], progress=lines.append)
    assert not document["complete"]
    assert len(lines) == 1
    assert bench.write(document, tmp_path / "stream.json").name == "stream.partial.json"


def test_the_committed_results_are_of_the_whole_matrix():
    document = json.loads(RESULTS.read_text())
    assert document["complete"]
    assert not document["dirty"]
    measured = {streams.Cell(row["batch"], row["tokens"], row["threads"]) for row in document["rows"]}
    assert measured == set(streams.cells(threads=2))
    assert document["summary"] == json.loads(json.dumps(streams.summarize(document["rows"], document["calls"])))


def test_the_script_tells_its_options():
    script = str(ROOT / "benchmarks" / "bench_stream.py")
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True)
    assert "--threads" in done.stdout


def test_a_text_too_short_is_refused(monkeypatch):
    monkeypatch.setattr(minilm, "passages", lambda cell: ["short"] * cell.batch)
    with pytest.raises(ValueError, match="expected"):
        streams.variants(streams.Cell(1, 64, 1))
