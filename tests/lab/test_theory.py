"""Tests of `addnorm.lab.theory` and `addnorm.lab.published`: statistics of untrained stacks, and the papers' results."""

import json
import math
import os
import statistics

import pytest
import torch
import torch.nn.functional as F

from addnorm import Row, Wiring, wirings
from addnorm.lab import published
from addnorm.lab.published import PUBLISHED, check_published
from addnorm.lab.run import wiring_label
from addnorm.lab.streams import token_similarities
from addnorm.lab.theory import (
    DEPTHS,
    SEEDS,
    STREAM_DEPTHS,
    STREAM_WIRINGS,
    WIRINGS,
    init_stacks,
    measure_init,
    summarize,
)
from addnorm.lab.toy_model import ToyModel
from support.row_equation import run_rows

FIRST = int(os.environ.get("ADDNORM_SEEDS", "0"))


# ------------------------------------------------------------------------------------------------ measurement


def equation_streams(job, apart=False):
    """Return the model of a stack, and every stream, the writes, the sums before norms and the output by the equation."""
    model = ToyModel(job.num_layers, job.wiring, job.seed, init=job.own_init, sequences=4, loss_tokens=32)
    x = model.x[0][:, None] if apart else model.x
    results = run_rows(model.stack, x.clone().requires_grad_(), 1e-5)
    for stream in results[0]:
        stream.retain_grad()
    return model, *results


@pytest.mark.parametrize(
    "wiring", [*WIRINGS, "sandwich", wirings.depth_mup(), Wiring("mine", Row(norm_in=True, a=0.5))]
)
def test_measure_init_matches_equation_and_autograd(wiring):
    (job,) = init_stacks([wiring], [3], [5])
    result = measure_init(job)
    model, streams, writes, sums, y = equation_streams(job)
    F.cross_entropy(model.head(y[0]), model.targets).backward()
    gradients = [x.grad for x in streams]
    weights = [layer.connections[1].sublayer[-1].weight.grad for layer in model.stack.layers]
    streams, writes, sums = ([x.detach() for x in some] for some in (streams, writes, sums))
    expect = {
        "variance": [float(x.square().mean()) for x in streams],
        "before_norm": [float(x.square().mean()) for x in sums],
        "similarity": [float(token_similarities(x).mean()) for x in streams],
        "write_ratio": [float(w.norm() / x.norm()) for w, x in zip(writes, streams, strict=False)],
        "gradient": [float(g.norm()) for g in gradients],
        "gradient_ratio": float(gradients[0].norm() / gradients[-1].norm()),
        "weight_gradient": [float(g.norm()) for g in weights],
        "last_move": float(1 - F.cosine_similarity(streams[-3], streams[-1], dim=-1).mean()),
    }
    assert (result["wiring"], result["num_layers"], result["seed"]) == (wiring_label(job.wiring), 3, 5)
    for key, value in expect.items():
        assert result[key] == pytest.approx(value, rel=1e-3, abs=1e-6), key


@pytest.mark.parametrize(("optimizer", "lr"), [(torch.optim.SGD, 0.1), (torch.optim.Adam, 1e-3)])
@pytest.mark.parametrize("wiring", ["pre_ln", "post_ln", "deepnorm"])
def test_first_steps_match_torch_optimizers(wiring, optimizer, lr):
    (job,) = init_stacks([wiring], [4], [1])
    model, *_, y = equation_streams(job, apart=True)
    before = model.head(y[:, 0])
    F.cross_entropy(before, model.targets).backward()
    optimizer(model.parameters(), lr).step()
    after = model.head(model.stack(model.x[0][:, None])[:, 0])
    change = float(((after - before).norm() / before.norm()).detach())
    assert measure_init(job)[f"step_{optimizer.__name__.lower()}"] == pytest.approx(change, rel=1e-3)


def test_init_stacks_use_own_init_where_required():
    own = {wiring_label(job.wiring): job.own_init for job in init_stacks([*WIRINGS, "sandwich", "admin"], [2], [0])}
    assert {name for name, is_own in own.items() if is_own} == {"deepnorm", "admin"}


