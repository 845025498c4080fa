"""The trace against what the lessons print, against float64 autograd, and against finite differences."""

import dataclasses
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

import addnorm
from addnorm.trace import PRESETS, show, trace

X, SUBLAYER = (1.0, 2.0, 3.0), (0.5, -1.0, 1.5)
VARIANTS = [
    {"placement": placement, "norm": norm, "variance": variance, "eps_place": eps_place}
    for placement, norm, variance, eps_place in itertools.product(
        ["post", "pre"], ["layer", "rms"], ["biased", "unbiased"], ["inside", "outside"]
    )
    if (norm, variance) != ("rms", "unbiased")
]


def name_of(variant):
    return "-".join(variant.values())


# The lessons


@pytest.mark.parametrize(
    ("preset", "step"), [(preset, step) for preset in PRESETS.values() for step in preset.printed], ids=str
)
def test_every_number_that_a_lesson_prints_is_right_to_the_places_printed(preset, step):
    followed, printed = preset.trace(), preset.printed[step]
    assert printed.agrees(followed[step].value)
    assert f"the lesson prints {printed.values[0]}" in followed[step].note.replace("[", "")


# As they stand in the lessons: so that no preset can lose one.
LESSONS = {
    "lesson-000": {
        "x": "1.0 2.0 3.0", "sublayer": "0.5 -1.0 1.5", "z": "1.5 1.0 4.5", "mean": "2.33", "variance": "2.39",
        "normalized": "-0.54 -0.86 1.40", "shifted": "-0.54 -0.86 1.40",
    },
    "lesson-001": {
        "x": "1.8 -0.3 0.8", "sublayer": "1.36 0.91 1.07", "z": "3.16 0.61 1.87", "mean": "1.88",
        "centred": "1.28 -1.27 -0.01", "squares": "1.6384 1.6129 0.0001", "variance": "1.08", "root": "1.04",
        "normalized": "1.23 -1.22 -0.01",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LESSONS)
def test_a_preset_carries_all_that_its_lesson_prints(name):
    assert {step: " ".join(printed.values) for step, printed in PRESETS[name].printed.items()} == LESSONS[name]


def test_the_sums_that_a_lesson_prints_are_in_the_numbers():
    followed = PRESETS["lesson-001"].trace()
    assert followed["mean"].numbers == "(3.16 + 0.61 + 1.87) / 3 = 5.64 / 3"
    assert followed["variance"].numbers.startswith("(1.6384 + 1.6129 + 0.0001) / 3")


def test_where_a_lesson_goes_on_from_rounded_numbers_the_trace_says_so():
    followed = PRESETS["lesson-001"].trace(digits=5)
    assert show(math.sqrt(1.08)) == "1.0392"
    assert show(math.sqrt(1.0838)) == "1.0411"
    assert show(followed["root"].value) == "1.0411"
    assert "1.08, already rounded, 1.0392" in followed["root"].note
    from_rounded = [f"{c / 1.04:.4f}" for c in (1.28, -1.27, -0.01)]
    assert f"[{', '.join(from_rounded)}]" in followed["normalized"].note
    assert [f"{v:.4f}" for v in followed["normalized"].value] == ["1.2295", "-1.2199", "-0.0096"]


def test_a_printed_number_that_is_off_would_be_told_with_the_right_one():
    from addnorm.trace import Printed

    off = Printed(("1.23", "-1.23"), "from rounded numbers")
    assert not off.agrees((1.2295, -1.2199))
    assert off.note((1.2295, -1.2199)) == (
        "the lesson prints [1.23, -1.23], which to that precision is [1.23, -1.22]: from rounded numbers"
    )


def test_gamma_of_sigma_and_beta_of_mu_undo_the_norm_but_for_eps():
    followed = PRESETS["undo"].trace()
    z, y = followed["z"].value, followed.output
    off = max(abs(a - b) for a, b in zip(y, z, strict=True))
    assert f"{off:.1e}" == "5.9e-06"
    assert "5.9e-06" in followed["shifted"].note
    exactly = PRESETS["undo"].trace(weight=math.sqrt(followed["variance"].value + 1e-5))
    assert exactly.output == pytest.approx(z, rel=1e-14)


def test_the_mismatches_are_those_of_torch_std():
    z = torch.tensor([1.5, 1.0, 4.5], dtype=torch.float64)
    unbiased = PRESETS["unbiased"].trace()
    assert unbiased["variance"].value == pytest.approx(z.var().item(), rel=1e-14)
    assert f"{math.sqrt(2 / 3):.4f}" == "0.8165"
    ratio = [a / b for a, b in zip(unbiased.output, trace(X, SUBLAYER).output, strict=True)]
    assert ratio == pytest.approx([math.sqrt(2 / 3)] * 3, rel=1e-5)
    annotated = PRESETS["annotated-transformer"].trace()
    assert annotated.output == pytest.approx(((z - z.mean()) / (z.std() + 1e-6)).tolist(), rel=1e-14)
    for preset in ("unbiased", "annotated-transformer"):
        assert "[-0.53916, -0.86266, 1.4018]" in PRESETS[preset].trace()["normalized"].note


def test_a_changed_preset_keeps_its_notes_only_if_its_forward_is_the_same():
    preset = PRESETS["lesson-000"]
    assert "lesson prints" in preset.trace(grad=[0, 1, 0], digits=3)["mean"].note
    changed = preset.trace(placement="pre")
    assert "lesson" not in changed["mean"].note
    assert changed.title.endswith("changed: placement")


# Independent arithmetic


def oracle(x, sublayer, jacobian, weight, bias, eps, grad, placement, norm, variance, eps_place):
    """The same in float64 torch with autograd; the sublayer is an affine map that returns `sublayer` for this token."""
    x, s, weight, bias = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (x, sublayer, weight, bias))

    def normalize(z):
        if norm == "layer":
            centred, spread = z - z.mean(), z.var(correction=int(variance == "unbiased"))
        else:
            centred, spread = z, z.square().mean()
        root = (spread + eps).sqrt() if eps_place == "inside" else spread.sqrt() + eps
        return centred / root * weight + bias

    if placement == "post":
        out = normalize(x + s)
    else:
        read = normalize(x)
        out = x + s + torch.tensor(jacobian, dtype=torch.float64) @ (read - read.detach())
    out.backward(torch.tensor(grad, dtype=torch.float64))
    return {
        "output": out.tolist(), "dx": x.grad.tolist(), "dsublayer": s.grad.tolist(), "dweight": weight.grad.tolist(),
        "dbias": bias.grad.tolist(),
    }  # fmt: skip


