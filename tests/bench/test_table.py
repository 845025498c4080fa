"""Tests of benchmarks/table.py: other results give other tables on the pages."""

import shutil

import pytest

from addnorm import bench
from addnorm.bench import accuracy, environment, gpu, harness, operation
from addnorm.bench.harness import Case
from support.loading import ROOT, load


@pytest.fixture(scope="module")
def table():
    return load("benchmarks/table.py")


def document_of(cases, times, **more):
    """Return a document with the same medians in every case; eager's quartiles are 10 % below and above."""
    rows = [
        case.row(variant=name, median_us=time, q1_us=(1 - spread) * time, q3_us=(1 + spread) * time)
        for case in cases for name, time in times.items() for spread in [0.1 if name == "eager" else 0.0]
    ]  # fmt: skip
    return {
        "schema": 2, "date": "2026-01-01T00:00:00+00:00", "complete": True, **environment.describe(),
        "peers": {"onnxruntime": "1.30"}, "threads": 2, "load": 0.2, "summary": operation.summarize(rows, 1e9), "facts": [],
        "accuracy": [], "failures": [], "rows": rows, **more,
    }  # fmt: skip


def sharp(time):
    """Return the columns of a time without spread."""
    return dict.fromkeys(("median_us", "q1_us", "q3_us"), time)


@pytest.fixture
def write(table, tmp_path, capsys):
    """Return a function that writes other results and their pages, and returns the section of a page."""
    for name in table.PAGES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)

    def write(**documents):
        for name, document in documents.items():
            harness.write(document, tmp_path / "results" / f"{name}.json")
        before = {path: path.read_text() for path in tmp_path.rglob("*.md")}
        assert table.main(["--check"], tmp_path, tmp_path / "results") == 1
        assert "is not what the results say: run benchmarks/table.py" in capsys.readouterr().out
        assert {path: path.read_text() for path in before} == before
        assert table.main([], tmp_path, tmp_path / "results") == 0
        assert table.main(["--check"], tmp_path, tmp_path / "results") == 0
        return lambda page, section: (
            (tmp_path / page).read_text().split(f"<!-- bench:{section} -->")[1].split(f"<!-- /bench:{section} -->")[0]
        )

    return write


def test_functional_sections(write):
    cases = bench.matrix(shapes=((130, 8), (128, 768), (512, 768)), threads=2) + bench.matrix(
        shapes=((128, 768),), threads=1
    )
    saved = {"name": "saved bytes, 512 x 768 float32, dropout 0.1", "norm": "layer", "value": 7.0, "torch": 14.0}
    times = {"eager": 30.0, "addnorm": 10.0, "compile": 15.0, "onnxruntime": 12.0, "add": 8.0}
    errors = [
        {"norm": "rms", "dtype": "float16", "variant": name, **dict.fromkeys(accuracy.COLUMNS, 1e-4)} for name in ("addnorm", "eager")
    ]  # fmt: skip
    section = write(functional=document_of(cases, times, facts=[saved], accuracy=errors))
    speed = section("README.md", "speed")
    assert "| 512 x 768 | bfloat16 | **3.00** ±10 % (10.0 / 30.0) |" in speed
    assert "130 x 8" not in speed, "only some sizes"
    assert "load 0.2 before it began. " in speed
    page = "docs/performance.md"
    training = section(page, "training")
    assert "dropout 0.1 | forward + backward, all options |" in training
    line = "| 130 x 8 | float32 | **3.00** ±10 % (10.0 / 30.0) | **3.00** ±10 % (10.0 / 30.0) | **3.00** ±10 % (10.0 / 30.0) |"
    assert training.count(line) == 2
    assert "in place, y and the stream |" in section(page, "inference")
    assert "float32, dropout 0.1 | LayerNorm | 7.00 | 14.0 |" in section(page, "saved")
    peers = section(page, "peers")
    assert peers.count("| 130 x 8 | float32 | " + " | ".join(["**1.50** ±0 %"] * 7) + " |") == 2
    assert peers.count(" | ".join(["**1.20** ±0 %"] * 7)) == 2 * 2 * 3
    assert "onnxruntime: 1.30." in peers
    alone = section(page, "one-thread")
    assert "130 x 8" not in alone
    assert alone.count("| 128 x 768 | bfloat16 | **3.00** ±10 % |") == 2
    assert "With 1 thread, for which there are no targets:" in section(page, "targets")
    assert section(page, "gpu").strip() == gpu.section(None)
    numerics = section("docs/numerics.md", "accuracy")
    assert "| RMSNorm | float16 | addnorm |" in numerics
    assert "| RMSNorm | float16 | PyTorch |" in numerics


