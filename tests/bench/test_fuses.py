"""The benchmark of `addnorm.fuse`, here of a small model: what is said of it follows from the rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

from addnorm import bench
from addnorm.bench import fuses, minilm
from addnorm.fusion.tolerance import Difference
from addnorm.stream.models.load import LoadedModel

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "fuse.json"
INFERENCE = fuses.Cell("inference", 1, 8, "float32", 1)
TRAINING = fuses.Cell("training", 1, 8, "bfloat16", 1)
VARIANTS = ["plain", "fused", "frontend"]


def small(name, *, texts, tokens, dtype):
    """A BERT of two layers with random weights, in MiniLM's place."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertModel(BertConfig(vocab_size=50, **sizes)).eval().to(getattr(torch, dtype))
    ids = torch.randint(0, 50, (len(texts), tokens))
    return LoadedModel(name, model, (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, tuple(texts), "random")


@pytest.fixture(scope="module", autouse=True)
def short():
    """The small model, and no more rounds than there must be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minilm, "load", small)
        patch.setattr(fuses, "SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def document(short):
    return fuses.run([INFERENCE, TRAINING], rounds=1)


def test_the_matrix_has_each_size_in_both_dtypes():
    found = fuses.cells(threads=2)
    sizes = {("inference", 1, 16), ("inference", 8, 128), ("inference", 32, 128), ("training", 8, 128)}
    assert {(cell.job, cell.batch, cell.tokens) for cell in found} == sizes
    assert len(found) == len({*found}) == 2 * len(sizes)
    assert {cell[:4] for cell in found} > {*fuses.INDUCTOR}


def test_a_cell_has_a_row_a_variant(document):
    found = fuses.by_cell(document["rows"])
    assert {cell: [*rows] for cell, rows in found.items()} == {INFERENCE: VARIANTS, TRAINING: VARIANTS}
    assert all(0 < row["q1_us"] <= row["median_us"] <= row["q3_us"] for row in document["rows"])
    assert all(0 < rows["plain"]["share"] < 1 for rows in found.values())


def test_bytes_kept_for_backward_are_told_in_training(document):
    assert all(("saved_bytes" in row) == (row["job"] == "training") for row in document["rows"])
    assert all(row["saved_bytes"] > 0 for row in document["rows"] if row["job"] == "training")


def test_each_fused_model_is_told_with_its_proof(document):
    assert [(row["job"], row["variant"]) for row in document["fusions"]] == [
        ("inference", "fused"),
        ("training", "fused"),
    ]
    assert [row["mode"] for row in document["fusions"]] == ["evaluation", "training"]
    for row in document["fusions"]:
        assert row["seconds"] > 0
        assert row["fused"] == 5  # two a layer, and the embedding's
        assert row["left"] == []
        for part in ("outputs", "gradients"):
            assert row[part]["holds"]
            assert row[part]["times_error"] == row[part]["max_abs"] / row[part]["eager_error"]


def test_a_document_is_json_whose_rows_are_last(document, tmp_path):
    assert document["complete"]
    assert document["failures"] == []
    assert [*document][-1] == "rows"
    path = bench.write(document, tmp_path / "fuse.json")
    assert json.loads(path.read_text()) == json.loads(json.dumps(document))


def test_each_variant_has_weights_of_its_own_in_the_mode_of_the_job(monkeypatch):
    made = []
    monkeypatch.setattr(fuses, "MAKE", {name: lambda model, given: made.append(model) for name in ("plain", "fused")})
    fuses.measure(TRAINING, rounds=1)
    assert [model.training for model in made] == [True, True]
    memory = [{p.data_ptr() for p in model.parameters()} for model in made]
    assert not memory[0] & memory[1]


def test_a_training_step_leaves_the_gradients_in_grad():
    loaded = minilm.loaded(TRAINING, "float32")
    fuses.call(TRAINING, loaded.model, loaded.kwargs)()
    first = {name: p.grad for name, p in loaded.model.named_parameters()}
    fuses.call(TRAINING, loaded.model, loaded.kwargs)()
    second = {name: p.grad for name, p in loaded.model.named_parameters()}
    assert any(g is not None and g.any() for g in first.values())
    for name, gradient in first.items():  # anew, and not added up
        assert (gradient is None and second[name] is None) or torch.equal(gradient, second[name])


def test_inference_keeps_nothing_for_backward():
    loaded = minilm.loaded(INFERENCE, "float32")
    assert not fuses.call(INFERENCE, loaded.model, loaded.kwargs)().requires_grad


def test_inductor_is_asked_in_chosen_cells_and_what_fails_is_told(monkeypatch):
    def broken(model, given):
        raise RuntimeError("no compiler here")

    made = {name: make for name, make in fuses.MAKE.items() if name == "plain"} | {"fused": broken, "inductor": broken}
    monkeypatch.setattr(fuses, "MAKE", made)
    monkeypatch.setattr(fuses, "INDUCTOR", (INFERENCE[:4],))
    found = fuses.measure(INFERENCE, rounds=1)
    assert [row["variant"] for row in found["rows"]] == ["plain"]
    assert [row["variant"] for row in found["failures"]] == ["fused", "inductor"]
    assert found["failures"][0]["error"] == "RuntimeError: no compiler here"
    assert [row["variant"] for row in fuses.measure(INFERENCE, rounds=1, inductor=False)["failures"]] == ["fused"]
    assert [row["variant"] for row in fuses.measure(TRAINING, rounds=1)["failures"]] == ["fused"]


def test_a_model_that_does_not_run_as_it_was_is_an_error(monkeypatch):
    def broken(model, given):
        raise RuntimeError("does not run")

    monkeypatch.setattr(fuses, "MAKE", {"plain": broken})
    with pytest.raises(RuntimeError, match="does not run"):
        fuses.measure(INFERENCE, rounds=1)


def rows_of(cell, **times):
    return [{**cell._asdict(), "variant": name, "median_us": time} for name, time in times.items()]


def test_the_summary_follows_from_the_rows():
    rows = rows_of(INFERENCE, plain=9.0, fused=10.0, frontend=12.0) + rows_of(TRAINING, plain=19.0, fused=20.0)
    slower, level, proven = fuses.summarize(rows)
    assert slower["name"] == "fused, inference, 1 x 8 tokens, float32: times as fast as the model as it was"
    assert (slower["value"], slower["target"], slower["met"]) == (0.9, 0.95, False)
    assert (level["value"], level["met"]) == (0.95, True)
    assert (proven["value"], proven["met"]) == (2, True)


def test_a_cell_without_a_fused_model_is_a_target_missed():
    *_, first, proven = fuses.summarize(rows_of(INFERENCE, plain=9.0))
    assert (first["value"], first["met"]) == (None, None)
    assert (proven["value"], proven["target"], proven["met"]) == (0, 1, False)


def test_the_worst_is_the_largest_over_eagers_own_error():
    exact = Difference("exact", max_abs=0.0, eager_error=0.0, magnitude=1.0, tolerance=1.0)
    unknown = Difference("unknown", max_abs=0.5, eager_error=None, magnitude=1.0, tolerance=1.0)
    small = Difference("small", max_abs=0.1, eager_error=0.05, magnitude=1.0, tolerance=1.0)
    large = Difference("large", max_abs=0.2, eager_error=0.4, magnitude=1.0, tolerance=1.0)
    assert fuses.worst([exact, unknown, large, small])["name"] == "small"
    assert fuses.worst([exact, unknown]) is None


def test_an_interrupted_run_is_marked_as_partial(tmp_path, monkeypatch):
    def interrupted(cell, **options):
        if lines[1:]:
            raise KeyboardInterrupt
        return {"fusions": [], "failures": [], "rows": rows_of(cell, plain=2.0, fused=1.0)}

    lines = []
    monkeypatch.setattr(fuses, "measure", interrupted)
    document = fuses.run([INFERENCE, TRAINING], progress=lines.append)
    assert not document["complete"]
    assert len(lines) == 2
    assert [*fuses.by_cell(document["rows"])] == [INFERENCE]
    assert bench.write(document, tmp_path / "fuse.json").name == "fuse.partial.json"


@pytest.mark.skipif(not RESULTS.exists(), reason="no results yet: benchmarks/bench_fuse.py")
def test_the_committed_results_are_of_the_whole_matrix():
    document = json.loads(RESULTS.read_text())
    assert document["complete"]
    assert not document["dirty"]
    assert [*fuses.by_cell(document["rows"])] == fuses.cells(threads=2)
    assert document["summary"] == json.loads(json.dumps(fuses.summarize(document["rows"])))


def test_the_script_tells_its_options():
    script = str(ROOT / "benchmarks" / "bench_fuse.py")
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True)
    assert "--no-inductor" in done.stdout
