"""addnorm.lab.theory and addnorm.lab.published: what is measured before training, and what the papers say of it."""

import copy
import json
import math
import os
import pickle
import random
import statistics

import cloudpickle
import pytest
import torch
import torch.nn.functional as F

from addnorm import Row, Wiring, wirings
from addnorm.lab import published
from addnorm.lab.published import CHECKS, Check, checks
from addnorm.lab.theory import DEPTHS, SEEDS, WIRINGS, AtInit, at_init, jobs, label, one_step, summary
from addnorm.lab.toy_model import Toy, geometric_mean, likeness

FIRST = int(os.environ.get("ADDNORM_SEEDS", "0"))


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)


# ------------------------------------------------------------------------------------------------ what is measured


def by_hand(job, **options):
    """The model of a job, with every stream kept by autograd, one sublayer after another, by the equation."""
    model = Toy(job.num_layers, job.wiring, job.seed, init=job.own_init, sequences=4, judged=32, **options)
    x = model.x.clone().requires_grad_()
    if job.wiring.embedding_norm:
        x = F.layer_norm(x, (64,))
    streams, writes, sums = [x], [], []
    for here in model.stack.connections:
        row = here.row
        x = streams[-1]
        f = here.sublayer(row.c * (F.layer_norm(x, (64,)) if row.norm_in else x))
        writes.append(row.b * (F.layer_norm(f, (64,)) if row.norm_branch else f))
        sums.append(row.a * x + writes[-1])
        streams.append(F.layer_norm(sums[-1], (64,)) if row.norm_out else sums[-1])
    for one in streams:
        one.retain_grad()
    y = F.layer_norm(streams[-1], (64,)) if job.wiring.final_norm else streams[-1]
    return model, streams, writes, sums, y


@pytest.mark.parametrize(
    "wiring", [*WIRINGS, "sandwich", wirings.depth_mup(), Wiring("mine", Row(norm_in=True, a=0.5))]
)
def test_the_figures_are_those_of_the_equation_and_autograd(wiring):
    (job,) = jobs([wiring], [3], [5])
    found = at_init(job)
    model, streams, writes, sums, y = by_hand(job)
    F.cross_entropy(model.head(y[0]), model.targets).backward()
    gradients = [x.grad for x in streams]
    weights = [layer[1].sublayer[-1].weight.grad for layer in model.stack.layers()]
    streams, writes, sums = ([x.detach() for x in some] for some in (streams, writes, sums))
    expect = {
        "variance": [float(x.square().mean()) for x in streams],
        "before_norm": [float(x.square().mean()) for x in sums],
        "likeness": [likeness(x) for x in streams],
        "write_ratio": [float(w.norm() / x.norm()) for w, x in zip(writes, streams, strict=False)],
        "gradient": [float(g.norm()) for g in gradients],
        "gradient_ratio": float(gradients[0].norm() / gradients[-1].norm()),
        "weight_gradient": [float(g.norm()) for g in weights],
        "last_move": float(1 - F.cosine_similarity(streams[-3], streams[-1], dim=-1).mean()),
    }
    assert (found["wiring"], found["num_layers"], found["seed"]) == (label(job.wiring), 3, 5)
    for key, value in expect.items():
        assert found[key] == pytest.approx(value, rel=1e-3, abs=1e-6), key
    assert len(found["variance"]) == 7
    assert len(found["before_norm"]) == 6


@pytest.mark.parametrize(
    ("key", "optimizer"),
    [
        ("sgd", lambda weights: torch.optim.SGD(weights, lr=0.1)),
        ("adam", lambda weights: torch.optim.Adam(weights, lr=1e-3)),
    ],
)
@pytest.mark.parametrize("wiring", ["pre_ln", "post_ln", "deepnorm"])
def test_the_first_step_is_torchs(wiring, key, optimizer):
    (job,) = jobs([wiring], [4], [1])
    model, *_, y = by_hand(job, mixing="none")
    before = model.head(y[0])
    F.cross_entropy(before, model.targets).backward()
    optimizer(list(model.parameters())).step()
    after = model.head(model.stack(model.x)[0])
    change = float(((after - before).norm() / before.norm()).detach())
    assert one_step(job)[key] == pytest.approx(change, rel=1e-3)
    assert at_init(job)[f"step_{key}"] == one_step(job)[key] > 0