def test_large_sizes_need_a_known_allocator_state(write):
    large = bench.matrix(("layer",), ("float32",), jobs=("forward",), shapes=((512, 768), (4096, 4096)), threads=2)
    unknown = document_of(large, {"eager": 30.0, "addnorm": 10.0, "add": 8.0})
    section = write(functional=unknown)
    assert "512 x 768" in section("docs/performance.md", "inference")
    assert "4096 x 4096" not in section("docs/performance.md", "inference")
    assert section("docs/performance.md", "states") == "\n"
    for row in unknown["rows"]:
        if row["rows"] == 4096:
            row |= {"allocator": "fresh", "faults": 16384.0, "kept_median_us": 6.0, "kept_faults": 0.0}
    section = write(functional=unknown)
    assert "| 4096 x 4096 | float32 | **3.00** ±10 % (10.0 / 30.0) |" in section("docs/performance.md", "inference")
    states = "**1.00** (6.00 / 6.00; 0 / 0) | **3.00** (10.0 / 30.0; 16384 / 16384) |"
    assert f"| 4096 x 4096 | float32 | LayerNorm | forward, y alone | {states}" in section(
        "docs/performance.md", "states"
    )


def test_functional_sections_without_rows_are_empty(write):
    cases = bench.matrix(("layer",), jobs=bench.PLAIN, shapes=((128, 768),), threads=2)
    section = write(functional=document_of(cases, {"eager": 30.0, "addnorm": 10.0, "add": 5.0}, peers={}))
    for name in ("saved", "peers", "one-thread"):
        assert section("docs/performance.md", name) == "\n", name
    assert "dropout" not in section("docs/performance.md", "training")
    assert section("docs/numerics.md", "accuracy") == "\n"


@pytest.mark.parametrize(
    ("seconds", "fast", "verdict"),
    [(0.008, "125 | **1.25** ±0 %", "Both targets are met (0.95 times as fast at least, recording 10% at most)."),
     (0.02, "50.0 | **0.50** ±0 %", "Missed: post_ln, 12 layers, d = 64: times as fast as plain PyTorch (0.500); pre_ln, 12")],
)  # fmt: skip
def test_sections_of_models_have_a_line_a_case(write, seconds, fast, verdict):
    lab = load("benchmarks/bench_lab.py")
    times = {"plain": 0.01, "addnorm": seconds, "recorded": 1.05 * seconds}
    lab_rows = [
        case.row(variant=name, **sharp(1e6 * time), first_us=5e5 if name == "recorded" else 2e5)
        for case in lab.cases(1)[:2] for name, time in times.items()
    ]  # fmt: skip
    infer = Case(job="inference", batch=8, tokens=128, dtype="float32", threads=2)
    train = infer.but(job="training", dtype="bfloat16")
    times = {
        infer: {"plain": 90e3, "frontend": 100e3, "inductor": 60e3},
        train: {"plain": 3e5, "frontend": 2.5e5, "fused": 2e5},
    }
    fuse_rows = [
        case.row(variant=name, **sharp(time), share=0.083)
        | ({"saved_bytes": 8e6 if name == "plain" else 6e6} if case == train else {})
        for case, by_name in times.items() for name, time in by_name.items()
    ]  # fmt: skip
    summary = load("benchmarks/bench_fuse.py").summarize({"rows": fuse_rows})
    document = document_of([], {}, fusions=[train.row(variant="fused", seconds=4.0)], protocol={"every": 20})
    section = write(
        lab={**document, "summary": lab.summarize({"rows": lab_rows}), "rows": lab_rows},
        fuse={**document, "summary": summary, "rows": fuse_rows},
    )
    text = section("docs/comparing.md", "lab")
    assert f"| `post_ln` | 12 x 64 | 16 x 64 | 100 | {fast} | **+5.0%** | +0.30 s |" in text
    assert text.count("| 12 x 64 |") == 2
    assert verdict in text
    text = section("docs/fusing.md", "fuse")
    assert "| 8 x 128 | inference | float32 | 90.0 | not proven |  | **0.90** ±0 % |  | 8.3% |  |" in text
    assert (
        "| 8 x 128 | forward + backward | bfloat16 | 300 | 200 | **1.50** ±0 % | **1.20** ±0 % | **1.25** ±0 % | 8.3% | 8.0 → 6.0 |"
        in text
    )
    assert (
        "Fusing alone can gain 1.09 to 1.09 times at most, 1 / (1 - share). A measured ratio beyond its bound is noise: forward + backward, "
        "8 x 128 tokens, bfloat16."
    ) in text
    assert (
        "With Inductor, inference, 8 x 128 tokens, float32, times as fast: torch.compile alone **1.50** ±0 %." in text
    )
    assert (
        "Missed: cells in which the fused model is proven (1). Fusing, with its proof, took 4.00 to 4.00 seconds."
        in text
    )
