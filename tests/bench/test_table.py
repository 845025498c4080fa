"""benchmarks/table.py: the tables of the pages are those of the results."""

import importlib.util
from pathlib import Path

import pytest

from addnorm import bench
from addnorm.bench import accuracy, fuses, labs, machine, summary

ROOT = Path(__file__).parent.parent.parent
PAGES = ("README.md", "docs/performance.md", "docs/numerics.md", "docs/streams.md", "docs/fusing.md", "docs/comparing.md",
         "docs/claims.md")  # fmt: skip


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location("table", ROOT / "benchmarks" / "table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made_up(cells, times, **more):
    """A document with the same medians in every cell."""
    rows = [{**cell._asdict(), "variant": name, "median_us": time} for cell in cells for name, time in times.items()]
    return {
        "schema": 2, "date": "2026-01-01T00:00:00+00:00", "complete": True, **machine.environment(),
        "peers": {"onnxruntime": "1.30"}, "threads": 2, "summary": summary.summarize(rows, 1e9), "facts": [],
        "accuracy": [], "failures": [], "rows": rows, **more,
    }  # fmt: skip


@pytest.fixture
def document():
    cells = bench.matrix(shapes=((130, 8), (128, 768)), threads=2) + bench.matrix(shapes=((128, 768),), threads=1)
    saved = {"name": "saved bytes, 512 x 768 float32, dropout 0.1", "norm": "layer", "value": 7.0, "torch": 14.0}
    times = {"eager": 30.0, "addnorm": 10.0, "compile": 15.0, "onnxruntime": 12.0, "add": 8.0}
    return made_up(cells, times, facts=[saved], accuracy=accuracy.table(("rms",), ("float16",)))


@pytest.fixture
def pages(table, document, tmp_path, monkeypatch):
    """The pages of the project, copied to where they may be changed, and a made-up document."""
    monkeypatch.setattr(table, "RESULTS", tmp_path / "functional.json")
    copies = {tmp_path / Path(name).name: sections for name, sections in zip(PAGES, table.PAGES.values(), strict=True)}
    for name, copy in zip(PAGES, copies, strict=True):
        copy.write_text((ROOT / name).read_text())
    monkeypatch.setattr(table, "PAGES", copies)
    bench.write(document, table.RESULTS)
    return {copy.name: copy for copy in copies}


def test_table_replaces_what_stands_between_the_comments_and_nothing_else(table, pages, capsys):
    before = {name: page.read_text() for name, page in pages.items()}
    assert table.main(["--check"]) == 1
    assert "README.md are not what the results say: run benchmarks/table.py" in capsys.readouterr().out
    assert {name: page.read_text() for name, page in pages.items()} == before
    assert table.main([]) == 0
    assert table.main(["--check"]) == 0
    for name, page in pages.items():
        outside = [part.split("-->", 1)[-1] for part in page.read_text().split("<!-- /bench:")]
        expected = [part.split("-->", 1)[-1] for part in before[name].split("<!-- /bench:")]
        # What follows a section, up to the comment that begins the next.
        assert [part.split("<!-- bench:")[0] for part in outside[1:]] == [
            part.split("<!-- bench:")[0] for part in expected[1:]
        ]
    readme = pages["README.md"].read_text()
    assert "| 130 x 8 | bfloat16 | **3.00** (10 / 30) |" in readme
    assert "| dropout, with backward: mean (x eager) | >= 3 |" in readme


def between(text, name):
    return text.split(f"<!-- bench:{name} -->")[1].split(f"<!-- /bench:{name} -->")[0]


def test_pages_have_a_section_for_each_new_job_and_peer(table, pages):
    table.main([])
    text = pages["performance.md"].read_text()
    training = between(text, "training")
    assert "dropout 0.1 | forward + backward, all options |" in training
    assert training.count("| 130 x 8 | float32 | **3.00** (10 / 30) | **3.00** (10 / 30) | **3.00** (10 / 30) |") == 2
    assert "in place, y and the stream |" in between(text, "inference")
    assert "| 130 x 8 | float32 | **1.25** (10 / 8) | **1.25** (10 / 8) |" in between(text, "add")
    assert "float32, dropout 0.1 | LayerNorm | 7 | 14 |" in between(text, "saved")
    peers = between(text, "peers")
    assert peers.count("| 130 x 8 | float32 | " + " | ".join(["**1.50**"] * 7) + " |") == 2
    assert peers.count(" | ".join(["**1.20**"] * 7)) == 2 * 2 * 2
    assert "onnxruntime: 1.30." in peers
    alone = between(text, "one-thread")
    assert "130 x 8" not in alone
    assert alone.count("| 128 x 768 | bfloat16 | **3.00** |") == 2
    assert "With 1 thread, for which there are no targets:" in between(text, "targets")
    numerics = between(pages["numerics.md"].read_text(), "accuracy")
    assert "| RMSNorm | float16 | addnorm |" in numerics
    assert "| RMSNorm | float16 | PyTorch |" in numerics


def of_fusing():
    """A document of fusing: one cell of each job, Inductor in the one without a proof."""
    infer, train = fuses.Cell("inference", 8, 128, "float32", 2), fuses.Cell("training", 8, 128, "bfloat16", 2)
    times = {infer: {"plain": 90e3, "frontend": 100e3, "inductor": 60e3}, train: {"plain": 3e5, "fused": 2e5}}
    rows = [
        {**cell._asdict(), "variant": name, "median_us": time, "share": 0.083}
        | ({"saved_bytes": 8e6 if name == "plain" else 6e6} if cell.job == "training" else {})
        for cell, found in times.items() for name, time in found.items()
    ]  # fmt: skip
    fusions = [{**train._asdict(), "variant": "fused", "seconds": 4.0}]
    head = {key: value for key, value in made_up([], {}).items() if key != "rows"}
    return {**head, "fusions": fusions, "summary": fuses.summarize(rows), "rows": rows}  # rows last: `bench.dumps`


def test_what_fusing_brings_is_a_line_a_cell(table, pages, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "FUSE", tmp_path / "fuse.json")
    table.main([])
    assert between(pages["fusing.md"].read_text(), "fuse") == between((ROOT / "docs" / "fusing.md").read_text(), "fuse")
    bench.write(of_fusing(), table.FUSE)
    assert table.main(["--check"]) == 1
    table.main([])
    text = between(pages["fusing.md"].read_text(), "fuse")
    assert "| 8 x 128 | inference | float32 | 90 | not proven |  | **0.90** | 8.3% |  |" in text
    assert "| 8 x 128 | forward + backward | bfloat16 | 300 | 200 | **1.50** |  | 8.3% | 8.0 → 6.0 |" in text
    assert "With Inductor, inference, 8 x 128 tokens, float32, times as fast: torch.compile alone **1.50**." in text
    assert "Missed: cells in which the fused model is proven (1). To fuse and to prove took 4 to 4 seconds." in text


def of_the_lab(seconds):
    """A document of the lab: two models, a step of the plain loop in 10 ms, one of the lab's in so many."""
    times = {"plain": 0.01, "addnorm": seconds, "recorded": 1.05 * seconds}
    rows = [
        {**cell._asdict(), "variant": name, "median_us": 1e6 * time, "first_us": 5e5 if name == "recorded" else 2e5}
        for cell in labs.cells()[:2] for name, time in times.items()
    ]  # fmt: skip
    head = {key: value for key, value in made_up([], {}).items() if key != "rows"}
    return {**head, "protocol": {"every": 20}, "losses": [], "summary": labs.summarize(rows), "rows": rows}


def test_the_labs_training_is_a_line_a_model(table, pages, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "LAB", tmp_path / "lab.json")
    table.main([])
    assert between(pages["comparing.md"].read_text(), "lab") == between((ROOT / "docs/comparing.md").read_text(), "lab")
    bench.write(of_the_lab(0.008), table.LAB)
    assert table.main(["--check"]) == 1
    table.main([])
    text = between(pages["comparing.md"].read_text(), "lab")
    assert "| `post_ln` | 12 x 64 | 16 x 64 | 100 | 125 | **1.25** | **+5.0%** | +0.30 s |" in text
    assert text.count("| 12 x 64 |") == 2
    assert "Both targets are met (0.95 times as fast at least, recording 10% at most)." in text
    bench.write(of_the_lab(0.02), table.LAB)
    table.main([])
    text = between(pages["comparing.md"].read_text(), "lab")
    assert "Missed: post_ln, 12 layers, d = 64: times as fast as plain PyTorch (0.5); pre_ln, 12" in text


def test_sections_without_results_are_empty(table, pages):
    cells = bench.matrix(("layer",), jobs=bench.PLAIN, shapes=((128, 768),), threads=2)
    bench.write(made_up(cells, {"eager": 30.0, "addnorm": 10.0, "add": 5.0}, peers={}), table.RESULTS)
    assert table.main([]) == 0
    text = pages["performance.md"].read_text()
    for name in ("saved", "add", "peers", "one-thread"):
        assert between(text, name) == "\n", name
    assert "dropout" not in between(text, "training")
    assert between(pages["numerics.md"].read_text(), "accuracy") == "\n"


def test_table_says_where_it_belongs(table, tmp_path):
    with pytest.raises(SystemExit, match="add the two lines"):
        table.replaced(tmp_path / "page.md", "# no place for it", {"speed": "text"})


def test_pages_have_the_tables_of_the_results(table):
    if not table.RESULTS.exists():
        pytest.skip("no results yet: make bench")
    assert table.main(["--check"]) == 0