def test_measure_init_reports_overflow():
    (job,) = init_stacks(["no_norm"], [250], [0])
    result = measure_init(job)
    assert result["step_sgd"] == math.inf
    assert not math.isfinite(result["variance"][-1]) or result["variance"][-1] > 1e30
    assert json.loads(json.dumps(result))["step_sgd"] == math.inf


def test_measure_init_of_zero_factors():
    result = measure_init(*init_stacks(["rezero"], [2], [0]))
    assert result["write_ratio"] == [0.0] * 4
    assert result["weight_gradient"] == [0.0, 0.0]
    assert summarize([result])[0]["weight_gradient"] == [0.0, 0.0]


def test_summarize_rows_of_several_streams():
    result = [measure_init(job) for job in init_stacks(["mhc", "attention_residuals", "pre_ln"], [2], [0, 1])]
    attention, mhc, pre = summarize(result)
    assert "gain" not in attention
    assert mhc["difference"] == max(member["difference"] for member in result[:2])
    assert mhc["read"][1] == pytest.approx(statistics.geometric_mean(member["read"][1] for member in result[:2]))
    assert "read" not in pre


# --------------------------------------------------------------------------------------------- stacks and rows


def test_summarize_does_not_depend_on_order():
    result = [measure_init(job) for job in init_stacks(["pre_ln", "no_norm"], [2, 3], [4, 2, 7])]
    rows = summarize(result)
    assert summarize(reversed(result)) == rows
    assert [(row["wiring"], row["num_layers"]) for row in rows] == [
        ("no_norm", 2), ("no_norm", 3), ("pre_ln", 2), ("pre_ln", 3),
    ]  # fmt: skip
    members = [entry for entry in result if (entry["wiring"], entry["num_layers"]) == ("pre_ln", 3)]
    row = rows[-1]
    assert row["seeds"] == [2, 4, 7]
    for key in ("variance", "before_norm", "similarity"):
        assert row[key][2] == pytest.approx(statistics.fmean(member[key][2] for member in members)), key
    for key in ("gradient", "write_ratio", "weight_gradient"):
        assert row[key][1] == pytest.approx(statistics.geometric_mean(member[key][1] for member in members)), key
    assert row["last_move"] == pytest.approx(statistics.fmean(member["last_move"] for member in members))
    assert row["step_sgd"] == pytest.approx(statistics.geometric_mean(member["step_sgd"] for member in members))


def test_summarize_refuses_duplicates():
    result = measure_init(*init_stacks(["pre_ln"], [2], [0]))
    with pytest.raises(ValueError, match="pre_ln, 2 layers, seed 0 occurs twice"):
        summarize([result, result])


# ------------------------------------------------------------------------------------------- published results


def as_published():
    """Return rows in which everything is as in the papers."""
    rows = []
    growth = {
        "pre_ln": lambda at: 1 + at, "post_ln": lambda at: 1.0, "deepnorm": lambda at: 1.0, "no_residual": lambda at: 1.0,
        "layernorm_scaling": lambda at: 1 + math.log(at + 1), "peri_ln": lambda at: 1 + 2 * at, "no_norm": lambda at: 2.0**at,
    }  # fmt: skip
    steps = {"deepnorm": 0.1, "pre_ln": 0.2, "post_ln": 0.6}
    for wiring in WIRINGS:
        for n in DEPTHS:
            after = [growth[wiring](i / 2) for i in range(2 * n + 1)]
            gradient = [1.0] * n if wiring != "pre_ln" else [layer**-0.5 for layer in range(1, n + 1)]
            rows.append({
                "wiring": wiring, "num_layers": n, "seeds": [0], "variance": after, "before_norm": [1.5] * (2 * n),
                "similarity": [1.0 if wiring == "no_residual" else 0.5] * (2 * n + 1), "last_move": 1 / (2 * n),
                "weight_gradient": gradient, "step_sgd": steps.get(wiring, 1.0), "step_adam": steps.get(wiring, 1.0),
            })  # fmt: skip
    for wiring in STREAM_WIRINGS:
        rows += [
            {
                "wiring": wiring, "num_layers": n, "seeds": [0], "difference": 1e-5, "read": [1.0] * (2 * n),
                "pre_read": [(1 + i) ** 0.5 for i in range(2 * n)], "gain": 1.0 if wiring == "mhc" else 50.0,
                "from_mean": 6e-8, "from_newest": 0.0,
            }
            for n in STREAM_DEPTHS
        ]  # fmt: skip
    return rows


