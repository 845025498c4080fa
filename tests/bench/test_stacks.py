"""The benchmark of whole stacks: the three variants compute the same, and what is said of them follows from the rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from addnorm import bench
from addnorm.bench import stacks

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "stack.json"


def cell(wiring="pre_ln", job="inference", tokens=3, d=64):
    return stacks.Cell(wiring, job, 2, tokens, d, 1)


@pytest.mark.parametrize("wiring", stacks.WIRINGS)
def test_the_variants_have_equal_weights_of_their_own_and_equal_outputs(wiring):
    modules, x, _ = stacks.variants(cell(wiring, "training"))
    outputs = {name: module(x) for name, module in modules.items()}
    for name in stacks.PEERS:
        torch.testing.assert_close(outputs[name], outputs["addnorm"], rtol=1e-5, atol=1e-5)
    memory = [{p.data_ptr() for p in module.parameters()} for module in modules.values()]
    assert not memory[0] & memory[1]
    assert not memory[0] & memory[2]
    assert not memory[1] & memory[2]
    counts = {sum(p.numel() for p in module.parameters()) for module in modules.values()}
    assert len(counts) == 1


def test_plain_is_made_of_torchs_own_norms():
    plain = stacks.variants(cell())[0]["plain"]
    assert {type(module) for module in plain.modules() if isinstance(module, nn.LayerNorm)} == {nn.LayerNorm}


@pytest.mark.parametrize("job", stacks.JOBS)
def test_a_cell_has_a_row_a_variant(job):
    rows = stacks.measure(cell(job=job), rounds=2)
    assert [row["variant"] for row in rows] == ["addnorm", "plain", "torch"]
    for row in rows:
        assert 0 < row["q1_us"] <= row["median_us"] <= row["q3_us"]
        assert ("saved_bytes" in row) == (job == "training")


def test_a_cell_whose_outputs_differ_is_an_error(monkeypatch):
    whole = stacks.variants

    def spoiled(cell):
        modules, x, dy = whole(cell)
        nn.init.constant_(modules["plain"].final.bias, 1.0)
        return modules, x, dy

    monkeypatch.setattr(stacks, "variants", spoiled)
    with pytest.raises(AssertionError):
        stacks.measure(cell(), rounds=1)


def test_saved_bytes_are_those_of_what_is_kept():
    class Two(nn.Module):
        def forward(self, x):
            return (x.exp() * 2).sigmoid()  # each keeps its output; a constant factor keeps nothing

    x = torch.randn(100, requires_grad=True)
    assert stacks.saved_bytes(Two(), x) == 2 * 400
    linear = nn.Linear(100, 100)
    assert stacks.saved_bytes(linear, x[None].detach()) == 0  # its input and its parameters are not counted


def rows_of(times, saved=None):
    rows = []
    for one in (cell(job="inference"), cell(job="training"), cell("post_ln", "training")):
        for name, time in times.items():
            row = {**one._asdict(), "variant": name, "median_us": time, "q1_us": time, "q3_us": time}
            rows.append(row | ({"saved_bytes": saved[name]} if one.job == "training" else {}))
    return rows


def test_the_summary_follows_from_the_rows():
    found = stacks.summarize(
        rows_of({"addnorm": 10.0, "plain": 9.0, "torch": 20.0}, {"addnorm": 50, "plain": 100, "torch": 200})
    )
    by_name = {one["name"]: one for one in found}
    lowest = by_name["forward + backward: lowest, against plain PyTorch"]
    assert (lowest["value"], lowest["met"], lowest["cells"], lowest["cells_met"]) == (0.9, False, 2, 0)
    assert by_name["inference: lowest, against torch.nn.TransformerEncoder"]["met"] is True
    assert by_name["saved bytes: highest share of plain PyTorch's"]["value"] == 0.5
    assert by_name["forward + backward: mean, against torch.nn.TransformerEncoder"]["value"] == pytest.approx(2.0)


def test_a_document_is_written_whole_or_marked_as_partial(tmp_path, monkeypatch):
    document = stacks.run([cell()], rounds=2)
    assert document["complete"]
    path = bench.write(document, tmp_path / "stack.json")
    assert json.loads(path.read_text())["rows"] == document["rows"]

    def interrupted(cell, rounds):
        raise KeyboardInterrupt

    monkeypatch.setattr(stacks, "measure", interrupted)
    lines = []
    document = stacks.run([cell(), cell()], progress=lines.append)
    assert not document["complete"]
    assert len(lines) == 1
    assert bench.write(document, tmp_path / "stack.json").name == "stack.partial.json"


def test_the_committed_results_are_of_the_whole_matrix():
    document = json.loads(RESULTS.read_text())
    assert document["complete"]
    assert not document["dirty"]
    assert set(stacks.by_cell(document["rows"])) == set(stacks.cells(threads=2))
    assert document["summary"] == json.loads(json.dumps(stacks.summarize(document["rows"])))


def test_the_script_tells_its_options():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "bench_stack.py"), "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--threads" in done.stdout