@st.composite
def calls(draw):
    d = draw(st.integers(2, 9))
    numbers = st.floats(-100, 100, allow_subnormal=False)
    vector = st.lists(numbers, min_size=d, max_size=d)
    x, sublayer, weight, bias, grad = (draw(vector) for _ in range(5))
    jacobian = draw(st.lists(vector, min_size=d, max_size=d))
    return x, sublayer, jacobian, weight, bias, draw(st.sampled_from([1e-6, 1e-5, 1e-2, 1.0])), grad


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
@given(call=calls())
def test_forward_and_backward_are_those_of_float64_autograd(variant, call):
    x, sublayer, jacobian, weight, bias, eps, grad = call
    d, extra = len(x), {}
    if variant["placement"] == "pre":
        extra["read_grad"] = [sum(jacobian[i][j] * grad[i] for i in range(d)) for j in range(d)]
    ours = trace(x, sublayer, weight=weight, bias=bias, eps=eps, grad=grad, **variant, **extra)
    spread = ours["variance" if variant["norm"] == "layer" else "mean_square"].value
    # at sigma = 0 autograd has nan for eps outside the root; near it, both only have rounding errors to normalize
    assume(variant["eps_place"] == "inside" or spread > 1e-6)
    theirs = oracle(x, sublayer, jacobian, weight, bias, eps, grad, **variant)
    # roundings of z, carried through 1/root; of the gradient, once more
    root, largest = ours["root"].value, 1 + max(map(abs, [*x, *sublayer]))
    carried = 50 * d * 2**-53 * (1 + largest / root)
    size = 1 + max(map(abs, [*grad, *extra.get("read_grad", [])]))
    gain = 1 + max(map(abs, weight))
    assert ours.output == pytest.approx(theirs["output"], rel=0, abs=carried * (gain + 100))
    assert ours["dweight"].value == pytest.approx(theirs["dweight"], rel=0, abs=carried * size)
    assert ours["dbias"].value == pytest.approx(theirs["dbias"], rel=0, abs=carried * size)
    for name in ("dx", "dsublayer"):
        assert ours[name].value == pytest.approx(theirs[name], rel=0, abs=carried * size * (1 + gain / root))


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_the_backward_is_the_slope_of_the_forward(variant):
    x, sublayer, weight, bias = (
        [0.7, -1.1, 0.4, 2.0],
        [0.2, 0.5, -0.3, 0.1],
        [1.5, -0.5, 2.0, 1.0],
        [0.1, 0.2, 0.3, 0.4],
    )
    grad, h, options = [0.3, -1.2, 0.8, 0.5], 1e-5, {"eps": 0.1, **variant}  # an eps that counts

    def loss(x=x, sublayer=sublayer, weight=weight, bias=bias):
        followed = trace(x, sublayer, weight=weight, bias=bias, **options)
        # in pre-LN, with the identity for its Jacobian, the sublayer adds what it reads
        read = followed["shifted"].value if variant["placement"] == "pre" else [0.0] * 4
        return sum(g * (y + r) for g, y, r in zip(grad, followed.output, read, strict=True))

    followed = trace(x, sublayer, weight=weight, bias=bias, grad=grad, **options)
    for name, step in (("x", "dx"), ("sublayer", "dsublayer"), ("weight", "dweight"), ("bias", "dbias")):
        start = {"x": x, "sublayer": sublayer, "weight": weight, "bias": bias}[name]
        for k, slope in enumerate(followed[step].value):
            up, down = ([v + sign * h * (j == k) for j, v in enumerate(start)] for sign in (1, -1))
            assert slope == pytest.approx((loss(**{name: up}) - loss(**{name: down})) / (2 * h), abs=1e-8)


