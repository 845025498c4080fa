"""Tests of the CPU benchmark on tiny sizes: variants, document, targets, tables, command. No test asserts a time."""

import io
import json
import math
import sys
import types

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from addnorm import bench
from addnorm.bench import accuracy, cases, facts, onnx_peer, operation, timing
from addnorm.bench.cases import FIELDS
from addnorm.bench.harness import Case, by_case
from addnorm.bench.targets import Target
from addnorm.cli import main

TINY = ((3, 8), (130, 8))
SMALL = bench.matrix(shapes=((5, 16),))
MOVED = {
    "forward": 3, "forward_stream": 4, "forward_backward": 8, "dropout": 9, "everything": 10, "in_place": 4, "reuse": 3,
}  # fmt: skip


def shorten(patch):
    patch.setattr(timing, "SEGMENT_MS", 0.01)
    patch.setattr(facts, "import_ms", lambda: 1.0)
    patch.setattr(accuracy, "SHAPE", (64, 32))
    patch.setattr(onnx_peer, "applies", lambda case: False)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Make the timing loops as short as possible, without timed imports and without onnxruntime."""
    shorten(monkeypatch)


def case(norm, job, rows=3, d=8, dtype="float32"):
    return Case(norm=norm, job=job, rows=rows, d=d, dtype=dtype, threads=1)


def chosen():
    """Choose two shapes on two threads, and one of them on one thread."""
    return bench.matrix(shapes=TINY, threads=2) + bench.matrix(("layer",), ("float32",), TINY[:1], threads=1)


@pytest.fixture(scope="module")
def document():
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        return bench.run(chosen(), rounds=3, compiled=False, proofs=False)


# Variants.


@pytest.mark.parametrize("case", SMALL, ids=lambda case: "-".join(map(str, vars(case).values())))
def test_variants_compute_the_same(case, monkeypatch):
    monkeypatch.undo()  # onnxruntime too, where it is installed
    monkeypatch.setattr(cases, "DROPOUT", 0.0)  # the masks differ; without dropout everything else is equal
    results = {}
    for name in operation.variants(case, compiled=False)[0]:
        calls, args = operation.variants(case, compiled=False)  # new tensors: in-place calls change them
        results[name] = calls[name](*args)
    eager = results.pop("eager")
    del results["add"]
    assert set(results) == {"addnorm"} | ({"onnxruntime"} if onnx_peer.applies(case) else set())
    for found in results.values():
        pairs = zip(eager, found, strict=True) if isinstance(eager, tuple) else [(eager, found)]
        for theirs, ours in pairs:
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=5e-2 if case.dtype == "bfloat16" else 1e-5)
    counts = {"forward_backward": 4, "dropout": 4, "everything": 6}
    if case.job in counts:
        assert len(eager) == counts[case.job] - (case.norm == "rms")


@pytest.mark.parametrize(("norm", "job"), [("layer", "dropout"), ("rms", "everything")])
def test_dropout_drops_a_tenth_of_the_branch(norm, job):
    calls, args = operation.variants(case(norm, job, 256, 64), compiled=False)
    for name in ("eager", "addnorm"):
        dbranch = calls[name](*args)[1]
        assert (dbranch == 0).double().mean().item() == pytest.approx(cases.DROPOUT, abs=0.02), name


@pytest.mark.parametrize(("norm", "dtype"), [("layer", "bfloat16"), ("rms", "float32")])
def test_in_place_calls_keep_ordinary_values(norm, dtype):
    calls, args = operation.variants(case(norm, "in_place", 2, 64, dtype), compiled=False)
    x, s = args[:2]
    before = x.clone()
    for turn in range(20_000):
        y, z = calls["addnorm"](*args)
        if turn in (0, 19_999):
            assert (y.data_ptr(), z.data_ptr()) == (s.data_ptr(), x.data_ptr())
            assert not ((s.abs() < torch.finfo(s.dtype).tiny) & (s != 0)).any()
    assert torch.isfinite(x).all()
    assert torch.isfinite(s).all()
    assert (x - before).abs().max() < 6  # the first branch, then almost nothing
    assert 0.5 < x.std() < 3


@pytest.mark.parametrize("norm", bench.NORMS)
def test_reuse_writes_into_the_given_tensor(norm):
    calls, args = operation.variants(case(norm, "reuse"), compiled=False)
    args[4].fill_(math.nan)
    y = calls["addnorm"](*args)
    assert y.data_ptr() == args[4].data_ptr()
    torch.testing.assert_close(y, calls["eager"](*args))


def test_whole_has_some_shapes_on_one_thread():
    found = bench.whole(threads=2)
    assert found[: len(bench.matrix())] == bench.matrix(threads=2)
    rest = found[len(bench.matrix()) :]
    assert {(case.rows, case.d, case.threads) for case in rest} == {(128, 768, 1), (2048, 1024, 1)}
    assert {case.job for case in rest} == set(bench.JOBS)
    assert bench.whole(threads=1) == bench.matrix(threads=1)


# onnxruntime.


def test_onnxruntime_status_names_the_missing_package(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(onnx_peer, "find_spec", lambda name: None if name == "onnx" else name)
    assert onnx_peer.status() == "onnx not installed"
    assert not any(map(onnx_peer.applies, SMALL))


def test_onnxruntime_applies_to_float32_without_gradients(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(onnx_peer, "status", lambda: "1.30")
    applies = {(case.job, case.dtype) for case in SMALL if onnx_peer.applies(case)}
    assert applies == {(job, "float32") for job in ("forward", "forward_stream", "reuse")}
    monkeypatch.setitem(sys.modules, "onnxruntime", types.ModuleType("onnxruntime"))
    with pytest.raises(AttributeError):
        onnx_peer.bound(SMALL[0], [])


# The document.


def test_peers_that_fail_are_recorded(monkeypatch):
    def broken(*args, **options):
        def call(*tensors):
            raise RuntimeError("no compiler here")

        return call

    def refused(case, args):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(onnx_peer, "applies", lambda case: case.job == "forward")
    monkeypatch.setattr(onnx_peer, "bound", refused)
    monkeypatch.setattr(operation, "PAUSE_SECONDS", 0.0)
    found = bench.run(bench.matrix(("layer",), ("float32",), ((2, 4),)), rounds=1, compiled=True, proofs=False)
    assert found["complete"]
    errors = [(one["variant"], one["error"]) for one in found["failures"]]
    assert errors.count(("compile", "RuntimeError: no compiler here")) == 5
    assert errors.count(("onnxruntime", "RuntimeError: no such operator")) == 1
    assert {one["job"] for one in found["failures"]} == set(bench.JOBS) - {"in_place", "reuse"}
    assert {row["variant"] for row in found["rows"]} == {"eager", "addnorm", "add"}
    screen = Console(record=True, width=100, file=io.StringIO())
    bench.show(found, screen)
    assert "no compiler here" in screen.export_text()


def test_document_has_a_row_for_each_variant_and_case(document):
    parsed = json.loads(bench.dumps(document))
    assert (parsed["schema"], parsed["complete"], parsed["threads"]) == (2, True, 2)
    assert parsed["peers"] == {"onnxruntime": onnx_peer.status()}
    found = by_case(parsed["rows"], FIELDS)
    assert [*found] == chosen()
    for case, rows in found.items():
        assert set(rows) == {"eager", "addnorm", "add"}
        size = case.rows * case.d * (4 if case.dtype == "float32" else 2)
        assert (rows["addnorm"]["bytes"], rows["add"]["bytes"]) == (MOVED[case.job] * size, 3 * size)
        assert rows["eager"]["ratio_to_eager"] == rows["add"]["share_of_add_bandwidth"] == 1.0
        rate = {name: one["bytes"] / one["median_us"] for name, one in rows.items()}
        assert rows["addnorm"]["share_of_add_bandwidth"] == pytest.approx(rate["addnorm"] / rate["add"])
    for row in parsed["rows"]:
        assert row["q1_us"] <= row["median_us"] <= row["q3_us"]
        assert row["repeats"] >= 1
        assert row["rounds"] == 3


def test_each_case_runs_with_its_threads_and_compile_with_all(threads, monkeypatch):
    found = []
    threads(2)

    def measure(case, *, rounds, compiled):
        found.append((case.threads, torch.get_num_threads(), compiled))
        return {"rows": [], "failures": []}

    monkeypatch.setattr(operation, "measure", measure)
    bench.run([chosen()[0], chosen()[-1], chosen()[1]], proofs=False)
    assert found == [(2, 2, True), (1, 1, False), (2, 2, True)]
    assert torch.get_num_threads() == 2


def test_interrupt_keeps_the_finished_cases(monkeypatch):
    some = bench.matrix(("layer",), ("float32",), TINY)
    real, seen = operation.measure, []

    def interrupted(case, **options):
        seen.append(case)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return real(case, **options)

    monkeypatch.setattr(operation, "measure", interrupted)
    found = bench.run(some, rounds=1, compiled=False, proofs=False)
    assert not found["complete"]
    assert [*by_case(found["rows"], FIELDS)] == some[:2]


# Targets.


def rows_of(times, some):
    """Return rows in which every case has the same medians."""
    return [case.row(variant=name, median_us=time) for case in some for name, time in times.items()]


def test_summary_has_every_goal_over_its_cases():
    times = {"eager": 30.0, "addnorm": 10.0, "compile": 8.0, "onnxruntime": 20.0, "add": 5.0}
    summary = operation.summarize(rows_of(times, bench.matrix(("layer",))), 32 * 1024**2)
    found = {
        (one["name"], one["versus"]): (one["cells"], round(one["value"], 9), one["target"], one["met"])
        for one in summary
    }
    assert found == {
        ("forward, 128+ rows, under 32 MB: mean", "x eager"): (16, 3.0, 2.8, True),
        ("forward, one row: mean", "x eager"): (8, 3.0, 1.25, True),
        ("forward, over 32 MB: lowest", "x eager"): (4, 3.0, 0.95, True),
        ("with backward, 128+ rows, under 32 MB: mean", "x eager"): (8, 3.0, 2.5, True),
        ("with backward: lowest", "x eager"): (14, 3.0, 0.95, True),
        ("without options: lowest", "x eager"): (42, 3.0, 0.95, True),
        ("without options, under 32 MB: lowest", "x compile"): (36, 0.8, 0.95, False),
        ("y alone, float32, 128+ rows, in cache: highest", "x add's time"): (3, 2.0, 1.8, False),
        ("dropout, with backward: mean", "x eager"): (14, 3.0, 3.0, True),
        ("all options, with backward: mean", "x eager"): (14, 3.0, 4.0, False),
        ("in place, 4096 x 4096: lowest", "x eager"): (2, 3.0, 4.0, False),
        ("y into given memory, 4096 x 4096: highest", "x add's time"): (2, 2.0, 1.3, False),
        ("dropout and all options: mean", "x compile"): (28, 0.8, None, None),
        ("forward, float32: mean", "x onnxruntime"): (28, 2.0, None, None),
        ("y into given memory, float32: mean", "x onnxruntime"): (14, 2.0, None, None),
    }


def test_summary_has_no_targets_for_fewer_threads():
    many, one = (bench.matrix(("rms",), ("float32",), ((128, 768),), threads=count) for count in (2, 1))
    rows = rows_of({"eager": 40.0, "addnorm": 10.0}, many) + rows_of({"eager": 20.0, "addnorm": 10.0}, one)
    found = {(found["name"], found["threads"]): found for found in operation.summarize(rows, 1e9)}
    name = "dropout, with backward: mean"
    assert [(found[name, count]["value"], found[name, count]["met"]) for count in (2, 1)] == [
        (pytest.approx(4.0), True), (pytest.approx(2.0), None),
    ]  # fmt: skip
    assert found["in place, 4096 x 4096: lowest", 2]["value"] is None  # a target without a measurement is listed
    assert ("in place, 4096 x 4096: lowest", 1) not in found


def test_summary_takes_geometric_means_and_extremes():
    one, two = bench.matrix(("rms",), ("float32",), ((128, 768), (512, 768)))[:2]
    rows = rows_of({"eager": 20.0, "addnorm": 10.0, "add": 10.0}, [one])
    rows += rows_of({"eager": 80.0, "addnorm": 10.0, "add": 5.0}, [two])
    found = {one["name"]: one["value"] for one in operation.summarize(rows, 1e9)}
    assert found["forward, 128+ rows, under 32 MB: mean"] == pytest.approx(4.0)
    assert found["without options: lowest"] == 2.0
    assert found["y alone, float32, 128+ rows, in cache: highest"] == 2.0


# Tables and the command.


def test_tables_fit_100_columns(document):
    rows = [*document["rows"]]
    for peer in ("compile", "onnxruntime"):
        rows += [{**row, "variant": peer} for row in document["rows"] if row["variant"] == "eager"]
    proofs = {
        "summary": operation.summarize(rows, 1e9),
        "facts": facts.facts(("rms",), ("bfloat16",)) + facts.of_accuracy(accuracy.table(("rms",))),
        "accuracy": accuracy.table(),
    }
    screen = Console(record=True, width=100, file=io.StringIO())
    bench.show({**document, "rows": rows, **proofs, "load": 1e3, "complete": False}, screen)
    text = screen.export_text()
    for name in ("LayerNorm: forward, y and the stream, 2 threads", "LayerNorm: in place, y and the stream, 1 thread",
                 "RMSNorm: forward + backward, dropout 0.1, 2 threads", "x onnx", "with backward: lowest, 1 thread",
                 "saved bytes, 512 x 768 bfloat16, all options", "relative error against float64", "The machine was busy",
                 "Interrupted:"):  # fmt: skip
        assert name in text, name
    assert "…" not in text
    assert all(len(line.rstrip()) <= 100 for line in text.splitlines())


def test_command_writes_json_alone_to_stdout(monkeypatch):
    monkeypatch.setattr(bench, "QUICK_SHAPES", ((2, 4),))
    result = CliRunner().invoke(main, ["bench", "--quick", "--rounds", "1", "--norm", "rms", "--json", "-"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {row["norm"] for row in found["rows"]} == {"rms"}
    assert found["protocol"]["rounds"] == 1
    assert {(one["norm"], one["dtype"]) for one in found["accuracy"]} == {("rms", dtype) for dtype in accuracy.DTYPES}


def test_command_exits_with_3_for_a_failed_proof(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "QUICK_SHAPES", ((2, 4),))
    monkeypatch.setattr(facts, "facts", lambda *_: [Target("false", "==", 2.0).row(1.0, "layer", torch=2.0)])
    result = CliRunner().invoke(main, ["bench", "--quick", "--dtype", "float32", "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 3, result.output
    assert json.loads((tmp_path / "out.json").read_text())["facts"][0]["met"] is False


@pytest.mark.parametrize("words", [["--norm", "batch"], ["--dtype", "int8"], ["--threads", "0"], ["--rounds", "x"]])
def test_command_refuses_wrong_arguments_with_2(words):
    assert CliRunner().invoke(main, ["bench", *words]).exit_code == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # Inductor's own cache
def test_compiled_variant_is_measured():
    some = bench.matrix(("layer",), ("float32",), ((4, 8),))
    found = bench.run(some, rounds=1, compiled=True, proofs=False)
    assert found["failures"] == []
    assert sum(row["variant"] == "compile" for row in found["rows"]) == 5
