"""Tests of the CPU benchmark on tiny sizes: variants, proofs, document, targets, tables, command."""

import io
import itertools
import json

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from addnorm._util import jsonio
from addnorm._util.render import print_blocks
from addnorm.bench import exactness, harness, jobs, operation, peers, timing
from addnorm.bench.case import Case, by_case
from addnorm.bench.jobs import FIELDS, JOBS, NORMS
from addnorm.bench.operation import BENCHMARK, DTYPES, TIMED, matrix, plan
from addnorm.cli import bench
from addnorm_cli.group import addnorm as main
from support.loading import ROOT
from support.pairwise import pairwise, product
from support.wrong_gradient import spoil


def case(norm, job, rows=3, d=8, dtype="float32", threads=1):
    return Case(norm=norm, job=job, rows=rows, d=d, dtype=dtype, threads=threads)


# Variants.


@pytest.mark.parametrize(("norm", "job", "dtype"), product([*NORMS], [*TIMED], [*DTYPES]))
def test_variants_compute_the_same(norm, job, dtype, monkeypatch):
    monkeypatch.setattr(jobs, "DROPOUT", 0.0)  # the masks differ; without dropout everything else is equal
    item, results = case(norm, job, 5, 16, dtype), {}
    for name in operation.variants(item):
        results[name] = operation.variants(item)[name]()()  # new tensors: in-place calls change them
    eager = results.pop("eager")
    del results["add"]
    assert results.keys() == {"addnorm"} | ({"onnxruntime"} if peers.onnxruntime_applies(item) else set())
    rtol, atol = (2e-2, 5e-2) if dtype == "bfloat16" else (1e-5, 1e-5)
    for result in results.values():
        torch.testing.assert_close(result, eager, rtol=rtol, atol=atol)
    outputs = {"forward_backward": 4, "dropout": 4, "everything": 6}.get(job)
    assert outputs is None or len(eager) == outputs - (norm == "rms")


@pytest.mark.parametrize(("norm", "dtype"), [("layer", "bfloat16"), ("rms", "float32")])
def test_in_place_calls_keep_ordinary_values(norm, dtype):
    item = case(norm, "in_place", 2, 64, dtype)
    tensors = jobs.inputs(item)
    x, s = tensors.args[:2]
    before, call = x.clone(), jobs.ours(item)
    for _ in range(5_000):
        y, z = call(*tensors.args)
    assert (y.data_ptr(), z.data_ptr()) == (s.data_ptr(), x.data_ptr())
    assert not ((s.abs() < torch.finfo(s.dtype).tiny) & (s != 0)).any()
    assert s.isfinite().all()
    assert (x - before).abs().max() < 6  # the first branch, then almost nothing
    assert 0.5 < x.std() < 3


def test_onnxruntime_applies_to_float32_without_gradients(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name == "onnx" else name)
    assert peers.onnxruntime_status() == "onnx not installed"
    tiny = matrix(shapes=((5, 16),))
    assert not any(map(peers.onnxruntime_applies, tiny))
    monkeypatch.setattr(peers, "onnxruntime_status", lambda: "1.30")
    applies = {(item.job, item.dtype) for item in tiny if peers.onnxruntime_applies(item)}
    assert applies == {(job, "float32") for job in ("forward", "forward_stream", "reuse")}


# Facts and errors.


def test_facts_hold_and_orders_of_rounding_differ(monkeypatch):
    monkeypatch.setattr(exactness, "SHAPE", (96, 768))
    pairs = itertools.product(NORMS, DTYPES)
    rows = [row for pair in pairs for row in exactness.facts(*pair, exactness.errors(*pair, 64, 32, "everything"))]
    assert [row for row in rows if not row["met"]] == []
    assert len(rows) == 1 + 6 + 3 + 3 + 4 * 3 + 4
    unlike = [row["torch"] for row in rows if row["name"].startswith("share of elements unlike")]
    assert len(unlike) == len(exactness.MODELS)
    assert min(unlike) > 0.1


@pytest.mark.parametrize(("norm", "dtype"), [*itertools.product(NORMS, exactness.ROUNDINGS)])
def test_errors_with_all_options_are_round_off(norm, dtype):
    by_variant = exactness.errors(norm, dtype, 512, 256, "everything")
    for relative in by_variant.values():
        assert {*exactness.COLUMNS} - relative.keys() == ({"dbias"} if norm == "rms" else set())
    fact = next(iter(exactness.facts(norm, dtype, by_variant)))
    assert fact["met"], fact
    assert fact["torch"] > 1 or "float16" not in dtype  # eager rounds more than once


@pytest.mark.parametrize("column", exactness.COLUMNS)
def test_error_in_any_output_or_gradient_shows(monkeypatch, column):
    monkeypatch.setattr(exactness, "ours", lambda case: spoil(jobs.ours(case), column, 1.01))
    by_variant = exactness.errors("layer", "float32", 64, 32, "everything")
    assert by_variant["addnorm"][column] > 1e-3
    assert next(iter(exactness.facts("layer", "float32", by_variant)))["met"] is False


# The document.

MATRIX = [
    case(norm, job, rows, 8, dtype, 2) for norm, job, dtype, rows in pairwise([*NORMS], [*TIMED], [*DTYPES], (3, 130))
]
MATRIX += [case("layer", "in_place"), case("layer", "forward_backward")]  # on one thread