def test_it_is_layer_norm_and_rms_norm_and_the_library():
    z = torch.tensor([1.5, 1.0, 4.5], dtype=torch.float64)
    x, sublayer = (torch.tensor(v, dtype=torch.float64) for v in (X, SUBLAYER))
    layer, rms = trace(X, SUBLAYER).output, trace(X, SUBLAYER, norm="rms", eps=1e-6).output
    assert layer == pytest.approx(F.layer_norm(z, (3,)).tolist(), rel=1e-14)
    assert rms == pytest.approx(F.rms_norm(z, (3,), eps=1e-6).tolist(), rel=1e-14)
    assert layer == pytest.approx(addnorm.add_layer_norm(x, sublayer).tolist(), rel=1e-14)
    assert rms == pytest.approx(addnorm.add_rms_norm(x, sublayer, eps=1e-6).tolist(), rel=1e-14)


# The steps


def test_the_steps_stand_in_order():
    post = """x sublayer z mean centred squares variance root normalized scaled shifted
        check_mean check_variance expected grad grad_scaled grad_mean projection dz dx dsublayer dweight dbias"""
    assert " ".join(step.name for step in trace(X, SUBLAYER)) == " ".join(post.split())
    pre = """x squares mean_square root normalized scaled shifted sublayer z check_mean check_square expected
        grad straight dsublayer read_grad grad_scaled projection dnorm dx dweight dbias"""
    followed = trace(X, SUBLAYER, placement="pre", norm="rms")
    assert " ".join(step.name for step in followed) == " ".join(pre.split())


def test_sums_run_from_left_to_right():
    assert trace([1e16, 1.0, -1e16], [0, 0, 0])["mean"].value == 0.0
    assert trace([1e16, -1e16, 1.0], [0, 0, 0])["mean"].value == 1 / 3


def test_a_step_has_its_formula_its_numbers_and_its_value():
    step = trace(X, SUBLAYER)["variance"]
    assert (step.section, step.symbol, step.formula) == ("forward", "σ²", "(1/d) Σ (zₖ - μ)²")
    assert step.numbers == "(0.69444 + 1.7778 + 4.6944) / 3 = 7.1667 / 3"
    assert step.lines() == [
        "σ² = (1/d) Σ (zₖ - μ)² = (0.69444 + 1.7778 + 4.6944) / 3", "= 7.1667 / 3 = 2.3889"
    ]  # fmt: skip
    assert step.value == pytest.approx(43 / 18, rel=1e-15)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_the_checks_say_what_eps_takes(variant):
    followed = trace([0.01, -0.02, 0.03], [0, 0, 0], **variant)
    found = followed["check_variance" if variant["norm"] == "layer" else "check_square"].value
    assert found == pytest.approx(followed["expected"].value, rel=1e-12)
    assert found < 0.9995
    assert f"short of 1 by {1 - followed['expected'].value:.2g}" in followed["expected"].note
    if variant["norm"] == "layer":
        assert abs(followed["check_mean"].value) < 1e-15
    else:
        assert followed["check_mean"].note == "RMSNorm takes no mean away"


