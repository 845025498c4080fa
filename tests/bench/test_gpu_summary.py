"""Tests of the GPU benchmark's plan, bytes, targets and Markdown, on invented rows."""

import copy

import pytest

from addnorm.bench import gpu
from addnorm.bench.gpu import cases, running, summary
from addnorm.bench.gpu.cases import LARGE, case_of, moved_bytes, tensor_bytes, title
from addnorm.bench.harness import write
from support.loading import load

# The plan.


def test_moved_bytes_count_each_tensor_with_its_dtype():
    table = {
        (job, dtype): moved_bytes(case_of("layer", job, 10, 100, dtype)) // 1000 for job in gpu.JOBS for dtype in gpu.DTYPES
    }  # fmt: skip
    assert table == {
        ("forward", "bfloat16"): 6, ("forward", "mixed"): 4 + 2 + 2, ("forward", "float16"): 6, ("forward", "float32"): 12,
        ("forward_stream", "bfloat16"): 8, ("forward_stream", "mixed"): 12, ("forward_stream", "float16"): 8,
        ("forward_stream", "float32"): 16,
        ("backward", "bfloat16"): 8, ("backward", "mixed"): 2 + 4 + 4 + 4 + 2, ("backward", "float16"): 8,
        ("backward", "float32"): 16,
        ("forward_backward", "bfloat16"): 16, ("forward_backward", "mixed"): 28, ("forward_backward", "float16"): 16,
        ("forward_backward", "float32"): 32,
        ("dropout", "bfloat16"): 18, ("dropout", "mixed"): 28, ("dropout", "float16"): 18, ("dropout", "float32"): 36,
    }  # fmt: skip


def test_plan_begins_with_a_case_of_every_kind():
    plan = gpu.plan()
    assert len(plan) == len({*plan})
    both = ("layer", "rms")
    assert {(cell.norm, cell.job, cell.rows, cell.d, cell.dtype) for cell in plan[:6]} == {
        (norm, job, 8192, 4096, "bfloat16") for norm in both for job in ("forward", "forward_stream", "backward")
    }  # fmt: skip
    assert {cell.rows for cell in plan[6:14]} == {1, 128}
    first = plan[:30]  # a short run contains both judged jobs at every d of the targets
    aimed = {(cell.norm, cell.job, cell.d) for cell in first if tensor_bytes(cell) >= LARGE}
    assert {(norm, job, d) for norm in both for job in ("forward_stream", "backward") for d in cases.TARGET_D} <= aimed
    half = plan[:60]  # a run of ten minutes contains every job and dtype
    assert {cell.job for cell in half} == {*gpu.JOBS}
    assert {cell.dtype for cell in half} == {*gpu.DTYPES}
    assert {768, 32768, 65536} <= {cell.d for cell in plan}
    assert {1, 128, 65536} <= {cell.rows for cell in plan}


def test_rows_for_gives_a_tensor_of_at_least_the_size():
    for d, rows in ((1024, 32768), (768, 65536), (65536, 512)):
        assert cases.rows_for(LARGE, d, "bfloat16") == rows
    assert cases.rows_for(LARGE, 1024, "mixed") == 32768  # by the smaller tensor
    assert cases.rows_for(LARGE, 1024, "float32") == 16384
    assert cases.rows_for(1, 1024, "float32") == 1


def test_part_of_the_plan_keeps_its_order():
    part = gpu.plan(["rms"], ["bfloat16"], ["backward"], [4096])
    assert part == [
        cell
        for cell in gpu.plan()
        if (cell.norm, cell.job, cell.d, cell.dtype) == ("rms", "backward", 4096, "bfloat16")
    ]
    assert len(part) == 2
    assert {cell.rows for cell in gpu.plan(rows=[1])} == {1}


def test_given_sizes_make_cases():
    made = gpu.plan(["layer"], ds=[7, 8], rows=[3])
    assert [(cell.job, cell.rows, cell.d, cell.dtype) for cell in made] == [
        (job, 3, d, "bfloat16") for d in (7, 8) for job in gpu.JOBS
    ]
    with pytest.raises(ValueError, match=r"no case of the plan has d 7, norm layer/rms: give both d and rows"):
        gpu.plan(ds=[7])


# The summary.

LARGE_CELL = case_of("layer", "forward", 32768, 1024, "bfloat16")
BACKWARD = case_of("layer", "backward", 32768, 1024, "bfloat16")
WIDE = case_of("layer", "forward", 1024, 32768, "bfloat16")  # large, and without a bandwidth target
SMALL = case_of("layer", "forward_stream", 1, 768, "bfloat16")


