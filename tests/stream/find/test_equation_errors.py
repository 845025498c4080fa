"""Tests of recomputed equations: they close to the dtype's round-off, and do not if one number is wrong."""

import math

import pytest
import torch
from torch.nn import functional as F

from addnorm import inspect
from addnorm.nn import Encoder
from addnorm.stream.dataflow.arithmetic import strip_views
from addnorm.stream.dataflow.flow_capture import FlowCapture
from addnorm.stream.dataflow.replay import replay_op
from addnorm.stream.find.equation_errors import get_tolerance, measure_row_error, measure_sum_error, relative_error
from addnorm.stream.layout.dimensions import covers_features, find_axis, find_views
from support.families import shake
from support.stacks import D
from support.stream_steps import make_steps


def inspect_chain(wiring):
    return inspect(shake(Encoder(2, D, 2, 32, wiring)), torch.randn(2, 5, D)).streams[0].chain


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


@pytest.mark.parametrize("wiring", ["pre_ln", "post_ln", "deepnorm", "sandwich", "layer_scale", "admin"])
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
    assert measure_sum_error(inspect_chain("pre_ln")) < 1e-6
    chain = inspect_chain("pre_ln")
    chain.adds[-1].out.tensor = chain.adds[-1].out.tensor * 1.001
    assert measure_sum_error(chain) > 1e-4


OPERATORS = {
    "view": lambda x: x.view(6, 8),
    "transpose": lambda x: x.transpose(1, 2).contiguous(),
    "permute": lambda x: x.permute(2, 0, 1),
    "cast": lambda x: x.double().float(),
    "expand": lambda x: x[:, None].expand(2, 4, 3, 8),
    "zero added": lambda x: x + 0,
    "squeeze": lambda x: x[None].squeeze(0),
    "guard": lambda x: x.clamp(-1.0, 1.0),
    "masked": lambda x: x.masked_fill(torch.tensor([[[True], [False], [False]]] * 2), 0.0),
    "negative": lambda x: -x,
    "half": lambda x: x / 2,
    "scaled": lambda x: x * torch.arange(8.0),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropped altogether": lambda x: torch.native_dropout(x, 1.0, True)[0],
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_replay_op_computes_output(operator):
    with torch.no_grad():
        flow = FlowCapture(make_steps(lambda m, x: OPERATORS[operator](x * 1.5))).run((torch.randn(2, 3, 8),), {})
    value = flow.ops[0].outputs[0].tensor.double()
    start = next(k for k, op in enumerate(flow.ops) if op.inputs and op.inputs[0] is flow.ops[0].outputs[0])
    at = flow.ops[0].outputs[0]
    for op in flow.ops[start:]:
        if op.inputs and op.inputs[0] is at:
            value, at = replay_op(op, value), op.outputs[0]
    assert torch.allclose(value.float(), flow.result.tensor, atol=1e-6)


AXES = {
    "as it is": (lambda x: x, 2, True),
    "channels first": (lambda x: x.transpose(1, 2), 1, False),  # its last axis is the tokens
    "tokens flattened": (lambda x: x.reshape(6, 8), 2, True),
    "heads": (lambda x: x.unflatten(-1, (2, 4)), None, False),
    "heads first": (lambda x: x.unflatten(-1, (2, 4)).transpose(1, 2), None, False),
    "expanded": (lambda x: x[:, None].expand(2, 4, 3, 8), 2, True),
    "tokens mixed with the batch": (lambda x: x.reshape(2, 3, 8).permute(1, 0, 2).reshape(6, 8), 2, True),
    "all in one": (lambda x: x.reshape(48), None, False),
}


@pytest.mark.parametrize("name", AXES)
def test_find_axis_through_views(name):
    make, axis, all_features = AXES[name]

    flow = FlowCapture(make_steps(lambda m, x: make(x * 1.5) * 1.0)).run((torch.randn(2, 3, 8),), {})
    operand = flow.result.op.inputs[0]
    source = strip_views(operand)
    assert source is flow.ops[0].outputs[0]
    assert find_views(operand, source) is not None
    assert find_axis(operand, source, len(operand.shape) - 1) == axis
    assert covers_features(operand) == (all_features or name == "channels first")  # all features, whichever axis
