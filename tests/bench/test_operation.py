"""Tests of the CPU benchmark on tiny sizes: variants, document, targets, tables, command."""

import io
import json
import sys
import types

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from addnorm import bench
from addnorm.bench import accuracy, cases, facts, onnx_peer, operation
from addnorm.bench.cases import DTYPES, FIELDS, JOBS
from addnorm.bench.harness import Case, by_case
from addnorm.bench.targets import Target
from addnorm_cli.group import addnorm as main
from support.pairwise import pairwise, product

MOVED = {
    "forward": 3, "forward_stream": 4, "forward_backward": 8, "dropout": 9, "everything": 10, "in_place": 4, "reuse": 3,
}  # fmt: skip


def case(norm, job, rows=3, d=8, dtype="float32", threads=1):
    return Case(norm=norm, job=job, rows=rows, d=d, dtype=dtype, threads=threads)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(accuracy, "SHAPE", (64, 32))
    monkeypatch.setattr(operation, "PAUSE_SECONDS", 0.0)


# Variants.


@pytest.mark.parametrize(("norm", "job", "dtype"), product([*bench.NORMS], [*JOBS], [*DTYPES]))
def test_variants_compute_the_same(norm, job, dtype, monkeypatch):
    monkeypatch.setattr(cases, "DROPOUT", 0.0)  # the masks differ; without dropout everything else is equal
    item, results = case(norm, job, 5, 16, dtype), {}
    for name in operation.variants(item, compiled=False)[0]:
        calls, args = operation.variants(item, compiled=False)  # new tensors: in-place calls change them
        results[name] = calls[name](*args)
        if (name, job) == ("addnorm", "reuse"):
            assert results[name].data_ptr() == args[4].data_ptr()
    eager = results.pop("eager")
    del results["add"]
    assert results.keys() == {"addnorm"} | ({"onnxruntime"} if onnx_peer.applies(item) else set())
    for result in results.values():
        torch.testing.assert_close(result, eager, rtol=2e-2, atol=5e-2 if dtype == "bfloat16" else 1e-5)
    outputs = {"forward_backward": 4, "dropout": 4, "everything": 6}.get(job)
    assert outputs is None or len(eager) == outputs - (norm == "rms")


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
    for _ in range(5_000):
        y, z = calls["addnorm"](*args)
    assert (y.data_ptr(), z.data_ptr()) == (s.data_ptr(), x.data_ptr())
    assert not ((s.abs() < torch.finfo(s.dtype).tiny) & (s != 0)).any()
    assert s.isfinite().all()
    assert (x - before).abs().max() < 6  # the first branch, then almost nothing
    assert 0.5 < x.std() < 3


def test_onnxruntime_applies_to_float32_without_gradients(monkeypatch):
    monkeypatch.setattr(onnx_peer, "find_spec", lambda name: None if name == "onnx" else name)
    assert onnx_peer.status() == "onnx not installed"
    tiny = bench.matrix(shapes=((5, 16),))
    assert not any(map(onnx_peer.applies, tiny))
    monkeypatch.setattr(onnx_peer, "status", lambda: "1.30")
    applies = {(item.job, item.dtype) for item in tiny if onnx_peer.applies(item)}
    assert applies == {(job, "float32") for job in ("forward", "forward_stream", "reuse")}
    monkeypatch.setitem(sys.modules, "onnxruntime", types.ModuleType("onnxruntime"))
    with pytest.raises(AttributeError):
        onnx_peer.bound(tiny[0], [])


# The document.

MATRIX = [
    case(norm, job, rows, 8, dtype, 2)
    for norm, job, dtype, rows in pairwise([*bench.NORMS], [*JOBS], [*DTYPES], (3, 130))
]
MATRIX += [case("layer", "in_place"), case("layer", "forward_backward")]  # on one thread