def test_the_gradient_of_a_layer_norm_sums_to_zero_and_splits_equally():
    followed = trace(X, SUBLAYER, grad=[0.3, -1.0, 2.0], weight=[1, 2, 3])
    assert abs(math.fsum(followed["dz"].value)) < 1e-15
    assert followed["dz"].value == followed["dx"].value == followed["dsublayer"].value


def test_pre_ln_has_a_straight_path():
    grad, read_grad = (0.3, -1.0, 2.0), (0.0, 0.0, 0.0)
    followed = trace(X, SUBLAYER, placement="pre", grad=grad, read_grad=read_grad)
    assert followed["dx"].value == followed["straight"].value == followed["dsublayer"].value == grad
    default = trace(X, SUBLAYER, placement="pre", grad=grad)
    assert default["read_grad"].value == grad
    assert "identity" in default["read_grad"].note
    assert default.output == default["z"].value == (1.5, 1.0, 4.5)


def test_one_number_stands_for_all_of_gamma_or_beta():
    assert trace(X, SUBLAYER, weight=2, bias=0.5).output == trace(X, SUBLAYER, weight=[2] * 3, bias=[0.5] * 3).output


def test_tensors_and_any_iterable_will_do():
    assert trace(torch.tensor(X), iter(SUBLAYER)).output == trace(X, SUBLAYER).output


# The edges

EDGES = [
    (0.0, 0.0),
    (0.1, 0.1, 0.1),
    (3.0,),
    (1e30, -2e30),
    (1e308, 1e308),
    (1e200, -1e200, 1.0),
    (1e-320, 0.0),
    (1e-30, 2e-30),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
@pytest.mark.parametrize("x", EDGES, ids=str)
@pytest.mark.parametrize("eps", [1e-5, 0.0])
def test_no_token_is_refused_and_what_is_not_finite_says_why(variant, x, eps):
    followed = trace(x, x, eps=eps, **variant)
    json.dumps(followed.to_dict(), allow_nan=False)
    assert str(followed)
    broken = [step for step in followed if not step.finite]
    if broken:
        assert re.search("overflow|0/0|division by 0", broken[0].note)


def test_equal_features_give_beta_and_a_gradient_that_only_eps_bounds():
    followed = trace([2.0, 2.0], [1.0, 1.0], weight=[5, 6], bias=[7, 8], grad=[1, 0])
    assert followed.output == (7.0, 8.0)
    assert "all features are equal" in followed["normalized"].note
    assert followed["dz"].value == pytest.approx([2.5 / math.sqrt(1e-5) - 0.0, -2.5 / math.sqrt(1e-5)])


def test_equal_features_with_eps_outside_have_the_limit_where_autograd_has_nan():
    followed = trace([2.0, 2.0], [1.0, 1.0], grad=[1, 0], eps=0.1, eps_place="outside")
    h, y = 1e-9, trace([2.0, 2.0], [1.0, 1.0], eps=0.1, eps_place="outside").output
    moved = trace([2.0 + h, 2.0], [1.0, 1.0], eps=0.1, eps_place="outside").output
    assert followed["dz"].value == pytest.approx([5.0, -5.0])
    assert (moved[0] - y[0]) / h == pytest.approx(5.0, rel=1e-6)
    assert "autograd gives nan" in followed["dz"].note


def test_a_lone_feature_gives_beta():
    followed = trace([123.0], [4.0], weight=3, bias=5, grad=[2])
    assert followed.output == (5.0,)
    assert followed["dz"].value == (0.0,)
    assert "d = 1" in followed["normalized"].note
    lost = trace([123.0], [4.0], variance="unbiased")
    assert math.isnan(lost["variance"].value)
    assert "0/0" in lost["variance"].note


def test_1e30_is_exact_and_squares_that_overflow_give_beta():
    assert trace([1e30, -1e30], [0, 0]).output == (1.0, -1.0)
    followed = trace([1e200, -1e200], [0, 0], bias=3)
    assert followed["squares"].value == (math.inf, math.inf)
    assert "overflow" in followed["squares"].note
    assert followed.output == (3.0, 3.0)
    assert followed["dz"].value == (0.0, 0.0)
    assert followed.to_dict()["steps"][5]["value"] == [None, None]
    assert followed.to_dict()["steps"][5]["finite"] is False


def test_a_sum_that_overflows_is_inf_and_then_nan():
    followed = trace([1e308, 1.0], [1e308, 1.0])
    assert followed["z"].value == (math.inf, 2.0)
    assert "1.8e308" in followed["z"].note
    assert all(map(math.isnan, followed.output))


# The text and the data


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_the_table_fits_80_columns_and_shows_every_step(preset):
    followed = preset.trace()
    lines = str(followed).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if re.match(r"[a-z_]+  ", line)] == [step.name for step in followed]