def test_deepnorm_is_initialized_by_its_own_rule_and_the_others_alike():
    own = {label(job.wiring): job.own_init for job in jobs([*WIRINGS, "sandwich", "admin"], [2], [0])}
    assert {name for name, is_own in own.items() if is_own} == {"deepnorm", "admin"}
    job = AtInit(wirings.deepnorm(), 2, 0)
    assert at_init(job) != at_init(AtInit(wirings.deepnorm(), 2, 0, own_init=True))


def test_a_stack_that_overflows_is_told_in_numbers():
    (job,) = jobs(["no_norm"], [250], [0])
    found = at_init(job)
    assert found["step_sgd"] == math.inf
    assert not math.isfinite(found["variance"][-1]) or found["variance"][-1] > 1e30
    assert json.loads(json.dumps(found))["step_sgd"] == math.inf


def test_learned_factors_that_start_at_zero_are_measured_too():
    found = at_init(*jobs(["rezero"], [2], [0]))
    assert found["write_ratio"] == [0.0] * 4
    assert found["weight_gradient"] == [0.0, 0.0]
    assert summary([found])[0]["weight_gradient"] == [0.0, 0.0]


@pytest.mark.parametrize("name", ["parallel", "resi_dual", "b2t"])
def test_a_wiring_without_one_stream_is_refused(name):
    with pytest.raises(ValueError, match=f"wiring is '{name}', expected one whose sublayers each have a row"):
        jobs([name])


# --------------------------------------------------------------------------------------------- jobs and summaries


def test_every_wiring_at_every_depth_with_every_seed():
    made = jobs()
    assert len(made) == len(set(made)) == len(WIRINGS) * len(DEPTHS) * SEEDS
    assert {job.num_layers for job in made} == set(DEPTHS)


def test_a_job_goes_to_another_process_and_its_result_into_json():
    for job in jobs(depths=[2], seeds=[0]):
        found = at_init(job)
        for how in (pickle, cloudpickle):
            again = how.loads(how.dumps(job))
            assert again == job
            assert at_init(again) == found, "a job is its wiring, depth and seed"
        assert json.loads(json.dumps(found, allow_nan=False)) == found
    mine = AtInit(Wiring("mine", lambda at: Row(norm_in=True, b=1 / at.number), final_norm=True), 2, 0)
    assert at_init(cloudpickle.loads(cloudpickle.dumps(mine))) == at_init(mine)


def test_a_summary_is_of_the_seeds_and_of_no_order():
    found = [at_init(job) for job in jobs(["pre_ln", "no_norm"], [2, 3], [4, 2, 7])]
    rows = summary(found)
    shuffled = random.Random(0).sample(found, len(found))
    assert summary(iter(shuffled)) == rows
    assert [(row["wiring"], row["num_layers"]) for row in rows] == [
        ("no_norm", 2), ("no_norm", 3), ("pre_ln", 2), ("pre_ln", 3),
    ]  # fmt: skip
    members = [one for one in found if (one["wiring"], one["num_layers"]) == ("pre_ln", 3)]
    row = rows[-1]
    assert row["seeds"] == [2, 4, 7]
    assert set(row) == set(members[0]) - {"seed"} | {"seeds"}
    for key in ("variance", "before_norm", "likeness"):
        assert row[key][2] == pytest.approx(statistics.fmean(one[key][2] for one in members)), key
    for key in ("gradient", "write_ratio", "weight_gradient"):
        assert row[key][1] == pytest.approx(geometric_mean(one[key][1] for one in members)), key
    assert row["last_move"] == pytest.approx(statistics.fmean(one["last_move"] for one in members))
    assert row["step_sgd"] == pytest.approx(geometric_mean(one["step_sgd"] for one in members))
    assert json.loads(json.dumps(rows)) == rows


def test_the_same_job_twice_is_refused_and_so_are_two_wirings_of_one_name():
    found = at_init(*jobs(["pre_ln"], [2], [0]))
    with pytest.raises(ValueError, match="pre_ln, 2 layers, seed 0 came twice"):
        summary([found, found])


