"""Tests of recomputed equations: they close to the dtype's round-off, and do not if one number is wrong."""

import math

import pytest
import torch

from addnorm import inspect
from addnorm.stream.find.equation_errors import get_tolerance, measure_row_error, measure_sum_error, relative_error
from support.families import shake
from support.stacks import encoder
from support.stream_steps import X


def inspect_chain(wiring):
    return inspect(shake(encoder(wiring)), X).streams[0].chain


def test_relative_error():
    ones = torch.ones(4)
    assert relative_error(ones, ones) == 0.0
    assert relative_error(2 * ones, ones) == 1.0
    assert relative_error(torch.tensor([1.0, math.inf]), torch.tensor([1.0, math.inf])) == 0.0
    assert relative_error(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0])) == math.inf
    assert relative_error(ones * math.nan, ones * math.nan) == math.inf  # nothing is proven
    assert relative_error(ones[:0], ones[:0]) == math.inf


def test_get_tolerance_of_coarsest_dtype():
    assert get_tolerance(torch.float64) == 1e-10
    assert get_tolerance(torch.float64, torch.float32) == 1e-5
    assert get_tolerance(torch.float32, torch.bfloat16) == 8 * 2**-7


@pytest.mark.parametrize("wiring", ["pre_ln", "sandwich", "admin"])
def test_closure_shows_error_of_a_thousandth(wiring):
    chain = inspect_chain(wiring)
    assert chain.adds
    for add, parts, norms in zip(chain.adds, chain.sublayers, chain.norms_out, strict=True):
        norm = norms[0] if norms else None
        assert measure_row_error(add, parts, norm) < 1e-5
        right = add.out.tensor
        add.out.tensor = right + 1e-3 * torch.randn_like(right)
        assert measure_row_error(add, parts, norm) > 1e-5
        add.out.tensor = right


def test_total_closure_of_pre_ln():
    chain = inspect_chain("pre_ln")
    assert measure_sum_error(chain) < 1e-6
    chain.adds[-1].out.tensor = chain.adds[-1].out.tensor * 1.001
    assert measure_sum_error(chain) > 1e-4