def test_long_vectors_are_shown_by_their_ends():
    followed = trace(range(1000), [1.0] * 1000, placement="pre")
    assert max(map(len, str(followed).splitlines())) <= 80
    assert len(followed.to_dict()["output"]) == 1000
    assert "(1000 numbers)" in str(followed)


def test_the_data_is_json_and_says_its_version():
    followed = PRESETS["lesson-001"].trace()
    data = json.loads(json.dumps(followed.to_dict(), allow_nan=False))
    assert data["schema"] == 1
    assert data["output"] == list(followed.output)
    assert {step["name"]: step["value"] for step in data["steps"]} == {
        step.name: list(step.value) if isinstance(step.value, tuple) else step.value for step in followed
    }


def test_a_trace_is_frozen_and_knows_its_steps_by_name():
    followed = trace(X, SUBLAYER)
    assert "mean" in followed
    assert "mode" not in followed
    with pytest.raises(KeyError, match="'mode' is no step of this trace, expected one of: x, sublayer, z, mean"):
        followed["mode"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        followed.eps = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        followed["mean"].value = 1.0


def test_it_needs_the_standard_library_only():
    folder = Path(addnorm.__file__).parent / "trace"
    code = """
import importlib.util, pathlib, sys
folder = pathlib.Path(sys.argv[1])
places = {"submodule_search_locations": [str(folder)]}
spec = importlib.util.spec_from_file_location("alone", folder / "__init__.py", **places)
alone = sys.modules["alone"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(alone)
print(alone.PRESETS["lesson-000"].trace()["z"].value)
"""
    # -S: no installed packages at all
    command = [sys.executable, "-I", "-S", "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "(1.5, 1.0, 4.5)\n"


# What is refused


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (((1, 2, 3), (1, 2)), "sublayer has 2 numbers, expected 3, the length of x: they are added element by element"),
        (((), ()), "x is empty, expected at least one number"),
        (((1, math.nan), (1, 2)), r"x\[1\] is nan, expected a finite number"),
        (((1, 2), (1, -math.inf)), r"sublayer\[1\] is -inf, expected a finite number"),
        (((1, "a"), (1, 2)), r"x\[1\] is 'a', expected a number"),
        (("1,2", (1, 2)), "x is the text '1,2', expected numbers"),
        ((5, (1, 2)), "x is 5, expected a vector"),
        ((torch.ones(2, 2), (1, 2)), r"x\[0\] is tensor.*, expected a number"),
        (((10**400, 1), (1, 2)), r"x\[0\] is 1000.*, expected a number"),
    ],
    ids=str,
)
def test_bad_vectors_are_refused_in_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        trace(*arguments)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"weight": [1, 2]}, "weight has 2 numbers, expected 3, the length of x"),
        ({"weight": [1]}, "weight has 1 number, expected 3"),
        ({"bias": "no"}, "bias is the text 'no', expected numbers"),
        ({"grad": [1, 2, 3, 4]}, "grad has 4 numbers, expected 3"),
        ({"eps": -1}, "eps is -1, expected a number >= 0"),
        ({"eps": math.nan}, "eps is nan, expected a finite number"),
        ({"placement": "middle"}, "placement is 'middle', expected 'post' or 'pre'"),
        ({"norm": "batch"}, "norm is 'batch', expected 'layer' or 'rms'"),
        ({"variance": "unbiased", "norm": "rms"}, "variance is 'unbiased', but RMSNorm has no variance"),
        ({"read_grad": [1, 2, 3]}, "read_grad came with placement 'post'"),
        ({"digits": 0}, "digits is 0, expected a whole number from 1 to 17"),
    ],
    ids=str,
)
def test_bad_options_are_refused_in_one_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        trace(X, SUBLAYER, **options)
