"""Tests of benchmarks/bench_limit.py: the loop reads and writes what it should, and the targets follow from the rows."""

import shutil

import pytest
import torch

from addnorm.bench.harness import Case
from support.loading import load

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the loop is compiled with g++")


@pytest.fixture(scope="module")
def script():
    return load("benchmarks/bench_limit.py")


def bits(*shape):
    return torch.randint(0, 2**31, shape, dtype=torch.int32)


@needs_compiler
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_stream", [False, True])
def test_loop_reads_and_writes_every_row(script, with_bias, with_stream):
    x, branch, weight, bias = bits(5, 48), bits(5, 48), bits(48), bits(48) if with_bias else None
    y, z = torch.zeros_like(x), torch.zeros_like(x) if with_stream else None
    script.loop_of([x, branch, weight, bias], (y, z), 2)()
    expected = x | branch
    assert z is None or z.equal(expected)
    expected = expected | weight
    assert y.equal(expected if bias is None else expected | bias)


@needs_compiler
@pytest.mark.parametrize(("norm", "job"), [("layer", "stream"), ("rms", "y")])
def test_case_has_a_row_for_each_variant(script, norm, job):
    case = Case(norm=norm, job=job, threads=1, rows=4, d=64, dtype="bfloat16")
    rows = script.measure(case, rounds=2)["rows"]
    assert [row["variant"] for row in rows] == ["addnorm", "add", "loop"]


def test_section_has_both_ratios(script):
    case = Case(norm="rms", job="stream", threads=2, rows=128, d=768, dtype="bfloat16")
    times = {"addnorm": 12.0, "add": 8.0, "loop": 16.0}
    rows = [case.row(variant=name, median_us=time, q1_us=time, q3_us=time) for name, time in times.items()]
    document = {"rows": rows, "machine": {"cpu": "CPU", "cores": 2}, "isa": "AVX2", "threads": 2, "versions": {"torch": "2", "python": "3", "addnorm": "0"},
                "commit": "a" * 40, "dirty": False, "complete": True, "date": "2026-01-02", "load": 0.1}  # fmt: skip
    text = script.section(document)
    assert (
        "| 128 x 768 | bfloat16 | RMSNorm | y and the stream | **1.50** ±0 % | **0.75** ±0 % | 12.0 | 8.00 | 16.0 |"
        in text
    )
    assert "load 0.1 before it began" in text


def test_training_is_compared_round_by_round(script):
    (case, *_) = [case for case in script.cases(1) if case.job == script.TRAINING]
    rows = {row["variant"]: row for row in script.measure(case, rounds=3)["rows"]}
    assert (rows["eager"]["paired_low"], rows["eager"]["paired_high"]) == (1.0, 1.0)
    assert rows["addnorm"]["paired_low"] <= rows["addnorm"]["paired_ratio"] <= rows["addnorm"]["paired_high"]
    bound, mean = script.summarize({"rows": [
        Case(norm="layer", job=script.TRAINING, threads=2, rows=n, d=8, dtype="float32").row(variant="addnorm", paired_ratio=ratio, paired_low=ratio - 0.1)
        for n, ratio in ((1, 1.05), (128, 2.0), (512, 8.0))
    ]})  # fmt: skip
    assert (round(bound["value"], 3), bound["met"], mean["value"], mean["met"]) == (0.95, False, 4.0, True)


def test_targets_are_the_highest_ratios_of_their_cases(script):
    times = {(128, 768): (15.0, 10.0, 12.0), (512, 768): (12.0, 10.0, 8.0), (4096, 4096): (20.0, 10.0, 25.0)}
    rows = [
        Case(norm="layer", job="y", threads=2, rows=size[0], d=size[1], dtype="float32").row(variant=name, median_us=time)
        for size, by in times.items() for name, time in zip(("addnorm", "add", "loop"), by, strict=True)
    ]  # fmt: skip
    numbers = {row["name"]: (row["value"], row["met"]) for row in script.summarize({"rows": rows})}
    assert numbers == {
        "y alone, in cache: highest (x the time of torch.add)": (1.5, False),
        "y alone, in cache: highest (x the time of equal loads and stores)": (1.5, False),
        "y alone, from memory: highest (x the time of torch.add)": (2.0, False),
        "y alone, from memory: highest (x the time of equal loads and stores)": (0.8, True),
    }
