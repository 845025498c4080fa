"""Tests of the trace: its steps, edge-case tokens, and rejected inputs."""

import json
import math
import re

import pytest
import torch

from addnorm.trace import trace
from support.trace_variants import SUBLAYER, VARIANTS, X, adversarial_cases, name_of

# The steps


def test_steps_are_in_order():
    post = """x sublayer z mean centred squares variance root normalized scaled shifted
        check_mean check_variance expected grad grad_scaled grad_mean projection dz dx dsublayer dweight dbias"""
    assert " ".join(step.name for step in trace(X, SUBLAYER)) == " ".join(post.split())
    pre = """x squares mean_square root normalized scaled shifted sublayer z check_mean check_square expected
        grad straight dsublayer read_grad grad_scaled projection dnorm dx dweight dbias"""
    followed = trace(X, SUBLAYER, placement="Pre-LN", norm="rms")  # a wiring's name
    assert " ".join(step.name for step in followed) == " ".join(pre.split())


def test_sums_run_from_left_to_right():
    assert trace([1e16, 1.0, -1e16], [0, 0, 0])["mean"].value == 0.0
    assert trace([1e16, -1e16, 1.0], [0, 0, 0])["mean"].value == 1 / 3


def test_step_has_formula_numbers_and_value():
    step = trace(X, SUBLAYER)["variance"]
    assert (step.section, step.symbol, step.formula) == ("forward", "σ²", "(1/d) Σ (zₖ - μ)²")
    assert step.numbers == "(0.69444 + 1.7778 + 4.6944) / 3 = 7.1667 / 3"
    assert step.lines() == [
        "σ² = (1/d) Σ (zₖ - μ)² = (0.69444 + 1.7778 + 4.6944) / 3", "= 7.1667 / 3 = 2.3889"
    ]  # fmt: skip
    assert step.value == pytest.approx(43 / 18, rel=1e-15)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_checks_name_the_effect_of_eps(variant):
    followed = trace([0.01, -0.02, 0.03], [0, 0, 0], **variant)
    value = followed["check_variance" if variant["norm"] == "layer" else "check_square"].value
    assert value == pytest.approx(followed["expected"].value, rel=1e-12)
    assert value < 0.9995
    assert f"{1 - followed['expected'].value:.2g} below 1, due to" in followed["expected"].note
    if variant["norm"] == "layer":
        assert abs(followed["check_mean"].value) < 1e-15
    else:
        assert followed["check_mean"].note == "RMSNorm does not subtract the mean"


def test_pre_ln_has_a_straight_path():
    grad, read_grad = (0.3, -1.0, 2.0), (0.0, 0.0, 0.0)
    followed = trace(X, SUBLAYER, placement="pre", grad=grad, read_grad=read_grad)
    assert followed["dx"].value == followed["straight"].value == followed["dsublayer"].value == grad
    default = trace(X, SUBLAYER, placement="pre", grad=grad)
    assert default["read_grad"].value == grad
    assert "identity" in default["read_grad"].note
    assert default.output == default["z"].value == (1.5, 1.0, 4.5)


def test_trace_accepts_tensors_and_iterables():
    assert trace(torch.tensor(X), iter(SUBLAYER)).output == trace(X, SUBLAYER).output


# The edges


def test_non_finite_steps_have_a_reason():
    reasons = []
    for x, sublayer, options in adversarial_cases():
        followed = trace(x, sublayer, **options)
        json.dumps(followed.to_dict(), allow_nan=False)
        assert str(followed)
        reasons += [step.note for step in followed if not step.finite][:1]
    assert len(reasons) > 50
    assert [note for note in reasons if not re.search("overflow|0/0|division by 0", note)] == []


def test_equal_features_give_beta():
    followed = trace([2.0, 2.0], [1.0, 1.0], weight=[5, 6], bias=[7, 8], grad=[1, 0])
    assert followed.output == (7.0, 8.0)
    assert "all features are equal" in followed["normalized"].note
    assert followed["dz"].value == pytest.approx([2.5 / math.sqrt(1e-5) - 0.0, -2.5 / math.sqrt(1e-5)])


def test_equal_features_with_eps_outside_have_the_limit():
    followed = trace([2.0, 2.0], [1.0, 1.0], grad=[1, 0], eps=0.1, eps_place="outside")
    h, y = 1e-9, trace([2.0, 2.0], [1.0, 1.0], eps=0.1, eps_place="outside").output
    moved = trace([2.0 + h, 2.0], [1.0, 1.0], eps=0.1, eps_place="outside").output
    assert followed["dz"].value == pytest.approx([5.0, -5.0])
    assert (moved[0] - y[0]) / h == pytest.approx(5.0, rel=1e-6)
    assert "autograd gives nan" in followed["dz"].note


def test_single_feature_gives_beta():
    followed = trace([123.0], [4.0], weight=3, bias=5, grad=[2])
    assert followed.output == (5.0,)
    assert followed["dz"].value == (0.0,)
    assert "d = 1" in followed["normalized"].note
    lost = trace([123.0], [4.0], variance="unbiased")
    assert math.isnan(lost["variance"].value)
    assert "0/0" in lost["variance"].note


def test_overflowing_squares_give_beta():
    assert trace([1e30, -1e30], [0, 0]).output == (1.0, -1.0)
    followed = trace([1e200, -1e200], [0, 0], bias=3)
    assert followed["squares"].value == (math.inf, math.inf)
    assert "overflow" in followed["squares"].note
    assert followed.output == (3.0, 3.0)
    assert followed["dz"].value == (0.0, 0.0)
    assert followed.to_dict()["steps"][5]["value"] == [None, None]
    assert followed.to_dict()["steps"][5]["finite"] is False


def test_overflowing_sum_is_inf_then_nan():
    followed = trace([1e308, 1.0], [1e308, 1.0])
    assert followed["z"].value == (math.inf, 2.0)
    assert "1.8e308" in followed["z"].note
    assert all(map(math.isnan, followed.output))


# Rejected inputs


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("1,2", (1, 2)), "x is the text '1,2', expected numbers"),
        ((5, (1, 2)), "x is 5, expected a vector"),
        ((torch.ones(2, 2), (1, 2)), r"x\[0\] is tensor.*, expected a number"),
        (((10**400, 1), (1, 2)), r"x\[0\] is 1000.*, expected a number"),
    ],
    ids=str,
)
def test_trace_refuses_bad_vectors(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        trace(*arguments)


def test_trace_refuses_unknown_choices():
    """Other wrong values are bad inputs of `addnorm trace`, whose options have no unknown choices."""
    for name in ("placement", "norm", "variance", "eps_place"):
        with pytest.raises(ValueError, match=f"^{name} is 'odd', expected '"):
            trace(X, SUBLAYER, **{name: "odd"})