def at(wiring, num_layers=64, **values):
    """Return a change of the numbers of a stack."""

    def change(rows):
        for row in rows:
            if (row["wiring"], row["num_layers"]) == (wiring, num_layers):
                row.update(values)

    return change


def last(wiring, power):
    """Return a change of the last layer's gradient at every depth."""

    def change(rows):
        for row in rows:
            if row["wiring"] == wiring:
                row["weight_gradient"][-1] = row["num_layers"] ** power

    return change


def grows(wiring, variance):
    """Return a change of the stream's variance after each sublayer."""
    return at(wiring, variance=[*map(variance, range(129))])


CONSTANTS = "DeepNorm's constants are (2N)^(1/4) and (8N)^(-1/4)."
# The beginning of a result's name, and changes of the rows that it must detect.
PLANTED = {
    "The stream of pre-LN grows": (
        grows("pre_ln", lambda i: 1 + 0.2 * i),
        grows("pre_ln", lambda i: 1 + i),
    ),
    "The growth of pre-LN": (
        grows("pre_ln", lambda i: 1 + math.log(1 + i)),
        grows("pre_ln", lambda i: 1.1**i),
    ),
    "The input of the norm": (at("post_ln", before_norm=[1.5, 2.0] * 64),),
    "The stream of post-LN": (at("post_ln", variance=[1.0] * 128 + [1.01]),),
    "The last layer's gradient does": (last("post_ln", -0.5), last("post_ln", 0.2)),
    "The last layer's gradient falls": (last("pre_ln", 0.0), last("pre_ln", -1.0)),
    "Pre-LN's first layers": (at("pre_ln", weight_gradient=[1.0] * 64),),
    "Before training": (
        at("post_ln", weight_gradient=[0.9**i for i in range(64)]),
        at("post_ln", weight_gradient=[1.1**i for i in range(64)]),
    ),
    "The first step changes DeepNorm": (at("deepnorm", 32, step_sgd=0.21), at("deepnorm", 16, step_adam=0.21)),
    "The first step changes pre-LN": (at("post_ln", step_adam=0.19),),
    "DeepNorm's gradient": (at("deepnorm", weight_gradient=[0.2, *[1.0] * 63]),),
    "Under LayerNorm scaling": (
        grows("layernorm_scaling", lambda i: 1 + i**0.5),
        grows("layernorm_scaling", lambda i: 1 + i),
    ),
    "With a norm after": (grows("peri_ln", lambda i: 1 + 0.6 * i),),
    "Pre-LN's later layers": (at("pre_ln", 8, last_move=0.02), at("pre_ln", 64, last_move=0.02)),
    "Without the residual": (at("no_residual", similarity=[0.9] * 129),),
    "With the residual": (at("pre_ln", similarity=[0.999] * 129),),
    "Without norms": (
        grows("no_norm", lambda i: 1 + 0.5 * i),
        grows("no_norm", lambda i: 3.0**i),
    ),
    "Hyper-connections and": (at("denseformer", 16, difference=0.01),),
    "The reads of attention": (at("attention_residuals", 16, read=[*[1.0] * 31, 1.2]),),
    "Pre-LN's reads": (at("attention_residuals", 16, read=[1.0] * 31 + [2.0]),),
    "Attention residuals begin": (at("attention_residuals", 16, from_mean=1e-4),),
    "DenseFormer and": (at("denseformer", 16, from_newest=1e-4), at("muddformer", 16, from_newest=1e-4)),
    "The mixing of mHC": (at("mhc", 16, gain=0.9), at("mhc", 16, gain=2.0)),
    "The mixing of hyper-connections amplifies": (at("hyper_connections", 16, gain=1.5),),
}


