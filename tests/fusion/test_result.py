"""Tests of the report of a fusion: its sentences and tables, at any width, in a terminal, a notebook and as text."""

import math
from dataclasses import replace

import pytest

from addnorm._util.render import to_text
from addnorm.fusion.benchmark import Benchmark, Timing
from addnorm.fusion.match import Boundary
from addnorm.fusion.proof import Proof
from addnorm.fusion.result import Fusion
from addnorm.fusion.tolerance import Difference


def boundary(layer, name="attention", **changes):
    fields = {"eps": 1e-5, "returns_residual": False, "shape": (2, 4, 8), "dtype": "float32", **changes}
    return Boundary(f"layers.{layer}.{name}", f"layers.{layer}.{name}.norm", "layer", **fields)


def difference(name, max_abs=1e-7, error=2e-7, tolerance=4e-7):
    return Difference(name, max_abs, error, 3.0, tolerance)


def timing(before, after, rounds=7):
    """Return times whose ratio is measured to two percent."""
    quartiles = ((0.9 * t, 1.1 * t) for t in (before, after))
    return Timing(before, after, rounds, *quartiles, before / after, (0.98 * before / after, 1.02 * before / after))


PROOF = Proof(
    (difference("logits"), difference("cache", 0.0)), (difference("layers.0.weight"),), "float64", "evaluation"
)
BENCHMARK = Benchmark(timing(0.0011, 0.001), timing(4.0, 5.0, 5), (2_000_000, 1_000_000), 2, 1.26)
ALL = (*(boundary(k) for k in range(3)), *(boundary(k, "mlp") for k in range(3)))
UNFUSED = replace(boundary(0, "embeddings"), reason="its add broadcasts")
DONE = Fusion("Model", (UNFUSED, *ALL), 1, PROOF, share=0.2, benchmark=BENCHMARK)
WRONG = replace(
    PROOF, outputs=(difference("logits", 1e-3), difference("cache")),
    gradients=tuple(difference(f"layers.{k}.weight", math.inf if k == 4 else 1e-3 * (k + 1)) for k in range(5)),
)  # fmt: skip
FAILED = replace(DONE, proof=WRONG, share=None, benchmark=None)
NOTHING = replace(DONE, boundaries=(UNFUSED,), share=None, benchmark=None)
EMPTY = replace(NOTHING, boundaries=())
BARE = replace(
    DONE, share=None, benchmark=None, proof=replace(PROOF, gradients=(), gradient_error="Error: no backward")
)
BLIND = replace(
    DONE, proof=Proof((difference("logits", error=None),), (), "no float64 run: it has none", "training"),
    share=0.0, benchmark=Benchmark(timing(1e-5, 1e-5, 9)),
)  # fmt: skip
INDUCTOR = replace(DONE, inductor=True, num_graphs=3, benchmark=Benchmark(timing(0.002, 0.001)))


def lines(fusion):
    return [" ".join(line.split()) for line in to_text(fusion._blocks(), 120).splitlines()]


def text_of(fusion):
    return " ".join(lines(fusion))


def test_report_groups_layers_that_are_alike():
    rows = lines(replace(DONE, benchmark=None))
    assert rows[0] == "Model, evaluation: 6 of 7 Add & Norms are fused"
    assert rows[1] == "each LayerNorm 1e-5, returns y, in float32"
    assert "3 x layers.0-2.attention .norm" in rows
    assert "3 x layers.0-2.mlp .norm" in rows


@pytest.mark.parametrize(
    ("change", "word"),
    [({"eps": 1e-12}, "LayerNorm 1e-12"), ({"kind": "rms", "casting": "llama"}, "RMSNorm 1e-5, casting llama"),
     ({"returns_residual": True}, "y and the sum"), ({"dtype": "bfloat16"}, "bfloat16")],
)  # fmt: skip
def test_report_shows_what_differs_in_a_column(change, word):
    rows = lines(replace(DONE, boundaries=(boundary(0), boundary(2), replace(boundary(1), **change))))
    assert word not in rows[1]
    (row,) = [row for row in rows if row.startswith("1 x")]
    assert word in row
    assert any(row.startswith("2 x layers.0,2.attention") for row in rows)