def test_a_label_tells_options_apart():
    assert label(wirings.pre_ln()) == "pre_ln"
    assert label(wirings.depth_mup(1.4)) == "depth_mup(k=1.4)"
    for name in ("mine", "W", "pre_ln"):  # the last is not the pre_ln of the table
        assert label(Wiring(name, Row(norm_in=True, b=0.5))) == name


# ------------------------------------------------------------------------------------------------------ the checks


def as_published():
    """A summary in which everything is as the theory says."""
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
                "likeness": [1.0 if wiring == "no_residual" else 0.5] * (2 * n + 1), "last_move": 1 / (2 * n),
                "weight_gradient": gradient, "step_sgd": steps.get(wiring, 1.0), "step_adam": steps.get(wiring, 1.0),
            })  # fmt: skip
    return rows


def of(rows, wiring, num_layers=64):
    return next(row for row in rows if (row["wiring"], row["num_layers"]) == (wiring, num_layers))


def curve(wiring, key, values):
    """A change of a number of the deepest stack."""
    return lambda rows: of(rows, wiring).update({key: values})


def last(wiring, power):
    """A change of the last layer's gradient at every depth."""

    def change(rows):
        for n in DEPTHS:
            of(rows, wiring, n)["weight_gradient"][-1] = n**power

    return change


SUBLAYERS = range(129)
CONSTANTS = "DeepNorm's constants are (2N)^(1/4) and (8N)^(-1/4)."
# Each check's name begins so; what is planted, so that it must not hold, and no other way.
PLANTED = [
    ("The stream of pre-LN grows", curve("pre_ln", "variance", [1 + 0.2 * i for i in SUBLAYERS])),
    ("The stream of pre-LN grows", curve("pre_ln", "variance", [1 + i for i in SUBLAYERS])),
    ("And it is a straight", curve("pre_ln", "variance", [1 + math.log(1 + i) for i in SUBLAYERS])),
    ("And it is a straight", curve("pre_ln", "variance", [1.1**i for i in SUBLAYERS])),
    ("What enters", curve("post_ln", "before_norm", [1.5, 2.0] * 64)),
    ("The stream of post-LN", curve("post_ln", "variance", [1.0] * 128 + [1.01])),
    ("The last layer's gradient", last("post_ln", -0.5)),
    ("The last layer's gradient", last("post_ln", 0.2)),
    ("It falls like the root", last("pre_ln", 0.0)),
    ("It falls like the root", last("pre_ln", -1.0)),
    ("Pre-LN's first layers", curve("pre_ln", "weight_gradient", [1.0] * 64)),
    ("Before training", curve("post_ln", "weight_gradient", [0.9**i for i in range(64)])),
    ("Before training", curve("post_ln", "weight_gradient", [1.1**i for i in range(64)])),
    ("The first step moves DeepNorm", lambda rows: of(rows, "deepnorm", 32).update(step_sgd=0.21)),
    ("The first step moves DeepNorm", lambda rows: of(rows, "deepnorm", 16).update(step_adam=0.21)),
    ("The first step moves pre-LN", lambda rows: of(rows, "post_ln").update(step_adam=0.19)),
    ("DeepNorm's gradient", curve("deepnorm", "weight_gradient", [0.2, *[1.0] * 63])),
    ("Under LayerNorm scaling", curve("layernorm_scaling", "variance", [1 + i**0.5 for i in SUBLAYERS])),
    ("Under LayerNorm scaling", curve("layernorm_scaling", "variance", [1 + i for i in SUBLAYERS])),
    ("With a norm after", curve("peri_ln", "variance", [1 + 0.6 * i for i in SUBLAYERS])),
    ("Pre-LN's last layers", lambda rows: of(rows, "pre_ln", 8).update(last_move=0.02)),
    ("Pre-LN's last layers", lambda rows: of(rows, "pre_ln", 64).update(last_move=0.02)),
    ("Without the residual", curve("no_residual", "likeness", [0.9] * 129)),
    ("With it they", curve("pre_ln", "likeness", [0.999] * 129)),
    ("Without norms", curve("no_norm", "variance", [1 + 0.5 * i for i in SUBLAYERS])),
    ("Without norms", curve("no_norm", "variance", [3.0**i for i in SUBLAYERS])),
]


def check(rows, name):
    (found,) = [one for one in checks(rows) if one.name.startswith(name)]
    return found


