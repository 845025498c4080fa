"""What the benchmark claims: targets computed from the rows, and what is so on every machine."""

import itertools
import math

import pytest
import torch

from addnorm import bench
from addnorm.bench import accuracy, facts, parity, summary

ITEM = {torch.float32: 4, torch.bfloat16: 2}


def fake_rows(times, cells):
    """Rows in which every cell has the same medians."""
    return [
        {**cell._asdict(), "variant": name, "median_us": time} for cell in cells for name, time in times.items()
    ]  # fmt: skip


def test_summary_is_the_statistic_over_the_cells_it_names():
    cells = bench.matrix(("layer",))
    rows = fake_rows({"eager": 30.0, "addnorm": 10.0, "compile": 8.0, "onnxruntime": 20.0, "add": 5.0}, cells)
    found = {(one["name"], one["versus"]): one for one in summary.summarize(rows, 32 * 1024**2)}
    counted = {name: (one["cells"], round(one["value"], 9), one["met"]) for name, one in found.items()}
    assert counted == {
        ("forward, 128+ rows, under 32 MB: mean", "x eager"): (16, 3.0, True),
        ("forward, one row: mean", "x eager"): (8, 3.0, True),
        ("forward, over 32 MB: lowest", "x eager"): (4, 3.0, True),
        ("with backward, 128+ rows, under 32 MB: mean", "x eager"): (8, 3.0, True),
        ("with backward: lowest", "x eager"): (14, 3.0, True),
        ("without options: lowest", "x eager"): (42, 3.0, True),
        ("without options, under 32 MB: lowest", "x compile"): (36, 0.8, False),
        ("y alone, float32, 128+ rows, in cache: highest", "x add's time"): (3, 2.0, False),
        ("dropout, with backward: mean", "x eager"): (14, 3.0, True),
        ("all options, with backward: mean", "x eager"): (14, 3.0, False),
        ("in place, 4096 x 4096: lowest", "x eager"): (2, 3.0, False),
        ("y into given memory, 4096 x 4096: highest", "x add's time"): (2, 2.0, False),
        ("dropout and all options: mean", "x compile"): (28, 0.8, None),
        ("forward, float32: mean", "x onnxruntime"): (28, 2.0, None),
        ("y into given memory, float32: mean", "x onnxruntime"): (14, 2.0, None),
    }


def test_the_targets_that_the_options_must_meet():
    targets = {goal.name: (goal.compare, goal.target) for goal in summary.GOALS}
    assert targets["dropout, with backward: mean"] == (">=", 3.0)
    assert targets["all options, with backward: mean"] == (">=", 4.0)
    assert targets["in place, 4096 x 4096: lowest"] == (">=", 4.0)
    assert targets["y into given memory, 4096 x 4096: highest"] == ("<=", 1.3)


def test_fewer_threads_are_summarized_apart_and_have_no_targets():
    many, one = (bench.matrix(("rms",), ("float32",), ((128, 768),), threads=count) for count in (2, 1))
    rows = fake_rows({"eager": 40.0, "addnorm": 10.0}, many) + fake_rows({"eager": 20.0, "addnorm": 10.0}, one)
    found = {(found["name"], found["threads"]): found for found in summary.summarize(rows, 1e9)}
    name = "dropout, with backward: mean"
    assert [found[name, count]["value"] for count in (2, 1)] == [pytest.approx(4.0), pytest.approx(2.0)]
    assert [found[name, count]["met"] for count in (2, 1)] == [True, None]
    assert found["in place, 4096 x 4096: lowest", 2]["value"] is None  # a target that nothing was measured for is told
    assert ("in place, 4096 x 4096: lowest", 1) not in found


def test_summary_takes_geometric_means_and_extremes():
    one, two = bench.matrix(("rms",), ("float32",), ((128, 768), (512, 768)))[:2]
    rows = fake_rows({"eager": 20.0, "addnorm": 10.0, "add": 10.0}, [one])
    rows += fake_rows({"eager": 80.0, "addnorm": 10.0, "add": 5.0}, [two])
    found = {one["name"]: one["value"] for one in summary.summarize(rows, 1e9)}
    assert found["forward, 128+ rows, under 32 MB: mean"] == pytest.approx(4.0)
    assert found["without options: lowest"] == 2.0
    assert found["y alone, float32, 128+ rows, in cache: highest"] == 2.0
    assert found["forward, one row: mean"] is None


