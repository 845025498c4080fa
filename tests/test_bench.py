"""The benchmark as a program: what it counts and writes, on tiny sizes. No test asserts a time."""

import importlib.util
import io
import json
import math
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from addnorm import bench
from addnorm.bench import facts, machine, summary, timing
from addnorm.bench.tables import digits
from addnorm.cli import main

ROOT = Path(__file__).parent.parent
TINY = ((3, 8), (130, 8))
ROW_KEYS = {
    "norm", "job", "rows", "d", "dtype", "variant", "median_us", "q1_us", "q3_us", "repeats", "ratio_to_eager", "bytes",
    "share_of_add_bandwidth",
}  # fmt: skip


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Loops as short as they can be; imports are not timed."""
    monkeypatch.setattr(timing, "SEGMENT_MS", 0.01)
    monkeypatch.setattr(facts, "import_ms", lambda: 1.0)


@pytest.fixture(scope="module")
def document():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "SEGMENT_MS", 0.01)
        return bench.run(bench.matrix(shapes=TINY), rounds=3, threads=1, compiled=False, proofs=False)


def fake_rows(times, cells):
    """Rows in which every cell has the same medians."""
    return [
        {**cell._asdict(), "variant": name, "median_us": time} for cell in cells for name, time in times.items()
    ]  # fmt: skip


def test_document_is_json_with_a_row_for_each_variant_and_cell(document):
    parsed = json.loads(bench.dumps(document))
    assert parsed["schema"] == 1
    assert parsed["complete"]
    assert parsed["threads"] == 1
    assert parsed["versions"]["torch"] == torch.__version__
    assert len(parsed["rows"]) == len(bench.matrix(shapes=TINY)) * 3
    for row in parsed["rows"]:
        assert row.keys() == ROW_KEYS
        assert row["q1_us"] <= row["median_us"] <= row["q3_us"]
        assert row["repeats"] >= 1
    assert {row["variant"] for row in parsed["rows"]} == {"eager", "addnorm", "add"}


def test_run_restores_the_threads(threads):
    threads(2)
    bench.run(bench.matrix(("rms",), ("float32",), ((1, 4),)), rounds=1, threads=1, compiled=False, proofs=False)
    assert torch.get_num_threads() == 2


def test_ratios_and_bandwidth_are_those_of_the_medians(document):
    for cell, row in summary.by_cell(document["rows"]).items():
        bytes_of_one = cell.rows * cell.d * (4 if cell.dtype == "float32" else 2)
        moved = {"forward": 3, "forward_stream": 4, "forward_backward": 8}[cell.job]
        assert row["addnorm"]["bytes"] == moved * bytes_of_one
        assert row["add"]["bytes"] == 3 * bytes_of_one
        assert row["eager"]["ratio_to_eager"] == row["add"]["share_of_add_bandwidth"] == 1.0
        rate = {name: one["bytes"] / one["median_us"] for name, one in row.items()}
        assert row["addnorm"]["share_of_add_bandwidth"] == pytest.approx(rate["addnorm"] / rate["add"])


@pytest.mark.parametrize("cell", bench.matrix(shapes=((5, 16),)), ids=lambda cell: "-".join(map(str, cell)))
def test_variants_compute_the_same(cell):
    calls, args = timing.variants(cell, compiled=False)
    eager, ours = calls["eager"](*args), calls["addnorm"](*args)
    pairs = zip(eager, ours, strict=True) if cell.job != "forward" else [(eager, ours)]
    for theirs, found in pairs:
        torch.testing.assert_close(found, theirs, rtol=2e-2, atol=5e-2 if cell.dtype == "bfloat16" else 1e-5)
    if cell.job == "forward_backward":
        assert len(eager) == (4 if cell.norm == "layer" else 3)


def test_order_is_rotated_each_round(monkeypatch):
    called = []
    names = ("eager", "addnorm", "add")
    calls = {name: lambda *_, name=name: called.append(name) for name in names}
    monkeypatch.setattr(timing, "variants", lambda cell, compiled: (calls, []))
    monkeypatch.setattr(timing, "_calibrated", lambda call, args: 1)
    timing.measure(bench.matrix(shapes=((1, 4),))[0], rounds=4)
    timed = called[::2]  # each is called once untimed, once timed
    assert timed == called[1::2]
    assert [timed[k : k + 3] for k in range(0, 12, 3)] == [
        ["eager", "addnorm", "add"],
        ["addnorm", "add", "eager"],
        ["add", "eager", "addnorm"],
        ["eager", "addnorm", "add"],
    ]


def test_failure_to_compile_is_recorded(monkeypatch):
    def broken(*args, **options):
        def call(*tensors):
            raise RuntimeError("no compiler here")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    cells = bench.matrix(("layer",), ("float32",), ((2, 4),))
    found = bench.run(cells, rounds=1, compiled=True, proofs=False)
    assert found["complete"]
    assert [failure["error"] for failure in found["failures"]] == ["RuntimeError: no compiler here"] * 3
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


def test_summary_is_the_statistic_over_the_cells_it_names():
    cells = bench.matrix(("layer",))
    rows = fake_rows({"eager": 30.0, "addnorm": 10.0, "compile": 8.0, "add": 5.0}, cells)
    found = {(one["name"], one["versus"]): one for one in summary.summarize(rows, 32 * 1024**2)}
    counted = {name: (one["cells"], round(one["value"], 9), one["met"]) for name, one in found.items()}
    assert counted == {
        ("forward, 128+ rows, under 32 MB: mean", "x eager"): (16, 3.0, True),
        ("forward, one row: mean", "x eager"): (8, 3.0, True),
        ("forward, over 32 MB: lowest", "x eager"): (4, 3.0, True),
        ("with backward, 128+ rows, under 32 MB: mean", "x eager"): (8, 3.0, True),
        ("with backward, every size: lowest", "x eager"): (14, 3.0, True),
        ("everything: lowest", "x eager"): (42, 3.0, True),
        ("everything under 32 MB: lowest", "x compile"): (36, 0.8, False),
        ("y alone, float32, 128+ rows, in cache: highest", "x add's time"): (3, 2.0, False),
    }


def test_summary_takes_geometric_means_and_extremes():
    one, two = bench.matrix(("rms",), ("float32",), ((128, 768), (512, 768)))[:2]
    rows = fake_rows({"eager": 20.0, "addnorm": 10.0, "add": 10.0}, [one])
    rows += fake_rows({"eager": 80.0, "addnorm": 10.0, "add": 5.0}, [two])
    found = {one["name"]: one["value"] for one in summary.summarize(rows, 1e9)}
    assert found["forward, 128+ rows, under 32 MB: mean"] == pytest.approx(4.0)
    assert found["everything: lowest"] == 2.0
    assert found["y alone, float32, 128+ rows, in cache: highest"] == 2.0
    assert found["forward, one row: mean"] is None


def test_a_claim_without_a_number_is_neither_met_nor_missed():
    assert summary.claim("x", None, None, ">=", 1.0)["met"] is None
    assert summary.claim("x", None, 0.94, ">=", 0.95)["met"] is False
    assert not summary.claim("x", None, math.nan, "<", 1.0)["met"]


def test_facts_hold():
    found = facts.facts()
    assert all(fact["met"] for fact in found), [fact for fact in found if not fact["met"]]
    assert len(found) == 1 + 6 + 3 + 4


def test_saved_bytes_are_the_stream_and_eight_a_token():
    assert facts.saved_bytes("layer", torch.float32, 7, 32)["addnorm"] == 7 * 32 * 4 + 8 * 7
    assert facts.saved_bytes("rms", torch.bfloat16, 7, 32)["addnorm"] == 7 * 32 * 2 + 8 * 7


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
    screen = Console(record=True, width=100, file=io.StringIO())
    bench.show({**document, "facts": facts.facts(("rms",), ("bfloat16",))}, screen)
    text = screen.export_text()
    assert "LayerNorm: forward, y and the stream" in text
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


def test_command_writes_a_file_and_ends_with_3_where_a_proof_failed(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "QUICK_SHAPES", ((2, 4),))
    monkeypatch.setattr(facts, "facts", lambda *_: [summary.claim("false", "layer", 1.0, "==", 2.0, torch=2.0)])
    done = CliRunner().invoke(main, ["bench", "--quick", "--dtype", "float32", "--json", str(tmp_path / "out.json")])
    assert done.exit_code == 3, done.output
    assert json.loads((tmp_path / "out.json").read_text())["facts"][0]["met"] is False


@pytest.mark.parametrize("words", [["--norm", "batch"], ["--dtype", "int8"], ["--threads", "0"], ["--rounds", "x"]])
def test_command_refuses_wrong_arguments_with_2(words):
    assert CliRunner().invoke(main, ["bench", *words]).exit_code == 2


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location("table", ROOT / "benchmarks" / "table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_replaces_what_stands_between_the_comments(table, document, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(table, "RESULTS", tmp_path / "functional.json")
    monkeypatch.setattr(table, "README", tmp_path / "README.md")
    bench.write(document, table.RESULTS)
    table.README.write_text(f"# before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    assert table.main(["--check"]) == 1
    assert "run benchmarks/table.py" in capsys.readouterr().out
    assert table.main([]) == 0
    assert table.main(["--check"]) == 0
    text = table.README.read_text()
    assert text.startswith("# before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| 130 x 8 | bfloat16 |" in text


def test_table_says_where_it_belongs(table):
    with pytest.raises(SystemExit, match="add the two lines"):
        table.replaced("# no place for it", "text")


def test_readme_has_the_table_of_the_results(table):
    if not table.RESULTS.exists():
        pytest.skip("no results yet: make bench")
    assert table.main(["--check"]) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # Inductor's own
def test_compiled_variant_is_measured():
    cells = bench.matrix(("layer",), ("float32",), ((4, 8),))
    found = bench.run(cells, rounds=1, compiled=True, proofs=False)
    assert found["failures"] == []
    assert sum(row["variant"] == "compile" for row in found["rows"]) == 3
