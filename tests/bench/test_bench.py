"""The benchmark as a program: the document it writes and shows, on tiny sizes. No test asserts a time."""

import io
import json
import re

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from addnorm import bench
from addnorm.bench import accuracy, facts, machine, onnx_peer, summary, timing
from addnorm.bench.tables import digits
from addnorm.cli import main

TINY = ((3, 8), (130, 8))
ROW_KEYS = {
    "norm", "job", "rows", "d", "dtype", "threads", "variant", "median_us", "q1_us", "q3_us", "rounds", "repeats",
    "ratio_to_eager", "bytes", "share_of_add_bandwidth",
}  # fmt: skip
MOVED = {
    "forward": 3, "forward_stream": 4, "forward_backward": 8, "dropout": 9, "everything": 10, "in_place": 4, "reuse": 3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Loops as short as they can be; imports are not timed; onnxruntime is as absent as it may be."""
    monkeypatch.setattr(timing, "SEGMENT_MS", 0.01)
    monkeypatch.setattr(facts, "import_ms", lambda: 1.0)
    monkeypatch.setattr(accuracy, "SHAPE", (64, 32))
    monkeypatch.setattr(onnx_peer, "applies", lambda cell: False)


@pytest.fixture(scope="module")
def document():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "SEGMENT_MS", 0.01)
        patch.setattr(onnx_peer, "applies", lambda cell: False)
        return bench.run(cells(), rounds=3, compiled=False, proofs=False)


def cells():
    """Two sizes with all threads, that is two, and one of them with one."""
    return bench.matrix(shapes=TINY, threads=2) + bench.matrix(("layer",), ("float32",), TINY[:1], threads=1)


def test_document_is_json_with_a_row_for_each_variant_and_cell(document):
    parsed = json.loads(bench.dumps(document))
    assert parsed["schema"] == 2
    assert parsed["complete"]
    assert parsed["threads"] == 2
    assert parsed["versions"]["torch"] == torch.__version__
    assert parsed["peers"] == {"onnxruntime": onnx_peer.status()}
    assert list(summary.by_cell(parsed["rows"])) == cells()
    assert len(parsed["rows"]) == len(cells()) * 3
    for row in parsed["rows"]:
        assert row.keys() == ROW_KEYS
        assert row["q1_us"] <= row["median_us"] <= row["q3_us"]
        assert row["repeats"] >= 1
        assert row["rounds"] == 3
    assert {row["variant"] for row in parsed["rows"]} == {"eager", "addnorm", "add"}


def test_each_cell_runs_with_its_threads_and_torch_gets_its_own_back(threads, monkeypatch):
    found = []
    monkeypatch.setattr(bench, "measure", lambda cell, **_: found.append(torch.get_num_threads()) or ([], []))
    threads(2)
    chosen = [cell._replace(threads=count) for count in (2, 1, 2) for cell in bench.matrix(shapes=((1, 4),))[:1]]
    bench.run(chosen, proofs=False)
    assert found == [2, 1, 2]
    assert torch.get_num_threads() == 2


def test_compile_is_timed_with_all_threads_only(monkeypatch):
    found = []
    monkeypatch.setattr(
        bench, "measure", lambda cell, compiled, **_: found.append((cell.threads, compiled)) or ([], [])
    )
    bench.run(cells(), proofs=False)
    assert set(found) == {(2, True), (1, False)}


def test_the_whole_is_the_matrix_and_a_few_sizes_with_one_thread():
    found = bench.whole(threads=2)
    assert found[: len(bench.matrix())] == bench.matrix(threads=2)
    rest = found[len(bench.matrix()) :]
    assert {(cell.rows, cell.d, cell.threads) for cell in rest} == {(128, 768, 1), (2048, 1024, 1)}
    assert {cell.job for cell in rest} == set(bench.JOBS)
    assert bench.whole(threads=1) == bench.matrix(threads=1)


def test_a_document_of_the_first_schema_is_read(document, tmp_path):
    rows = [{key: row[key] for key in row if key not in ("threads", "rounds")} for row in document["rows"]]
    summary_rows = [{key: one[key] for key in one if key != "threads"} for one in document["summary"]]
    old = {key: document[key] for key in document if key not in ("accuracy", "peers")}
    path = bench.write({**old, "schema": 1, "rows": rows, "summary": summary_rows}, tmp_path / "old.json")
    found = bench.read(path)
    assert (
        {cell.threads for cell in summary.by_cell(found["rows"])} == {one["threads"] for one in found["summary"]} == {2}
    )
    assert found["accuracy"] == []
    assert bench.read(bench.write(document, tmp_path / "new.json")) == document


def test_ratios_and_bandwidth_are_those_of_the_medians(document):
    for cell, row in summary.by_cell(document["rows"]).items():
        bytes_of_one = cell.rows * cell.d * (4 if cell.dtype == "float32" else 2)
        assert row["addnorm"]["bytes"] == MOVED[cell.job] * bytes_of_one
        assert row["add"]["bytes"] == 3 * bytes_of_one
        assert row["eager"]["ratio_to_eager"] == row["add"]["share_of_add_bandwidth"] == 1.0
        rate = {name: one["bytes"] / one["median_us"] for name, one in row.items()}
        assert row["addnorm"]["share_of_add_bandwidth"] == pytest.approx(rate["addnorm"] / rate["add"])


def test_failure_to_compile_is_recorded(monkeypatch):
    def broken(*args, **options):
        def call(*tensors):
            raise RuntimeError("no compiler here")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    cells = bench.matrix(("layer",), ("float32",), ((2, 4),))
    found = bench.run(cells, rounds=1, compiled=True, proofs=False)
    assert found["complete"]
    assert [failure["error"] for failure in found["failures"]] == ["RuntimeError: no compiler here"] * 5
    assert {failure["job"] for failure in found["failures"]} == set(bench.JOBS) - {"in_place", "reuse"}
    assert {row["variant"] for row in found["rows"]} == {"eager", "addnorm", "add"}
    screen = Console(record=True, width=100, file=io.StringIO())
    bench.show(found, screen)
    assert "no compiler here" in screen.export_text()


def test_interrupt_keeps_the_cells_that_were_finished(monkeypatch, tmp_path):
    cells = bench.matrix(("layer",), ("float32",), TINY)
    real, seen = bench.measure, []

    def interrupted(cell, **options):
        seen.append(cell)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return real(cell, **options)

    monkeypatch.setattr(bench, "measure", interrupted)
    found = bench.run(cells, rounds=1, compiled=False, proofs=False)
    assert not found["complete"]
    assert list(summary.by_cell(found["rows"])) == cells[:2]
    results = tmp_path / "functional.json"
    results.write_text("what was complete")
    assert bench.write(found, results) == tmp_path / "functional.partial.json"
    assert results.read_text() == "what was complete"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["functional.json", "functional.partial.json"]


def test_write_leaves_the_old_file_where_it_fails(document, tmp_path):
    target = tmp_path / "new" / "results.json"
    assert bench.write(document, target) == target
    before = target.read_text()
    with pytest.raises(TypeError):
        bench.write({**document, "date": object()}, target)
    assert target.read_text() == before
    assert [path.name for path in target.parent.iterdir()] == ["results.json"]


def test_machine_is_described():
    where = machine.environment()
    assert where["machine"]["cpu"]
    assert where["machine"]["cores"] >= 1
    assert [backend["name"] for backend in where["backends"]][:2] == ["reference", "cpu"]
    assert where["commit"] is None or re.fullmatch("[0-9a-f]{40}", where["commit"])
    assert machine.last_level_cache({}) == machine.ASSUMED_CACHE


@pytest.mark.parametrize(
    ("value", "text"),
    [(14683.4, "14,683"), (133.2, "133"), (42.53, "42.5"), (3.452, "3.45"), (0.898, "0.898"), (1.6e-7, "1.6e-07"),
     (512, "512"), (2.8, "2.80"), (9.999, "10.0"), (99.96, "100")],
)  # fmt: skip
def test_digits(value, text):
    assert digits(value) == text


def test_tables_fit_100_columns(document):
    rows = [*document["rows"]]
    for peer in ("compile", "onnxruntime"):
        rows += [{**row, "variant": peer} for row in document["rows"] if row["variant"] == "eager"]
    proofs = {
        "summary": summary.summarize(rows, 1e9),
        "facts": facts.facts(("rms",), ("bfloat16",)) + facts.of_accuracy(accuracy.table(("rms",))),
        "accuracy": accuracy.table(),
    }
    screen = Console(record=True, width=100, file=io.StringIO())
    bench.show({**document, "rows": rows, **proofs}, screen)
    text = screen.export_text()
    for name in ("LayerNorm: forward, y and the stream, 2 threads", "LayerNorm: in place, y and the stream, 1 thread\n",
                 "RMSNorm: forward + backward, dropout 0.1, 2 threads", "x onnx", "with backward: lowest, 1 thread",
                 "saved bytes, 512 x 768 bfloat16, all options", "relative error against float64"):  # fmt: skip
        assert name in re.sub(" +\n", "\n", text), name
    assert "…" not in text
    for line in text.splitlines():
        assert len(line.rstrip()) <= 100


def test_command_writes_json_alone_to_stdout(monkeypatch):
    monkeypatch.setattr(bench, "QUICK_SHAPES", ((2, 4),))
    done = CliRunner().invoke(main, ["bench", "--quick", "--rounds", "1", "--norm", "rms", "--json", "-"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {row["norm"] for row in found["rows"]} == {"rms"}
    assert found["protocol"]["rounds"] == 1
    assert {(one["norm"], one["dtype"]) for one in found["accuracy"]} == {("rms", dtype) for dtype in accuracy.DTYPES}


def test_command_writes_a_file_and_ends_with_3_where_a_proof_failed(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "QUICK_SHAPES", ((2, 4),))
    monkeypatch.setattr(facts, "facts", lambda *_: [summary.claim("false", "layer", 1.0, "==", 2.0, torch=2.0)])
    done = CliRunner().invoke(main, ["bench", "--quick", "--dtype", "float32", "--json", str(tmp_path / "out.json")])
    assert done.exit_code == 3, done.output
    assert json.loads((tmp_path / "out.json").read_text())["facts"][0]["met"] is False


@pytest.mark.parametrize("words", [["--norm", "batch"], ["--dtype", "int8"], ["--threads", "0"], ["--rounds", "x"]])
def test_command_refuses_wrong_arguments_with_2(words):
    assert CliRunner().invoke(main, ["bench", *words]).exit_code == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # Inductor's own
def test_compiled_variant_is_measured():
    cells = bench.matrix(("layer",), ("float32",), ((4, 8),))
    found = bench.run(cells, rounds=1, compiled=True, proofs=False)
    assert found["failures"] == []
    assert sum(row["variant"] == "compile" for row in found["rows"]) == 5
