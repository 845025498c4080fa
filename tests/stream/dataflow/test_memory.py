"""Tests of the data flow of tensors that share memory: regions, in-place writes, and the restored state after a run."""

import itertools

import pytest
import torch

from addnorm import inspect
from addnorm.stream.dataflow.arithmetic import strip_views
from addnorm.stream.dataflow.flow_capture import FlowCapture
from addnorm.stream.dataflow.memory import Region
from addnorm.stream.dataflow.state import find_tensors
from support.random_models.graphs import Graph
from support.stacks import D, Mlp


def capture_function(function, *args):
    return FlowCapture(Graph(lambda m, *args: function(*args))).run(args, {})


def find_bytes(tensor):
    labels = torch.arange(tensor.untyped_storage().nbytes(), dtype=torch.int16)
    item = tensor.element_size()
    places = torch.as_strided(
        labels, (*tensor.shape, item), (*(s * item for s in tensor.stride()), 1), tensor.storage_offset() * item
    )
    return {*places.flatten().tolist()}


BASE = torch.zeros(4, 6, 8)
VIEWS = {
    "all": BASE, "flat": BASE.view(-1), "turned": BASE.transpose(0, 2), "a row": BASE[:, 2], "rows": BASE[:, 1:3],
    "left": BASE[..., :4], "right": BASE[..., 4:], "middle": BASE[..., 3:5], "steps": BASE[..., ::2], "other steps": BASE[..., 1::2],
    "first": BASE[0], "last": BASE[3], "one": BASE[1, 2, 3], "expanded": BASE[:1].expand(4, 6, 8), "nothing": BASE[:0],
    "split": BASE.unflatten(-1, (2, 4)), "diagonal": BASE[0, :, :6].diagonal(), "narrow rows": BASE[:, :, 2:3],
}  # fmt: skip


BYTES = {name: find_bytes(view) for name, view in VIEWS.items()}
UNDECIDED = {"one", "right"}, {"one", "steps"}, {"narrow rows", "other steps"}, {"narrow rows", "one"}  # and disjoint


@pytest.mark.parametrize(("first", "other"), [*itertools.combinations_with_replacement(VIEWS, 2)])
def test_disjoint_regions_share_no_byte_and_equal_ones_all(first, other):
    a, b = Region.from_tensor(VIEWS[first]), Region.from_tensor(VIEWS[other])
    assert {first, other} in UNDECIDED or a.is_disjoint(b) == (not BYTES[first] & BYTES[other])
    assert (a == b) == (BYTES[first] == BYTES[other])


def test_write_to_one_half_keeps_value_of_other():
    def run(x):
        y = x * 2
        left, right = y[:, :2], y[:, 2:]
        left.add_(1)
        return right * 1, left * 1, y * 1

    right, left, whole = (value.op.inputs[0] for value in capture_function(run, torch.ones(2, 4)).result)
    assert right.op.name == "slice"
    assert left.op.name == "add"
    assert whole.op.name == "write_into"
    assert torch.equal(whole.tensor, torch.tensor([[3.0, 3.0, 2.0, 2.0]] * 2))


def test_tensor_through_numpy_is_alias():
    read = capture_function(lambda x: torch.from_numpy((x * 2).numpy()) + 1, torch.ones(2)).result.op.inputs[0]
    assert strip_views(read).op.name == "mul"


def test_loop_of_writes_adds_few_operators():
    def run(x):
        out = torch.zeros(64, 8)
        for t in range(64):
            out[t] = x[t] * 2
        return out

    flow = capture_function(run, torch.ones(64, 8))
    assert len(flow.ops) < 64 * 6
    assert flow.result.op.name == "write_into"
    assert flow.result.tensor.eq(2).all()


def test_out_argument_is_no_input():
    def run(x):
        y = torch.empty_like(x)
        torch.mul(x, 3.0, out=y)
        return y

    flow = capture_function(run, torch.ones(3))
    assert [value.op for value in flow.result.op.inputs] == [None]


# Arguments; tests/stream/test_state.py has the state of models.


class Cache:
    def __init__(self):
        self.states, self.tensor = [torch.ones(2, requires_grad=True) * 2], torch.zeros(2)  # not a leaf: no deepcopy


def write(m, x, cache):
    """Write to the input and to a cache."""
    cache.states.append(x)
    cache.tensor += 1
    return x.add_(m.f(x))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_inspect_restores_arguments(mode):
    cache = Cache()
    with mode():
        x = torch.randn(2, 7, D)
        original = x.clone()
        inspect(Graph(write, f=Mlp()), x, cache)
        assert torch.equal(x, original)
    assert len(cache.states) == 1
    assert not cache.tensor.any()


def test_find_tensors_in_nested_argument():
    cache = Cache()
    held = {id(tensor) for tensor in find_tensors({"a": [cache, (torch.zeros(1),)], "b": 3})}
    assert {id(cache.states[0]), id(cache.tensor)} < held
    assert len(held) == 3
