"""Tests of benchmarks/table.py: the tables of the pages match the results."""

import shutil

import pytest

from addnorm import bench
from addnorm.bench import accuracy, environment, harness, operation
from addnorm.bench.harness import Case
from support.loading import ROOT, load


@pytest.fixture(scope="module")
def table():
    return load("benchmarks/table.py")


def document_of(cases, times, **more):
    """Return a document with the same medians in every case."""
    rows = [case.row(variant=name, median_us=time) for case in cases for name, time in times.items()]
    return {
        "schema": 2, "date": "2026-01-01T00:00:00+00:00", "complete": True, **environment.describe(),
        "peers": {"onnxruntime": "1.30"}, "threads": 2, "summary": operation.summarize(rows, 1e9), "facts": [],
        "accuracy": [], "failures": [], "rows": rows, **more,
    }  # fmt: skip


@pytest.fixture
def functional():
    cases = bench.matrix(shapes=((130, 8), (128, 768)), threads=2) + bench.matrix(shapes=((128, 768),), threads=1)
    saved = {"name": "saved bytes, 512 x 768 float32, dropout 0.1", "norm": "layer", "value": 7.0, "torch": 14.0}
    times = {"eager": 30.0, "addnorm": 10.0, "compile": 15.0, "onnxruntime": 12.0, "add": 8.0}
    return document_of(cases, times, facts=[saved], accuracy=accuracy.table(("rms",), ("float16",)))


@pytest.fixture
def written(table, tmp_path):
    """Return a function that writes other results, generates their pages, and returns the text between two comments."""
    for name in table.PAGES:
        page = tmp_path / name
        page.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, page)

    def write(**documents):
        for name, document in documents.items():
            harness.write(document, tmp_path / "results" / f"{name}.json")
        assert table.main(["--check"], tmp_path, tmp_path / "results") == 1
        assert table.main([], tmp_path, tmp_path / "results") == 0
        assert table.main(["--check"], tmp_path, tmp_path / "results") == 0

    def between(page, section):
        text = (tmp_path / page).read_text()
        return text.split(f"<!-- bench:{section} -->")[1].split(f"<!-- /bench:{section} -->")[0]

    return write, between


def test_pages_match_the_committed_results(table):
    assert table.main(["--check"]) == 0


def test_check_changes_nothing_and_names_the_script(table, tmp_path, functional, capsys):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path / "README.md")
    harness.write(functional, tmp_path / "results" / "functional.json")
    before = {path: path.read_text() for path in tmp_path.rglob("*.md")}
    assert table.main(["--check"], tmp_path, tmp_path / "results") == 1
    assert "README.md is not what the results say: run benchmarks/table.py" in capsys.readouterr().out
    assert {path: path.read_text() for path in before} == before


def test_functional_sections(written, functional):
    write, between = written
    write(functional=functional)
    readme = between("README.md", "speed")
    assert "| 130 x 8 | bfloat16 | **3.00** (10.0 / 30.0) |" in readme
    assert "| dropout, with backward: mean (x eager) | >= 3 |" in readme
    page = "docs/performance.md"
    training = between(page, "training")
    assert "dropout 0.1 | forward + backward, all options |" in training
    line = "| 130 x 8 | float32 | **3.00** (10.0 / 30.0) | **3.00** (10.0 / 30.0) | **3.00** (10.0 / 30.0) |"
    assert training.count(line) == 2
    assert "in place, y and the stream |" in between(page, "inference")
    assert "| 130 x 8 | float32 | **1.25** (10.0 / 8.00) | **1.25** (10.0 / 8.00) |" in between(page, "add")
    assert "float32, dropout 0.1 | LayerNorm | 7.00 | 14.0 |" in between(page, "saved")
    peers = between(page, "peers")
    assert peers.count("| 130 x 8 | float32 | " + " | ".join(["**1.50**"] * 7) + " |") == 2
    assert peers.count(" | ".join(["**1.20**"] * 7)) == 2 * 2 * 2
    assert "onnxruntime: 1.30." in peers
    alone = between(page, "one-thread")
    assert "130 x 8" not in alone
    assert alone.count("| 128 x 768 | bfloat16 | **3.00** |") == 2
    assert "With 1 thread, for which there are no targets:" in between(page, "targets")
    numerics = between("docs/numerics.md", "accuracy")
    assert "| RMSNorm | float16 | addnorm |" in numerics
    assert "| RMSNorm | float16 | PyTorch |" in numerics


def test_functional_sections_without_rows_are_empty(written):
    write, between = written
    cases = bench.matrix(("layer",), jobs=bench.PLAIN, shapes=((128, 768),), threads=2)
    write(functional=document_of(cases, {"eager": 30.0, "addnorm": 10.0, "add": 5.0}, peers={}))
    for name in ("saved", "add", "peers", "one-thread"):
        assert between("docs/performance.md", name) == "\n", name
    assert "dropout" not in between("docs/performance.md", "training")
    assert between("docs/numerics.md", "accuracy") == "\n"


def test_fuse_section_has_a_line_a_case(written):
    write, between = written
    infer = Case(job="inference", batch=8, tokens=128, dtype="float32", threads=2)
    train = infer.but(job="training", dtype="bfloat16")
    times = {infer: {"plain": 90e3, "frontend": 100e3, "inductor": 60e3}, train: {"plain": 3e5, "fused": 2e5}}
    rows = [
        case.row(variant=name, median_us=time, share=0.083)
        | ({"saved_bytes": 8e6 if name == "plain" else 6e6} if case == train else {})
        for case, found in times.items() for name, time in found.items()
    ]  # fmt: skip
    summary = load("benchmarks/bench_fuse.py").summarize({"rows": rows})
    document = document_of([], {}, fusions=[train.row(variant="fused", seconds=4.0)], summary=summary)
    write(fuse={**document, "rows": rows})
    text = between("docs/fusing.md", "fuse")
    assert "| 8 x 128 | inference | float32 | 90.0 | not proven |  | **0.90** | 8.3% |  |" in text
    assert "| 8 x 128 | forward + backward | bfloat16 | 300 | 200 | **1.50** |  | 8.3% | 8.0 → 6.0 |" in text
    assert "With Inductor, inference, 8 x 128 tokens, float32, times as fast: torch.compile alone **1.50**." in text
    assert (
        "Missed: cells in which the fused model is proven (1). Fusing, with its proof, took 4.00 to 4.00 seconds."
        in text
    )


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [(0.008, "Both targets are met (0.95 times as fast at least, recording 10% at most)."),
     (0.02, "Missed: post_ln, 12 layers, d = 64: times as fast as plain PyTorch (0.500); pre_ln, 12")],
)  # fmt: skip
def test_lab_section_has_a_line_a_model(written, seconds, verdict):
    write, between = written
    script = load("benchmarks/bench_lab.py")
    times = {"plain": 0.01, "addnorm": seconds, "recorded": 1.05 * seconds}
    rows = [
        case.row(variant=name, median_us=1e6 * time, first_us=5e5 if name == "recorded" else 2e5)
        for case in script.cases(1)[:2] for name, time in times.items()
    ]  # fmt: skip
    write(lab=document_of([], {}, protocol={"every": 20}, summary=script.summarize({"rows": rows})) | {"rows": rows})
    text = between("docs/comparing.md", "lab")
    fast = {0.008: "125 | **1.25**", 0.02: "50.0 | **0.50**"}[seconds]
    assert f"| `post_ln` | 12 x 64 | 16 x 64 | 100 | {fast} | **+5.0%** | +0.30 s |" in text
    assert text.count("| 12 x 64 |") == 2
    assert verdict in text
