"""Tests of runs of the benchmark on a GPU: failures, resuming, its document, pages and command line."""

import functools
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from addnorm import Backend
from addnorm.bench import gpu, harness, jobs, peers
from addnorm.bench.gpu import BENCHMARK
from bench.test_gpu import case
from support.loading import ROOT
from support.processes import run_python

UNCOMPILED = ["eager", "addnorm"]
SCRIPT = ROOT / "benchmarks" / "bench_gpu.py"


def plant(monkeypatch, make):
    """Replace eager PyTorch by another implementation."""
    monkeypatch.setitem(peers.VARIANTS, "eager", peers.Variant("eager", make))


PLAN = [case(norm, job, "float32") for norm in ("layer", "rms") for job in gpu.TIMED]


def run(cases=PLAN, **options):
    return harness.run(BENCHMARK, cases, **{"rounds": 2, "variants": UNCOMPILED} | options)


def test_document_has_a_row_for_each_variant_and_case():
    document = run()
    assert document["device"]["type"] == "cpu"
    rows = dict(BENCHMARK.by_case(document))
    assert list(rows) == PLAN
    assert all(list(of_case) == UNCOMPILED for of_case in rows.values())
    for row in document["rows"]:
        assert row["call_us"] == pytest.approx(row["median_us"])
        assert row["share_of_copy"] > 0
    assert document["failures"] == []
    assert {row["met"] for row in document["summary"]} == {None}
    assert document["peers"] == dict.fromkeys(["liger", "flash_attn", "quack"])
    assert document["versions"].keys() >= {"triton", "cuda"}
    assert len(document["copies"]) == len(PLAN)
    json.dumps(document, allow_nan=False)


def test_wrong_variant_is_reported_and_not_timed(monkeypatch):
    plant(monkeypatch, lambda case: lambda x, s, w, b: F.rms_norm(x - s, (case.d,), w, 1e-6))
    item = case("rms", "forward", "float32")
    document = run([item])
    assert [row["variant"] for row in document["rows"]] == ["addnorm"]
    (failure,) = document["failures"]
    assert failure["variant"] == "eager"
    assert failure["error"].startswith("WrongError: y differs by ")
    assert f"eager failed in {item}: {failure['error']}" in harness.report(BENCHMARK, document)
    json.dumps(document, allow_nan=False)