def test_report_names_the_tensors_closest_to_tolerance():
    proof = replace(PROOF, outputs=(difference("large", 1e-2, 1e-2, 1.0), difference("near", 3e-7)))
    rows = lines(replace(DONE, proof=proof))
    assert "Proven equal up to rounding: 2 outputs and 1 gradient." in rows
    assert "output near 3e-7 2e-7 4e-7" in rows
    assert "gradient layers.0.weight 1e-7 2e-7 4e-7" in rows
    assert not any("large" in row for row in rows)
    assert any("from float64." in row for row in rows)


def test_report_of_a_failed_proof_names_the_worst_tensors():
    text = text_of(FAILED)
    assert "!! the proof failed; the model is unchanged" in text
    assert "!! 1 of 2 outputs and 5 of 5 gradients exceed the tolerance:" in text
    rows = [row for row in lines(FAILED) if row.endswith("!!")]
    assert [row.split()[1] for row in rows] == ["logits", "layers.4.weight", "layers.3.weight", "layers.2.weight"]
    assert " inf " in rows[1]
    assert "and 2 more gradients" in text
    assert "inf: shape" in text
    assert "are fused" not in text


def test_report_bounds_the_gain_by_the_share():
    assert DONE.max_gain == 1.25
    sentence = "Add & Norm is 20% of the forward pass: fusing cannot make it more than 1.25 times as fast"
    assert f"{sentence}." in text_of(DONE)
    assert f"{sentence}; a larger gain is Inductor's." in text_of(INDUCTOR)
    assert "is 1.2% of the forward pass: fusing gains no noticeable time." in text_of(replace(DONE, share=0.012))
    assert replace(DONE, share=1.0).max_gain == math.inf
    assert "forward pass" not in text_of(BARE)


def test_report_shows_the_benchmark_with_spread_and_load():
    rows = lines(replace(DONE, benchmark=replace(BENCHMARK, inference=timing(0.002, 0.001))))
    assert "inference 2.00 ms ±10% 1.00 ms ±10% 2.000 times as fast (1.960 to 2.040)" in rows
    assert "training step 4.00 s ±10% 5.00 s ±10% 0.800 times as fast (0.784 to 0.816)" in rows
    assert "saved for backward 2.00 MB 1.00 MB 50% less" in rows
    assert (
        "Medians of 7 and 5 rounds, ± half the interquartile range, 95% intervals; 2 threads, load 1.3 before." in rows
    )


def test_report_claims_no_difference_within_the_interval():
    same, short = timing(0.99, 1.0), replace(timing(2.0, 1.0, 1), interval=(-math.inf, math.inf))
    text = text_of(replace(DONE, benchmark=Benchmark(same, short)))
    assert "no significant difference (0.970 to 1.010)" in text
    assert "too few rounds to compare" in text
    assert "times as fast (" not in text


def test_report_remarks_a_gain_beyond_the_bound():
    gains = {
        name: text_of(replace(DONE, benchmark=Benchmark(timing(t, 1.0)))) for name, t in (("less", 1.27), ("more", 1.3))
    }
    remark = "More than the 1.25 times that fusing can gain in a forward pass: "
    assert f"{remark}inference 1.300." in gains["more"]
    assert remark not in gains["less"]
    assert "More than the" not in text_of(INDUCTOR)
    trained = replace(DONE, benchmark=Benchmark(timing(1.0, 1.0), timing(1.9, 1.0)))
    assert f"{remark}training step 1.900." in text_of(trained)


def test_report_without_gradients_or_float64():
    assert "no gradients (the model itself raises Error: no backward)" in text_of(BARE)
    text = text_of(BLIND)
    assert "Model, training:" in text
    assert "The error of the model before fusing is not known (no float64 run: it has none)." in text
    assert "output logits 1e-7 4e-7" in lines(BLIND)
    assert "10.0 µs" in text
    assert "0% of the forward pass" in text


def test_report_claims_nothing_if_nothing_is_fused():
    assert "its Add & Norm is not fused; the model is unchanged" in text_of(NOTHING)
    assert "none of 2 Add & Norms is fused" in text_of(replace(NOTHING, boundaries=(UNFUSED, UNFUSED)))
    assert "its add broadcasts" in text_of(NOTHING)
    assert text_of(EMPTY) == "Model, evaluation: no norm of a sum was found; the model is unchanged"
    for fusion in (NOTHING, EMPTY):
        assert "Proven" not in text_of(fusion)