def test_what_is_as_published_holds():
    assert [(one.name, one.verdict) for one in checks(as_published()) if not one.holds] == []


@pytest.mark.parametrize(("name", "plant"), PLANTED, ids=[f"{name}-{i}" for i, (name, _) in enumerate(PLANTED)])
def test_what_is_not_as_published_does_not_hold(name, plant):
    rows = as_published()
    plant(rows)
    found = check(rows, name)
    assert found.holds is False
    assert found.verdict == "does not hold"


def test_every_check_was_made_to_fail(monkeypatch):
    planted = {one.name for one in CHECKS for name, _ in PLANTED if one.name.startswith(name)}
    assert {one.name for one in CHECKS} - planted == {CONSTANTS}
    monkeypatch.setattr(published, "deepnorm_constants", lambda kind, n: ((2 * n) ** (1 / 4), (8 * n) ** (1 / 4)))
    assert check([], CONSTANTS).holds is False


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.0])
def test_what_is_no_number_makes_nothing_hold(wrong):
    """Not by an exception either: a report says that it does not hold."""

    def spoilt(value):
        return [wrong] * len(value) if isinstance(value, list) else wrong if isinstance(value, float) else value

    rows = [{key: value if key == "seeds" else spoilt(value) for key, value in row.items()} for row in as_published()]
    holding = {one.name for one in checks(rows) if one.holds}
    assert holding <= {CONSTANTS, "With it they do not."}, "0 is no likeness at all"


@pytest.mark.parametrize("wiring", WIRINGS)
def test_without_its_wirings_a_check_says_that_nothing_was_measured(wiring):
    found = checks(row for row in as_published() if row["wiring"] != wiring)
    silent = [one for one in found if one.holds is None]
    assert silent, f"no check needs {wiring}"
    assert all((one.verdict, one.measured) == ("not measured", {}) for one in silent)
    assert all(one.holds for one in found if one not in silent)


def test_without_anything_only_the_constants_are_judged():
    assert [one.name for one in checks([]) if one.holds is not None] == [CONSTANTS]


def test_a_shallow_stack_does_not_judge_the_shape_of_a_curve():
    """Over two layers any curve is straight: R^2 would be 1."""
    shallow = [row for row in as_published() if row["num_layers"] <= 4]
    for name in ("And it is", "Under LayerNorm", "Pre-LN's first", "The last layer's", "It falls", "The first step moves",
                 "Pre-LN's last", "Without norms"):  # fmt: skip
        found = [one for one in checks(shallow) if one.name.startswith(name)]
        assert all(one.holds is None for one in found), name
    assert check(shallow, "The stream of post-LN").holds


def test_a_check_is_data():
    for one in checks(as_published()):
        said = json.loads(json.dumps(one.as_dict(), allow_nan=False))
        assert said["verdict"] == "holds"
        assert said["measured"] == one.measured
        assert said["source"]
        assert said["criterion"]
        assert said["why"]
    band = Check("a", "b", "c", "d", (0.0, 1.0), {"x": 0.0, "y": 1.0})
    assert band.holds
    assert not Check("a", "b", "c", "d", (0.0, 1.0), {"x": 0.0, "y": 1.01}).holds


def test_checks_do_not_change_what_they_look_at():
    rows = as_published()
    before = copy.deepcopy(rows)
    checks(rows)
    assert rows == before


def test_shallow_stacks_already_show_what_does_not_need_depth():
    """Measured, not planted: 16 layers, and bands that three seeds keep."""
    found = summary(at_init(job) for job in jobs(depths=(2, 16), seeds=range(FIRST, FIRST + 3)))
    for name in ("The stream of post-LN", "The first step moves DeepNorm", "The first step moves pre-LN",
                 "DeepNorm's gradient", "DeepNorm's constants", "Without the residual", "With it they"):  # fmt: skip
        assert check(found, name).holds, check(found, name)


@pytest.mark.slow
def test_before_training_all_is_as_published():
    """The default of a report. `ADDNORM_SEEDS=1000` takes other seeds."""
    found = checks(summary(at_init(job) for job in jobs(seeds=range(FIRST, FIRST + SEEDS))))
    assert [one for one in found if not one.holds] == []