def made(cell, times, share=0.5):
    """Return rows of a cell: variant -> (device, host, call)."""
    return [
        cell.row(variant=name, device_us=device, host_us=host, call_us=call, share_of_copy=share)
        for name, (device, host, call) in times.items()
    ]  # fmt: skip


def judged(rows, failures=()):
    return {one["name"]: one for one in summary.summarize(rows, failures, judged=True)}


def test_bandwidth_goal_takes_the_lowest_share():
    rows = made(LARGE_CELL, {"addnorm": (10, 1, 10)}, 0.95) + made(WIDE, {"addnorm": (10, 1, 10)}, 0.2)
    rows += made(LARGE_CELL.but(d=4096), {"addnorm": (10, 1, 10)}, 0.85)
    rows += made(BACKWARD, {"addnorm": (10, 1, 10)}, 0.8) + made(SMALL, {"addnorm": (10, 1, 10)}, 0.01)
    found = judged(rows)
    forward = found["forward, 64 MB and more, d 1024 to 16384: lowest share of the copy bandwidth"]
    assert (forward["value"], forward["target"], forward["met"]) == (0.85, 0.9, False)
    assert (forward["cells"], forward["cells_met"]) == (2, 1)
    assert forward["worst"] == title(LARGE_CELL.but(d=4096))
    backward = found["backward, 64 MB and more, d 1024 to 16384: lowest share of the copy bandwidth"]
    assert (backward["value"], backward["target"], backward["met"]) == (0.8, 0.8, True)


def test_call_time_is_judged_from_16_mb():
    ours, theirs = (10.0, 8.0, 30.0), (11.0, 4.0, 20.0)
    rows = made(SMALL, {"addnorm": ours, "eager": theirs, "liger": (9.0, 4.0, 20.0)})
    rows += made(LARGE_CELL, {"addnorm": ours, "eager": (20.0, 2.0, 33.0)})
    found = judged(rows)
    device = found["device time over eager's: highest"]
    assert (device["value"], device["met"], device["cells"]) == (10 / 11, True, 2)
    assert found["device time over Liger's: highest"]["met"] is False
    call = found["call time over eager's, 16 MB and more: highest"]
    assert (call["value"], call["met"], call["cells"]) == (
        30 / 33,
        True,
        1,
    )  # the small cell's call is slower, and not judged
    assert found["host time over eager's: mean"]["value"] == pytest.approx((2.0 * 4.0) ** 0.5)
    assert found["host time over eager's: mean"]["met"] is None
    assert found["device time over eager's: mean"]["value"] == pytest.approx((10 / 11 * 10 / 20) ** 0.5)


def test_target_without_measurement_is_not_judged():
    found = judged(made(SMALL, {"addnorm": (10, 1, 10)}))
    one = found["device time over torch.compile's: highest"]
    assert (one["value"], one["met"], one["cells"], one["worst"]) == (None, None, 0, None)


def test_equal_times_meet_the_target():
    for device, met in ((10.0, True), (10.01, False)):
        rows = made(SMALL, {"addnorm": (device, 1, 1), "eager": (10.0, 1, 1)})
        assert judged(rows)["device time over eager's: highest"]["met"] is met


def test_cases_without_addnorm_are_counted_and_not_judged():
    rows = made(LARGE_CELL, {"eager": (10, 1, 10), "copy": (5, 1, 5)})
    failures = [LARGE_CELL.row(variant=name, error="wrong") for name in ("addnorm", "liger")]
    found = judged(rows, failures)
    assert (
        found["cells in which addnorm is wrong or fails"]["value"],
        found["cells in which addnorm is wrong or fails"]["met"],
    ) == (1, False)
    assert found["device time over eager's: highest"]["value"] is None


def test_cpu_results_are_not_judged():
    rows = made(LARGE_CELL, {"addnorm": (10, 1, 10), "eager": (1, 1, 1)})
    found = summary.summarize(rows, [], judged=False)
    assert all(one["target"] is None and one["met"] is None for one in found if one["norm"])


def test_rows_get_bandwidth_shares_and_ratios():
    times = {"addnorm": (10.0, 1, 20.0), "eager": (25.0, 1, 30.0), "copy": (8.0, 1, 9.0)}
    rows = [{**row, "bytes": 30_000_000} for row in made(LARGE_CELL, times)]
    ours, eager, copied = running.with_ratios(rows, 4e12)
    assert ours["gb_per_second"] == pytest.approx(3000)
    assert ours["share_of_copy"] == pytest.approx(0.75)
    assert ours["share_of_cell_copy"] == pytest.approx(0.8)
    assert (ours["device_ratio_to_eager"], ours["call_ratio_to_eager"]) == (2.5, 1.5)
    assert eager["device_ratio_to_eager"] == 1.0
    assert copied["share_of_cell_copy"] == 1.0
    assert (
        running.with_ratios([row for row in rows if row["variant"] != "eager"], 4e12)[0]["device_ratio_to_eager"]
        is None
    )


