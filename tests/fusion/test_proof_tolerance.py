"""Tests of the proof's tolerances, which come from float64 where the model runs in it."""

import math

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from addnorm.fusion.tolerance import ROUNDINGS, TIMES, compare, largest_errors
from support.changed_models import (
    FAULTS,
    Function,
    X,
    change_gradient,
    find_difference,
    make_layer,
    prove_call,
    with_library_norms,
)

EPS = torch.finfo(torch.float32).eps

# --- tolerances ------------------------------------------------------------------------------------------------------------


def test_gradient_of_pure_round_off_is_tolerated():
    model = Function(lambda m, x: F.scaled_dot_product_attention(x, x + m.w, x * 2), 16)
    after = lambda x: (x @ (x + model.w).mT / 4).softmax(-1) @ (x * 2)  # noqa: E731
    proof = prove_call(model, after)
    assert proof.gradients[0].magnitude < 1e-5
    assert proof.holds
    assert not prove_call(model, change_gradient(model, "w", lambda g: g + 1e-4)).holds


def test_masked_elements_do_not_set_the_magnitude():
    mask = torch.tensor([0.0, 0.0, -math.inf, torch.finfo(torch.float32).min])
    model = Function(lambda m, x: x @ m.w + mask, 16, 4)
    proof = prove_call(model, lambda x: x @ (model.w * 1) + mask)
    assert proof.holds
    assert proof.outputs[0].magnitude < 100
    assert not prove_call(model, lambda x: x @ (model.w * 1.0001) + mask).holds
    assert not prove_call(model, lambda x: x @ model.w + mask.roll(1)).holds


def test_complex_outputs_are_compared():
    model = Function(lambda m, x: torch.fft.fft(x @ m.w), 16, 4)
    assert prove_call(model).holds
    assert not prove_call(model, lambda x: torch.fft.fft(x @ model.w).conj().resolve_conj()).holds


def test_sparse_gradients_are_compared():
    model = nn.Embedding(9, 4, sparse=True)
    ids = torch.tensor([1, 3])
    assert prove_call(model, x=ids).holds
    assert not prove_call(model, lambda x: F.embedding(x, model.weight * 1.001, sparse=False), x=ids).holds


def test_output_that_differs_in_float64_uses_roundings():
    def otherwise(m, x):  # like an expert whose choice depends on the last digit
        y = x @ m.w
        return {"a": y, "b": y * 2, "c": y * (3.0 if x.dtype == torch.float64 else 1.0)}

    model = Function(otherwise, 16, 4)
    proof = prove_call(model)
    assert proof.oracle == "float64"
    assert find_difference(proof.outputs, "c").eager_error > 1
    assert find_difference(proof.outputs, "c").tolerance < 1e-4 * find_difference(proof.outputs, "c").magnitude


def test_each_tensor_has_its_own_tolerance():
    before = {"large": torch.full((3,), 1e3), "small": torch.full((3,), 1e-3)}
    errors = {"large": 1e-3, "small": 1e-9}
    large, small = compare(before, before, errors, EPS)
    assert large.tolerance == pytest.approx(TIMES * 1e-3 + EPS * 1e3, rel=1e-6)
    assert small.tolerance == pytest.approx(TIMES * 1e-9 + EPS * 1e-3, rel=1e-6)


def test_error_where_float64_has_new_nans_is_unknown():
    t = torch.tensor([1.0, 2.0, math.nan])
    exact = torch.tensor([1.0, math.nan, math.nan], dtype=torch.float64)
    assert largest_errors({"t": t}, {"t": exact}) == {}
    assert largest_errors({"t": t}, {"t": t.double() + 0.5}) == {"t": 0.5}
    assert largest_errors({"t": t[:2]}, {"t": torch.tensor([1.0, math.inf], dtype=torch.float64)}) == {"t": 0.0}


@pytest.mark.parametrize(("round_offs", "is_noise"), [(60, True), (70, False), (1000, False)])
def test_gradient_is_noise_up_to_64_round_offs(round_offs, is_noise):
    round_off = EPS * 1e3  # of the largest gradient
    before = {"large": torch.full((3,), 1e3), "lost": torch.full((3,), round_offs * round_off)}
    errors = {"large": 1e-3, "lost": round_offs * round_off / 2}
    lost = compare(before, before, errors, EPS, gradients=True)[1]
    assert (lost.tolerance >= lost.magnitude) is is_noise
    if not is_noise:
        assert lost.tolerance == pytest.approx(ROUNDINGS * EPS * lost.magnitude + round_off, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_tolerance_without_float64_is_of_the_tensors_dtype(dtype):
    """256 roundings of the coarser of the model's dtype and the tensor's, but at most a tenth of the magnitude."""
    (one,) = compare(*[{"t": torch.full((3,), 8.0, dtype=dtype)}] * 2, {}, EPS)
    share = min(256 * max(torch.finfo(dtype).eps, EPS), 0.1)
    assert one.tolerance == pytest.approx(8 * share)
    assert share == {torch.float16: 0.1, torch.bfloat16: 0.1}.get(dtype, 256 * EPS)


# --- float64 ---------------------------------------------------------------------------------------------------------------


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo):
        raise RuntimeError("no second one\nof this")


def test_proof_of_a_model_that_cannot_be_copied():
    model = Uncopied(16, 4)
    proof = prove_call(model, lambda x: model(x * 1))
    assert proof.oracle == "no float64 run: RuntimeError: no second one"
    assert proof.holds
    assert {difference.eager_error for difference in (*proof.outputs, *proof.gradients)} == {None}
    assert not prove_call(model, lambda x: model(x * 1.001)).holds


def no_float64(m, x):
    if x.dtype == torch.float64:
        raise TypeError("never in float64")
    return x @ m.w


def test_low_precision_without_float64_uses_float32():
    model = Function(no_float64, 16, 4).bfloat16()
    proof = prove_call(model, x=X.bfloat16())
    assert proof.oracle == "float32"
    assert proof.outputs[0].eager_error > 0


def test_proof_of_a_float64_model_uses_roundings():
    model = make_layer().double()
    proof = prove_call(model, with_library_norms(model), x=X.double())
    assert proof.holds
    assert proof.oracle == "the model itself is in float64"
    assert not prove_call(model, FAULTS["another eps"](model), x=X.double()).holds


def test_float64_run_with_other_random_numbers_is_ignored():
    def forward(m, x):
        noise = numpy.random.default_rng().standard_normal(x.shape) if x.dtype == torch.float64 else numpy.ones(x.shape)
        return (x * torch.from_numpy(noise).to(x.dtype)) @ m.w

    model = Function(forward, 16, 4)
    proof = prove_call(model)
    assert "something else" in proof.oracle
    assert proof.outputs[0].eager_error is None
    assert proof.holds


def test_plain_tensor_attributes_are_widened():
    model = Function(lambda m, x: x @ m.w @ m.plain, 16, 4)
    model.plain = torch.eye(4)
    assert prove_call(model).oracle == "float64"
