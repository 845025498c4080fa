"""Tests of the GPU benchmark's plan, bytes, targets and Markdown, on invented rows."""

import copy

import pytest

from addnorm.bench import gpu
from addnorm.bench.gpu import cases, running, summary
from addnorm.bench.gpu.cases import LARGE, case_of, moved_bytes, tensor_bytes, title

# The plan.


def test_moved_bytes_count_each_tensor_with_its_dtype():
    table = {
        job: [moved_bytes(case_of("layer", job, 10, 100, dtype)) // 1000 for dtype in ("bfloat16", "mixed", "float16", "float32")]
        for job in gpu.JOBS
    }  # fmt: skip
    assert table == {
        "forward": [6, 4 + 2 + 2, 6, 12], "forward_stream": [8, 12, 8, 16], "backward": [8, 2 + 4 + 4 + 4 + 2, 8, 16],
        "forward_backward": [16, 28, 16, 32], "dropout": [18, 28, 18, 36],
    }  # fmt: skip


def test_plan_begins_with_a_case_of_every_kind():
    plan, norms = gpu.plan(), ("layer", "rms")
    assert len(plan) == len({*plan})
    assert {(case.norm, case.job, case.rows, case.d, case.dtype) for case in plan[:6]} == {
        (norm, job, 8192, 4096, "bfloat16") for norm in norms for job in ("forward", "forward_stream", "backward")
    }  # fmt: skip
    assert {case.rows for case in plan[6:14]} == {1, 128}
    large = {(case.norm, case.job, case.d) for case in plan[:30] if tensor_bytes(case) >= LARGE}  # a short run
    assert large >= {(norm, job, d) for norm in norms for job in ("forward_stream", "backward") for d in cases.TARGET_D}
    assert {case.job for case in plan[:60]} == {*gpu.JOBS}  # ten minutes
    assert {case.dtype for case in plan[:60]} == {*gpu.DTYPES}
    assert {case.d for case in plan} >= {768, 32768, 65536}
    assert {case.rows for case in plan} >= {1, 128, 65536}


# The summary.

LARGE_CASE = case_of("layer", "forward", 32768, 1024, "bfloat16")
BACKWARD = case_of("layer", "backward", 32768, 1024, "bfloat16")
WIDE = case_of("layer", "forward", 1024, 32768, "bfloat16")  # large, and without a bandwidth target
SMALL = case_of("layer", "forward_stream", 1, 768, "bfloat16")


def rows_of(case, times, share=0.5):
    """Return rows of a case from times by variant: (device, host, call)."""
    return [
        case.row(variant=name, device_us=device, host_us=host, call_us=call, share_of_copy=share)
        for name, (device, host, call) in times.items()
    ]  # fmt: skip


def summarize(rows, failures=()):
    return {row["name"]: row for row in summary.summarize(rows, failures, judged=True)}


def test_bandwidth_goal_takes_the_lowest_share():
    times = {"addnorm": (10, 1, 10)}
    rows = rows_of(LARGE_CASE, times, 0.95) + rows_of(WIDE, times, 0.2) + rows_of(SMALL, times, 0.01)
    rows += rows_of(LARGE_CASE.but(d=4096), times, 0.85) + rows_of(BACKWARD, times, 0.8)
    by_name = summarize(rows)
    forward = by_name["forward, 64 MB and more, d 1024 to 16384: lowest share of the copy bandwidth"]
    assert (forward["value"], forward["target"], forward["met"]) == (0.85, 0.9, False)
    assert (forward["cells"], forward["cells_met"]) == (2, 1)
    assert forward["worst"] == title(LARGE_CASE.but(d=4096))
    backward = by_name["backward, 64 MB and more, d 1024 to 16384: lowest share of the copy bandwidth"]
    assert (backward["value"], backward["target"], backward["met"]) == (0.8, 0.8, True)


def test_call_time_is_judged_from_16_mb():
    ours, eager = (10.0, 8.0, 30.0), (11.0, 4.0, 20.0)
    rows = rows_of(SMALL, {"addnorm": ours, "eager": eager, "liger": (9.0, 4.0, 20.0)})
    rows += rows_of(LARGE_CASE, {"addnorm": ours, "eager": (20.0, 2.0, 33.0)})
    by_name = summarize(rows)
    device = by_name["device time over eager's: highest"]
    assert (device["value"], device["met"], device["cells"]) == (10 / 11, True, 2)
    assert by_name["device time over Liger's: highest"]["met"] is False
    call = by_name["call time over eager's, 16 MB and more: highest"]
    assert (call["value"], call["met"], call["cells"]) == (30 / 33, True, 1)  # not of the small case
    host = by_name["host time over eager's: mean"]
    assert (host["value"], host["met"]) == (pytest.approx((2.0 * 4.0) ** 0.5), None)
    assert by_name["device time over eager's: mean"]["value"] == pytest.approx((10 / 11 * 10 / 20) ** 0.5)
    unmeasured = by_name["device time over torch.compile's: highest"]
    assert (unmeasured["value"], unmeasured["met"], unmeasured["cells"]) == (None, None, 0)


def test_cases_without_addnorm_are_counted_and_not_judged():
    rows = rows_of(LARGE_CASE, {"eager": (10, 1, 10), "copy": (5, 1, 5)})
    by_name = summarize(rows, [LARGE_CASE.row(variant=name, error="wrong") for name in ("addnorm", "liger")])
    wrong = by_name["cells in which addnorm is wrong or fails"]
    assert (wrong["value"], wrong["met"]) == (1, False)
    assert by_name["device time over eager's: highest"]["value"] is None


def test_rows_get_bandwidth_shares_and_ratios():
    times = {"addnorm": (10.0, 1, 20.0), "eager": (25.0, 1, 30.0), "copy": (8.0, 1, 9.0)}
    rows = [{**row, "bytes": 30_000_000} for row in rows_of(LARGE_CASE, times)]
    ours, eager, copied = running.with_ratios(rows, 4e12)
    assert ours["gb_per_second"] == pytest.approx(3000)
    assert (ours["share_of_copy"], ours["share_of_cell_copy"]) == (pytest.approx(0.75), pytest.approx(0.8))
    assert (ours["device_ratio_to_eager"], ours["call_ratio_to_eager"]) == (2.5, 1.5)
    assert eager["device_ratio_to_eager"] == copied["share_of_cell_copy"] == 1.0


# As Markdown.


@pytest.fixture
def document():
    """Return an invented document of a GPU."""
    times = {"addnorm": (10.0, 6.0, 12.0), "eager": (25.0, 4.0, 30.0), "liger": (9.0, 20.0, 24.0)}
    rows = [{**row, "cold": case != SMALL, "queued": case != BACKWARD}
            for case in (LARGE_CASE, BACKWARD, SMALL) for row in rows_of(case, times, 0.91)]  # fmt: skip
    failures = [SMALL.row(variant="quack", error="RuntimeError: a | b\n  c")]
    return {
        "schema": 1, "date": "2026-01-01T00:00:00+00:00", "complete": True, "ended": "budget", "commit": "0123456789abcdef",
        "dirty": False, "versions": {"torch": "2.11.0", "addnorm": "0.1.0", "triton": "3.6.0"},
        "device": {"type": "cuda", "name": "Some GPU", "multiprocessors": 132, "cuda": "13.0", "driver": "580.1"},
        "copy": {"median": 4.2e12}, "missing": {"flash_attn": "flash-attn is not installed: pip install flash-attn"},
        "summary": summary.summarize(rows, failures, judged=True), "failures": failures,
        "cells": [vars(LARGE_CASE)] * 3, "left": [vars(WIDE)], "rows": rows,
    }  # fmt: skip


def test_section_has_device_targets_and_a_line_a_case(document):
    text = gpu.section(document)
    assert text.startswith(
        "Some GPU, 132 multiprocessors; copies at 4,200 GB/s; torch 2.11.0, addnorm 0.1.0, CUDA 13.0, driver 580.1, "
        "triton 3.6.0, commit 0123456789; 2026-01-01.\n"
    )
    times = "| **2.50** | **0.90** | 12.0 | **2.50** | **2.00** | 6.00 |"
    for words in (
        "lowest share of the copy bandwidth | >= 0.9 | 0.910 |",
        "| device time over Liger's: highest | <= 1 | 1.11 (missed, 0 of 3 cases reach it) |",
        "| device time over torch.compile's: highest | <= 1 | not measured |",
        "| rows x d | dtype | job | device, us | share of the copy | / eager | / Liger | call, us | / eager | / Liger | host, us |",
        f"| 32768 x 1024 | bfloat16 | forward, y alone | 10.0 | 91% {times}",
        f"| 32768 x 1024 | bfloat16 | backward | 10.0 (waits) | 91% {times}",
        f"| 1 x 768 | bfloat16 | forward, y and the stream | 10.0 | 91% (warm) {times}",
        "flash-attn is not installed: pip install flash-attn.",
        "| quack | LayerNorm, forward, y and the stream, 1 x 768 bfloat16 | RuntimeError: a \\| b c |",
    ):
        assert words in text
    assert text.endswith("3 of 4 cases were measured (the time budget was used up).")


def test_section_without_gpu_results(document):
    assert gpu.section(None) == summary.UNMEASURED
    other = copy.deepcopy(document) | {"device": {"type": "cpu", "name": "Some CPU"}}
    message = r"the document is of Some CPU, expected one of a GPU: run python benchmarks/bench_gpu\.py"
    with pytest.raises(ValueError, match=message):
        gpu.section(other)
    assert "Some CPU, which is no GPU" in gpu.report(other)