@pytest.fixture(scope="module")
def document():
    """Return the document of a run of every job; tests must not change it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_peer, "applies", lambda case: False)
        return bench.run(MATRIX, rounds=3, compiled=False, proofs=False)


def test_document_has_a_row_for_each_variant_and_case(document):
    document = json.loads(bench.dumps(document))
    assert (document["schema"], document["complete"], document["threads"]) == (2, True, 2)
    assert document["peers"] == {"onnxruntime": onnx_peer.status()}
    assert [*by_case(document["rows"], FIELDS)] == MATRIX
    for item, rows in by_case(document["rows"], FIELDS).items():
        assert rows.keys() == {"eager", "addnorm", "add"}
        size = item.rows * item.d * DTYPES[item.dtype].itemsize
        assert (rows["addnorm"]["bytes"], rows["add"]["bytes"]) == (MOVED[item.job] * size, 3 * size)
        assert rows["eager"]["ratio_to_eager"] == rows["add"]["share_of_add_bandwidth"] == 1.0
        rate = {name: row["bytes"] / row["median_us"] for name, row in rows.items()}
        assert rows["addnorm"]["share_of_add_bandwidth"] == pytest.approx(rate["addnorm"] / rate["add"])
        for row in rows.values():
            assert row["q1_us"] <= row["median_us"] <= row["q3_us"]
            assert (row["repeats"] >= 1, row["rounds"]) == (True, 3)


def test_peers_that_fail_are_reported(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda *args, **options: fail)
    monkeypatch.setattr(onnx_peer, "applies", lambda case: case.job == "forward")
    monkeypatch.setattr(onnx_peer, "bound", fail)
    document = bench.run(bench.matrix(("layer",), ("float32",), ((2, 4),)), rounds=1, compiled=True, proofs=False)
    assert document["complete"]
    failures = [(row["variant"], row["job"]) for row in document["failures"]]
    assert failures == [("compile", "forward"), ("onnxruntime", "forward")] + [
        ("compile", job) for job in JOBS if job not in ("forward", "in_place", "reuse")
    ]
    assert {row["variant"] for row in document["rows"]} == {"eager", "addnorm", "add"}
    screen = Console(record=True, width=100, file=io.StringIO())
    bench.show(document, screen)
    assert "no compiler here" in screen.export_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # Inductor's own cache
def test_compiled_variant_is_measured():
    some = bench.matrix(("layer",), ("float32",), ((4, 8),))
    document = bench.run(some, rounds=1, compiled=True, proofs=False)
    assert document["failures"] == []
    assert sum(row["variant"] == "compile" for row in document["rows"]) == 5


def test_threads_are_those_of_the_case_and_interrupt_ends(threads, monkeypatch):
    threads(2)
    some, calls = [MATRIX[0], MATRIX[-1], MATRIX[1], MATRIX[2]], []

    def measure(item, *, rounds, compiled, fresh):
        if item == some[3]:
            raise KeyboardInterrupt
        calls.append((item.threads, torch.get_num_threads(), compiled))
        return {"rows": [item.row(variant="addnorm", median_us=1.0)], "failures": []}

    monkeypatch.setattr(operation, "measure", measure)
    document = bench.run(some, proofs=False)
    assert calls == [(2, 2, True), (1, 1, False), (2, 2, True)]  # compiled with all threads only
    assert torch.get_num_threads() == 2
    assert not document["complete"]
    assert [*by_case(document["rows"], FIELDS)] == some[:3]


# Targets.


def rows_of(times, some):
    """Return rows in which every case has the same medians."""
    return [item.row(variant=name, median_us=time, allocator="kept") for item in some for name, time in times.items()]


def test_summary_leaves_out_large_cases_of_unknown_allocator_state():
    rows = rows_of({"eager": 30.0, "addnorm": 10.0, "add": 5.0}, bench.matrix(("layer",), jobs=("forward",)))
    known = {row["name"]: row["cells"] for row in operation.summarize(rows, 32 * 1024**2)}
    for row in rows:
        del row["allocator"]
    unknown = {row["name"]: row["cells"] for row in operation.summarize(rows, 32 * 1024**2)}
    assert (known["forward, over 32 MB: lowest"], unknown["forward, over 32 MB: lowest"]) == (2, 0)
    name = "forward, 128+ rows, under 32 MB: mean"
    assert known[name] == unknown[name] == 8


def test_large_cases_are_measured_in_both_states(monkeypatch):
    calls = []

    def time_variants(case, state="kept", **options):
        calls.append((case.rows, state))
        slow = 5.0 if state == "fresh" else 1.0
        row = {"q1_us": 1.0, "q3_us": 9.0, "faults": slow, "rounds": 3, "repeats": 2, "allocator": state}
        return {
            name: {"median_us": slow * time, **row}
            for name, time in (("addnorm", 1.0), ("eager", 2 * slow), ("add", 1.0))
        }, {}

    monkeypatch.setattr(operation, "time_variants", time_variants)
    sizes = ((8, 768), (8192, 768), (4096, 4096))
    document = bench.run(bench.matrix(("layer",), ("float32",), sizes, jobs=("forward",)), proofs=False)
    assert calls == [(8192, "fresh"), (4096, "fresh"), (8, "kept"), (8192, "kept"), (4096, "kept")]
    rows = {row["rows"]: row for row in document["rows"] if row["variant"] == "addnorm"}
    assert [rows[n]["allocator"] for n in (8, 8192, 4096)] == ["kept", "kept", "fresh"]
    assert "fresh_median_us" not in rows[8]
    assert (rows[8192]["ratio_to_eager"], rows[8192]["fresh_ratio_to_eager"]) == (2.0, 10.0)
    assert (rows[4096]["median_us"], rows[4096]["kept_median_us"], rows[4096]["faults"]) == (5.0, 1.0, 5.0)


def test_summary_has_every_goal_over_its_cases():
    times = {"eager": 30.0, "addnorm": 10.0, "compile": 8.0, "onnxruntime": 20.0, "add": 5.0}
    summary = operation.summarize(rows_of(times, bench.matrix(("layer",))), 32 * 1024**2)
    assert {
        (row["name"], row["versus"]): (row["cells"], round(row["value"], 9), row["target"], row["met"])
        for row in summary
    } == {
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


def test_summary_takes_means_and_extremes_by_threads():
    many = bench.matrix(("rms",), ("float32",), ((128, 768), (512, 768)), jobs=["forward", "dropout"], threads=2)
    rows = rows_of({"eager": 20.0, "addnorm": 10.0, "add": 10.0}, many[::2])
    rows += rows_of({"eager": 80.0, "addnorm": 10.0, "add": 5.0}, many[1::2])
    rows += rows_of({"eager": 20.0, "addnorm": 10.0}, [many[2].but(threads=1)])
    by_name = {(row["name"], row["threads"]): row for row in operation.summarize(rows, 1e9)}
    assert by_name["forward, 128+ rows, under 32 MB: mean", 2]["value"] == pytest.approx(4.0)  # geometric
    assert by_name["without options: lowest", 2]["value"] == 2.0
    assert by_name["y alone, float32, 128+ rows, in cache: highest", 2]["value"] == 2.0
    dropout = [by_name["dropout, with backward: mean", threads] for threads in (2, 1)]
    assert [row["met"] for row in dropout] == [True, None]  # targets are for all threads
    assert dropout[1]["value"] == pytest.approx(2.0)
    assert by_name["in place, 4096 x 4096: lowest", 2]["value"] is None  # a target without a measurement is listed
    assert ("in place, 4096 x 4096: lowest", 1) not in by_name


# Tables and the command.


def test_tables_fit_100_columns(document):
    rows = [*document["rows"]]
    for peer in ("compile", "onnxruntime"):
        rows += [{**row, "variant": peer} for row in document["rows"] if row["variant"] == "eager"]
    proofs = {
        "summary": operation.summarize(rows, 1e9), "accuracy": accuracy.table(),
        "facts": facts.facts(("rms",), ("bfloat16",)) + facts.of_accuracy(accuracy.table(("rms",))),
    }  # fmt: skip
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


def invoke(*words):
    return CliRunner().invoke(main, ["bench", *words])


def test_command_writes_json_alone_to_stdout(monkeypatch):
    monkeypatch.setattr(bench, "QUICK_SHAPES", ((2, 4),))
    result = invoke("--quick", "--rounds", "1", "--norm", "rms", "--json", "-")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert {row["norm"] for row in document["rows"]} == {"rms"}
    assert document["protocol"]["rounds"] == 1
    assert {(row["norm"], row["dtype"]) for row in document["accuracy"]} == {
        ("rms", dtype) for dtype in accuracy.DTYPES
    }


def test_command_exits_with_3_for_a_failed_fact(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "QUICK_SHAPES", ((2, 4),))
    monkeypatch.setattr(facts, "facts", lambda *_: [Target("false", "==", 2.0).row(1.0, "layer", torch=2.0)])
    result = invoke(
        "--quick", "--rounds", "1", "--norm", "rms", "--dtype", "float32", "--json", str(tmp_path / "a.json")
    )
    assert result.exit_code == 3, result.output
    assert json.loads((tmp_path / "a.json").read_text())["facts"][0]["met"] is False


@pytest.mark.parametrize("words", [["--norm", "batch"], ["--dtype", "int8"], ["--threads", "0"], ["--rounds", "x"]])
def test_command_refuses_wrong_arguments_with_2(words):
    assert invoke(*words).exit_code == 2