@pytest.mark.parametrize(("durations", "budget", "measured"), [((60, 1), 50, 1), ((30, 1), 40, 2)])
def test_budget_ends_a_run_as_complete(monkeypatch, durations, budget, measured):
    """The most important case is always measured; no case begins after the budget."""
    now = [0.0]
    monkeypatch.setattr(harness.time, "monotonic", lambda: now[0])

    def slow(case):
        now[0] += durations[PLAN.index(case)]
        return jobs.eager(case)

    plant(monkeypatch, slow)
    document = run(PLAN[:2], budget=budget)
    assert (document["complete"], document["ended"]) == (True, "done" if measured == 2 else "budget")
    assert list(dict(BENCHMARK.by_case(document))) == PLAN[:measured]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from the tools with which torch.compile builds
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_variant_runs_backward_on_retained_graphs(monkeypatch, tmp_path, backend):
    """Run backward in another thread, as on a GPU, where settings of this thread do not apply."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # and nothing from earlier runs
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    grad = torch.autograd.grad
    with ThreadPoolExecutor(1) as thread:

        def run_elsewhere(*args, **more):  # but not the gradients that the compiler traces
            return grad(*args, **more) if "allow_unused" in more else thread.submit(grad, *args, **more).result()

        monkeypatch.setattr(torch.autograd, "grad", run_elsewhere)
        document = run([case("rms", "backward", "float32")], rounds=1, variants=["compile"])
    assert document["failures"] == []
    assert [row["variant"] for row in document["rows"]] == ["compile"]


# Targets, the report and the script.

LARGE_CASE = case("layer", "forward", rows=32768, d=1024)
BACKWARD = LARGE_CASE.but(job="backward")
WIDE = LARGE_CASE.but(rows=1024, d=32768)  # large, and without a bandwidth target
SMALL = case("layer", "forward_stream", rows=1, d=768)


def rows_of(case, times, share=0.5):
    """Return rows of a case from times by variant: (device, call); the share is of a copy at 4 TB/s."""
    return [
        case.row(variant=name, median_us=device, call_us=call, bytes=share * 4e6 * device)
        for name, (device, call) in times.items()
    ]


def judge(rows, failures=()):
    document = gpu.finish({"rows": rows, "failures": failures, "copies": [{"bytes_per_second": 4e12}]}, {})
    document["device"] = {"type": "cuda", "name": "Some GPU", "multiprocessors": 132, "cuda": "13.0", "driver": "580.1"}
    return {**document, **BENCHMARK.judge(document)}


def test_targets_count_their_cases():
    ours, eager = (10.0, 30.0), (11.0, 20.0)
    rows = rows_of(SMALL, {"addnorm": ours, "eager": eager}, 0.01)
    rows += rows_of(LARGE_CASE, {"addnorm": ours, "eager": (20.0, 33.0)}, 0.95)
    rows += rows_of(WIDE, {"addnorm": ours}, 0.2) + rows_of(LARGE_CASE.but(d=4096), {"addnorm": ours}, 0.85)
    rows += rows_of(BACKWARD, {"eager": eager})
    document = judge(rows, [BACKWARD.row(variant=name, error="wrong") for name in ("addnorm", "liger")])
    by_name = {row["name"]: row for row in [*document["summary"], *document["facts"]]}
    forward = by_name["forward, 64 MB and more, d 1024 to 16384: lowest share of the copy bandwidth"]
    assert (forward["value"], forward["cells"]) == (pytest.approx(0.85), 2)
    call = by_name["call time over eager's, 16 MB and more: highest"]
    assert (call["value"], call["cells"]) == (30 / 33, 1)  # not of the small case
    unmeasured = by_name["device time over torch.compile's: highest"]
    assert (unmeasured["value"], unmeasured["met"], unmeasured["cells"]) == (None, None, 0)
    wrong = by_name["cases in which addnorm is wrong or fails"]
    assert (wrong["value"], wrong["met"]) == (1, False)


def test_section_has_device_targets_and_a_line_a_case():
    times = {"addnorm": (10.0, 12.0), "eager": (25.0, 30.0), "liger": (9.0, 24.0)}
    rows = [row for case in (LARGE_CASE, BACKWARD, SMALL) for row in rows_of(case, times, 0.91)]
    document = {
        **run(PLAN[:1]), "peers": {"liger": "0.8.5", "flash_attn": None}, "ended": "budget",
        "cells": [vars(LARGE_CASE)] * 3, "left": [vars(WIDE)],
        **judge(rows, [SMALL.row(variant="quack", error="RuntimeError: a | b\n  c")]),
    }  # fmt: skip
    text = gpu.section(document)
    assert text.startswith("Some GPU, 132 multiprocessors, CUDA 13.0, driver 580.1, triton ")
    cells = "| 91% | 10.0 | **2.50** | **0.90** | 12.0 | **2.50** | **2.00** |"
    for words in (
        "; copies at 4,000 GB/s; ",
        "lowest share of the copy bandwidth | LayerNorm | 0.910 | >= 0.9 | yes |",
        "| device time over Liger's: highest | LayerNorm | 1.11 | <= 1 | no, 0 of 3 |",
        "| device time over torch.compile's: highest | LayerNorm | not measured | <= 1 | - |",
        "share of the copy | device, us | device / eager | device / Liger | call, us | call / eager | call / Liger |",
        f"| LayerNorm | 32768 x 1024 | bfloat16 | forward, y alone {cells}",
        f"| LayerNorm | 32768 x 1024 | bfloat16 | backward {cells}",
        f"| LayerNorm | 1 x 768 | bfloat16 | forward, y and the stream {cells}",
        "\n\nflash-attn was not installed.\n\n",
        f"- quack failed in {SMALL}: RuntimeError: a | b c",
    ):
        assert words in text
    assert text.endswith("3 of 4 cases were measured (the time budget was used up).")
    with pytest.raises(ValueError, match=r"the document is of Some CPU, expected one of a GPU: run python benchmarks"):
        gpu.section(document | {"device": {"type": "cpu", "name": "Some CPU"}})


def test_script_lists_cases_and_needs_only_torch():
    """A machine with a GPU often has nothing else installed, and the list needs no GPU."""
    program = (
        "import sys; sys.modules |= dict.fromkeys(['rich', 'click']); sys.argv[0] = sys.argv[1]; del sys.argv[1]; "
        "import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    listed = run_python("-c", program, SCRIPT, "--list").stdout
    assert listed.splitlines() == [str(item) for item in BENCHMARK.plan()]


TRIAL = ("--device", "cpu", "--d", "8", "--rows", "2", "--job", "forward", "--variants", *UNCOMPILED, "--rounds", "1")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [((), 2, "there is no CUDA device: --device cpu tries everything but the clock"), (TRIAL, 0, "Written: TMP/addnorm-gpu_cpu.json")],
)  # fmt: skip
def test_script_refuses_wrong_arguments_and_measures_parts_elsewhere(
    monkeypatch, capsys, tmp_path, words, code, message
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / SCRIPT.name)])
    monkeypatch.setattr(harness.tempfile, "gettempdir", lambda: str(tmp_path))
    ended = harness.main(BENCHMARK, words)
    output = "".join(capsys.readouterr())
    assert (ended, message.replace("TMP", str(tmp_path)) in output) == (code, True), output


def test_script_refuses_to_time_the_formulas_as_addnorm(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "backends", lambda: [Backend("triton", False, "Triton 3.0 is too old")])
    with pytest.raises(ValueError, match=r"addnorm has no kernels: Triton 3\.0 is too old"):
        gpu.describe([case("rms", "forward").but(device="cuda")])