def test_a_claim_without_a_number_is_neither_met_nor_missed():
    assert summary.claim("x", None, None, ">=", 1.0)["met"] is None
    assert summary.claim("x", None, 1.0, ">=", None)["met"] is None
    assert summary.claim("x", None, 0.94, ">=", 0.95)["met"] is False
    assert not summary.claim("x", None, math.nan, "<", 1.0)["met"]


def test_facts_hold():
    found = facts.facts()
    assert all(fact["met"] for fact in found), [fact for fact in found if not fact["met"]]
    assert len(found) == 1 + 6 + 3 + 3 + 4 * 3


@pytest.mark.parametrize("norm", bench.NORMS)
@pytest.mark.parametrize("dtype", ITEM)
def test_saved_bytes_are_the_stream_eight_a_token_the_seed_and_the_branch(norm, dtype):
    stream, statistics, seed = 7 * 32 * ITEM[dtype], 8 * 7, 8
    saved = {job: facts.saved_bytes(norm, dtype, job, 7, 32) for job in ("forward_stream", "dropout", "everything")}
    assert saved["forward_stream"]["addnorm"] == stream + statistics
    assert saved["dropout"]["addnorm"] == stream + statistics + seed
    assert saved["everything"]["addnorm"] == 2 * stream + statistics + seed
    # Eager keeps the noise besides, and for the scale's gradient the branch after it.
    grows = [saved[job]["eager"] - saved["forward_stream"]["eager"] for job in ("dropout", "everything")]
    assert grows == [stream, 2 * stream]


def test_errors_with_all_options_are_roundings(monkeypatch):
    monkeypatch.setattr(accuracy, "SHAPE", (512, 256))
    found = accuracy.table()
    assert [(one["norm"], one["dtype"], one["variant"]) for one in found] == list(
        itertools.product(bench.NORMS, ("float32", "bfloat16", "float16", "float64"), ("addnorm", "eager"))
    )
    for one in found:
        assert set(accuracy.COLUMNS) - one.keys() == ({"dbias"} if one["norm"] == "rms" else set())
    claims = facts.of_accuracy(found)
    assert len(claims) == 8
    assert all(claim["met"] for claim in claims), claims
    half = [claim for claim in claims if "float16" in claim["name"]]
    assert all(claim["torch"] > 1 for claim in half)  # eager rounds more than once


@pytest.mark.parametrize("column", accuracy.COLUMNS)
def test_an_error_in_any_output_or_gradient_shows(column, monkeypatch):
    real = accuracy._ours

    class Wrong(torch.autograd.Function):
        """The identity, whose gradient is 1 % off."""

        @staticmethod
        def forward(ctx, t):
            return t.clone()

        @staticmethod
        def backward(ctx, dt):
            return dt * 1.01

    def wrong(norm, args, seed):
        at = ["dresidual", "dbranch", *(f"d{name}" for name in accuracy.PARAMETERS)]
        args = [Wrong.apply(t) if at[k] == column else t for k, t in enumerate(args)]
        y, z = real(norm, args, seed)
        return (y * 1.01 if column == "y" else y), (z * 1.01 if column == "z" else z)

    monkeypatch.setattr(accuracy, "_ours", wrong)
    found = accuracy.errors("layer", torch.float32, 64, 32)["addnorm"]
    assert found[column] > 1e-3
    claims = facts.of_accuracy(
        [{"norm": "layer", "dtype": "float32", "variant": who, **found} for who in ("addnorm", "eager")]
    )
    assert claims[0]["met"] is False


@pytest.mark.parametrize("model", parity.MODELS)
def test_a_models_order_of_rounding_gives_its_elements_and_another_does_not(model):
    right, other = parity.unlike(model)
    assert right < 1e-4
    assert other > 0.1