def check(rows, name):
    (result,) = [check for check in check_published(rows) if check.name.startswith(name)]
    return result


def test_published_results_hold_where_theory_holds():
    assert [(check.name, check.verdict) for check in check_published(as_published()) if not check.holds] == []


@pytest.mark.parametrize(("name", "plant"), [(name, plant) for name, plants in PLANTED.items() for plant in plants])
def test_published_result_fails_on_planted_deviation(name, plant):
    rows = as_published()
    plant(rows)
    result = check(rows, name)
    assert result.holds is False
    assert result.verdict == "does not hold"


def test_every_published_result_has_a_planted_deviation(monkeypatch):
    planted = {statement.name for statement in PUBLISHED for name in PLANTED if statement.name.startswith(name)}
    assert {statement.name for statement in PUBLISHED} - planted == {CONSTANTS}
    monkeypatch.setattr(published, "deepnorm_constants", lambda kind, n: ((2 * n) ** (1 / 4), (8 * n) ** (1 / 4)))
    assert check([], CONSTANTS).holds is False


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.0])
def test_published_results_fail_on_nan_inf_and_zero(wrong):
    """Check that no exception is raised either: a report shows that the result does not hold."""

    def spoilt(value):
        return [wrong] * len(value) if isinstance(value, list) else wrong if isinstance(value, float) else value

    rows = [{key: value if key == "seeds" else spoilt(value) for key, value in row.items()} for row in as_published()]
    holding = {check.name for check in check_published(rows) if check.holds}
    valid = ("With the residual the tokens", "Hyper-connections and", "Attention residuals begin", "DenseFormer and")
    assert all(name == CONSTANTS or name.startswith(valid) for name in holding), (
        "0 is a valid similarity and difference"
    )


@pytest.mark.parametrize("wiring", WIRINGS)
def test_published_result_needs_its_wirings(wiring):
    result = check_published(row for row in as_published() if row["wiring"] != wiring)
    silent = [check for check in result if check.holds is None]
    assert silent, f"no published result needs {wiring}"
    assert all((check.verdict, check.measured) == ("not measured", {}) for check in silent)
    assert {check.holds for check in result if check not in silent} == {True}


def test_without_rows_only_constants_are_checked():
    assert [check.name for check in check_published([]) if check.holds is not None] == [CONSTANTS]


def test_shallow_stacks_do_not_decide_shapes():
    """Over two layers any curve is straight, and R^2 is 1."""
    shallow = [row for row in as_published() if row["num_layers"] <= 4]
    for name in ("The growth of", "Under LayerNorm", "Pre-LN's first", "The last layer's", "The first step changes",
                 "Pre-LN's later", "Without norms"):  # fmt: skip
        result = [check for check in check_published(shallow) if check.name.startswith(name)]
        assert all(check.holds is None for check in result), name
    assert check(shallow, "The stream of post-LN").holds


def test_shallow_stacks_match_the_papers():
    """Measure stacks of 16 layers, and check the bands that three seeds keep."""
    result = summarize(measure_init(job) for job in init_stacks(depths=(2, 16), seeds=range(FIRST, FIRST + 3)))
    for name in ("The stream of post-LN", "The first step changes DeepNorm", "The first step changes pre-LN",
                 "DeepNorm's gradient", "DeepNorm's constants", "Without the residual", "With the residual"):  # fmt: skip
        assert check(result, name).holds, check(result, name)


@pytest.mark.slow
def test_untrained_stacks_match_the_papers():
    """Measure the default of a report. `ADDNORM_SEEDS=1000` uses other seeds."""
    seeds = range(FIRST, FIRST + SEEDS)
    jobs = [*init_stacks(seeds=seeds), *init_stacks(STREAM_WIRINGS, STREAM_DEPTHS, seeds)]
    result = check_published(summarize(map(measure_init, jobs)))
    assert [check for check in result if not check.holds] == []