@pytest.fixture(scope="module")
def document():
    """Return the document of a run of every job; tests must not change it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "onnxruntime_applies", lambda case: False)
        return harness.run(BENCHMARK, plan(MATRIX, proofs=False), rounds=3, compile=False)


def test_document_has_a_row_for_each_variant_and_case(document):
    document = json.loads(jsonio.dumps(document))
    assert (document["schema"], document["complete"], document["threads"]) == (2, True, 2)
    assert document["peers"] == {"onnxruntime": peers.onnxruntime_status()}
    assert [*dict(by_case(document["rows"], FIELDS))] == MATRIX
    for item, rows in by_case(document["rows"], FIELDS):
        assert rows.keys() == {"eager", "addnorm", "add"}
        assert rows["addnorm"]["bytes"] == jobs.moved_bytes(item)
        assert rows["add"]["bytes"] == 3 * item.rows * item.d * getattr(torch, item.dtype).itemsize
        assert rows["eager"]["ratio_to_eager"] == rows["add"]["share_of_add_bandwidth"] == 1.0
        rate = {name: row["bytes"] / row["median_us"] for name, row in rows.items()}
        assert rows["addnorm"]["share_of_add_bandwidth"] == pytest.approx(rate["addnorm"] / rate["add"])
        for row in rows.values():
            assert row["q1_us"] <= row["median_us"] <= row["q3_us"]
            assert (row["repeats"] >= 1, row["rounds"]) == (True, 3)


def test_large_cases_are_measured_in_both_states_and_few_threads_uncompiled(monkeypatch):
    states, calls = [], []

    def measure(case, variants, rounds, **options):
        calls.append((case.rows, states[-1], torch.get_num_threads(), "compile" in variants))
        slow = 5.0 if states[-1] == "fresh" else 1.0
        row = {"q1_us": 1.0, "q3_us": 9.0, "faults": slow}
        times = {"addnorm": slow, "eager": 2 * slow**2, "add": slow}
        return [case.row(variant=name, median_us=us, **row) for name, us in times.items()]

    monkeypatch.setattr(timing, "settle_allocator", lambda state="kept": states.append(state) or True)
    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(
        operation,
        "variants",
        lambda case, with_compiler: {name: lambda: int for name in ("add", *["compile"] * with_compiler)},
    )
    some = [case("layer", "forward", *size, threads=2) for size in ((8, 768), (8192, 768), (4096, 4096))]
    document = harness.run(BENCHMARK, plan([*some, some[0].but(threads=1)], proofs=False), compile=True)
    assert calls == [
        (8192, "fresh", 2, True), (4096, "fresh", 2, True), (8, "kept", 2, True), (8192, "kept", 2, True), (4096, "kept", 2, True),
        (8, "kept", 1, False),
    ]  # fmt: skip
    rows = {row["rows"]: row for row in document["rows"] if row["variant"] == "addnorm" and row["threads"] == 2}
    assert [rows[n]["allocator"] for n in (8, 8192, 4096)] == ["kept", "kept", "fresh"]
    assert "fresh_median_us" not in rows[8]
    assert (rows[8192]["ratio_to_eager"], rows[8192]["fresh_median_us"]) == (2.0, 5.0)
    assert (rows[4096]["median_us"], rows[4096]["kept_median_us"], rows[4096]["faults"]) == (5.0, 1.0, 5.0)


# Tables and the command.


def test_tables_have_every_part_and_fit_100_columns():
    document = harness.read(ROOT / "benchmarks/results/functional.json")
    document |= {"load": 1e3, "complete": False, "cells": [{}] * 2, "left": [{}], "ended": "lost"}
    screen = Console(record=True, width=100, file=io.StringIO())
    print_blocks(screen, *bench.list_blocks(document))
    text = screen.export_text()
    for name in ("LayerNorm: forward, y and the stream, 2 threads", "LayerNorm: in place, y and the stream, 1 thread",
                 "RMSNorm: forward + backward, dropout 0.1, 2 threads", "x onnx", "x compile", "with backward: lowest, 1 thread",
                 "saved bytes, 512 x 768 bfloat16, all options", "dlayer_", "dbias of 16384 bfloat16 rows of ones",
                 "The machine was busy", "2 of 3 cases"):  # fmt: skip
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
        ("rms", dtype) for dtype in exactness.ROUNDINGS
    }
    assert document["summary"][-1]["name"] == "import addnorm after torch: milliseconds"


def test_moved_bytes_count_each_tensor_with_its_dtype():
    table = {
        job: [jobs.moved_bytes(case("layer", job, 10, 100, dtype)) // 1000 for dtype in ("bfloat16", "mixed", "float16", "float32")]
        for job in JOBS
    }  # fmt: skip
    assert table == {
        "forward": [6, 4 + 2 + 2, 6, 12], "forward_stream": [8, 12, 8, 16], "backward": [8, 2 + 4 + 4 + 4 + 2, 8, 16],
        "forward_backward": [16, 28, 16, 32], "dropout": [18, 28, 18, 36], "everything": [20, 30, 20, 40],
        "in_place": [8, 12, 8, 16], "reuse": [6, 8, 6, 12],
    }  # fmt: skip