# As Markdown.


@pytest.fixture
def document():
    """Return an invented document of a GPU."""
    times = {"addnorm": (10.0, 6.0, 12.0), "eager": (25.0, 4.0, 30.0), "liger": (9.0, 20.0, 24.0)}
    rows = [{**row, "cold": cell != SMALL, "queued": cell != BACKWARD}
            for cell in (LARGE_CELL, BACKWARD, SMALL) for row in made(cell, times, 0.91)]  # fmt: skip
    failures = [SMALL.row(variant="quack", error="RuntimeError: a | b\n  c")]
    return {
        "schema": 1, "date": "2026-01-01T00:00:00+00:00", "complete": True, "ended": "budget", "commit": "0123456789abcdef",
        "dirty": False, "versions": {"torch": "2.11.0", "addnorm": "0.1.0", "triton": "3.6.0"},
        "device": {"type": "cuda", "name": "Some GPU", "multiprocessors": 132, "cuda": "13.0", "driver": "580.1"},
        "copy": {"median": 4.2e12}, "missing": {"flash_attn": "flash-attn is not installed: pip install flash-attn"},
        "summary": summary.summarize(rows, failures, judged=True), "failures": failures,
        "cells": [vars(LARGE_CELL)] * 3, "left": [vars(WIDE)], "rows": rows,
    }  # fmt: skip


def test_section_has_device_targets_and_a_line_a_case(document):
    text = gpu.section(document)
    head = "Some GPU, 132 multiprocessors; copies at 4,200 GB/s; torch 2.11.0, addnorm 0.1.0, CUDA 13.0, driver 580.1, triton 3.6.0, commit 0123456789; 2026-01-01."
    assert text.splitlines()[0] == head
    assert "lowest share of the copy bandwidth | >= 0.9 | 0.910 |" in text
    assert "| device time over Liger's: highest | <= 1 | 1.11 (missed, 0 of 3 cases reach it) |" in text
    assert "| device time over torch.compile's: highest | <= 1 | not measured |" in text
    assert (
        "| rows x d | dtype | job | device, us | share of the copy | / eager | / Liger | call, us | / eager | / Liger | host, us |"
        in text
    )
    line = "| **2.50** | **0.90** | 12.0 | **2.50** | **2.00** | 6.00 |"
    assert f"| 32768 x 1024 | bfloat16 | forward, y alone | 10.0 | 91% {line}" in text
    assert f"| 32768 x 1024 | bfloat16 | backward | 10.0 (waits) | 91% {line}" in text
    assert f"| 1 x 768 | bfloat16 | forward, y and the stream | 10.0 | 91% (warm) {line}" in text
    assert "flash-attn is not installed: pip install flash-attn." in text
    assert "| quack | LayerNorm, forward, y and the stream, 1 x 768 bfloat16 | RuntimeError: a \\| b c |" in text
    assert text.endswith("3 of 4 cases were measured (the time budget was used up).")


def test_section_without_gpu_results(document):
    assert gpu.section(None) == summary.UNMEASURED
    assert "python benchmarks/bench_gpu.py" in summary.UNMEASURED
    other = copy.deepcopy(document) | {"device": {"type": "cpu", "name": "Some CPU"}}
    with pytest.raises(
        ValueError, match=r"the document is of Some CPU, expected one of a GPU: run python benchmarks/bench_gpu\.py"
    ):
        gpu.section(other)
    assert "Some CPU, which is no GPU" in gpu.report(other)


def test_table_writes_the_section(document, tmp_path, monkeypatch):
    table = load("benchmarks/table.py")
    page = tmp_path / "performance.md"
    page.write_text("before\n<!-- bench:gpu -->\nold\n<!-- /bench:gpu -->\nafter\n")
    monkeypatch.setattr(table, "PAGES", {"performance.md": {"gpu": ("gpu", gpu.section)}})
    assert table.main([], tmp_path, tmp_path) == 0
    assert page.read_text() == f"before\n<!-- bench:gpu -->\n{summary.UNMEASURED}\n<!-- /bench:gpu -->\nafter\n"
    write(document, tmp_path / "gpu.json")
    assert table.main(["--check"], tmp_path, tmp_path) == 1
    assert table.main([], tmp_path, tmp_path) == 0
    assert "| 32768 x 1024 | bfloat16 | backward |" in page.read_text()
