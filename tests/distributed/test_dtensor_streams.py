"""Tests of the boundary of n streams with DTensors against one process: placements, unequal shards, communication."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from addnorm.ops.streams.kinds import GATE_KINDS
from support.distributed import case, make_test
from support.dtensors import assert_no_communication, close, compare_gradients, leaves, mesh_of, partial_of
from support.stream_calls import in_float64, make_call

ROWS = (3, 5)  # two processes have two rows and one, or three and two
CALLS = [*((kind, "write") for kind in GATE_KINDS), ("given", "shared"), ("given", "features"), ("manifold", "given"),
         ("hyper", "identity"), ("gates", "read"), ("manifold", "shared")]  # fmt: skip
PARAMETERS = ("project", "scale", "base", "weight", "bias")


def make_float64_call(kind, mode, rows=ROWS):
    return in_float64(make_call(3, 6, rows, kind, mode=mode), iterations=3)


def distribute_call(call, mesh, placements, rows=ROWS):
    """Return a call's tensors as DTensors: those of each token placed, the others replicated."""

    def place(name, t):
        if name in PARAMETERS or t.shape[: len(rows)] != rows:
            return [Replicate()] * mesh.ndim
        return [Replicate() if isinstance(p, Shard) and p.dim >= t.dim() else p for p in placements]

    return {name: distribute_tensor(t, mesh, place(name, t)) for name, t in call.tensors.items()}


def assert_equal(call, mesh, placements):
    """Compare outputs and gradients with those of one process."""
    message = f"{call.kind}, {sorted(call.tensors)}, {placements}"
    compare_gradients(call, call.tensors, distribute_call(call, mesh, placements), message)


@case(2)
def unequal_shards_equal_one_process():
    for kind, mode in CALLS:
        call = make_float64_call(kind, mode)
        for place in (Shard(0), Shard(1)):
            assert_equal(call, mesh_of(), [place])


@case(2)
def streams_and_features_are_gathered():
    for kind, mode in CALLS[1:2] + CALLS[5:6]:
        for place in (Shard(2), Shard(3), Replicate()):
            assert_equal(make_float64_call(kind, mode), mesh_of(), [place])


@case(2)
def two_dimensional_meshes_equal_one_process():
    for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(1)]):
        assert_equal(make_float64_call("hyper", "write"), mesh_of(1, 2), placements)
        assert_equal(make_float64_call("manifold", "shared"), mesh_of(2, 1), placements)


@case(2)
def sharded_tokens_need_no_communication():
    mesh = mesh_of()
    for kind, mode in CALLS:
        call = make_float64_call(kind, mode, (4, 6))
        for place in (Shard(0), Shard(1)):
            tensors = distribute_call(call, mesh, [place], (4, 6))
            inputs = leaves(tensors)
            assert_no_communication(call, inputs, f"{kind}, {mode}, {place}")
            for name, t in inputs.items():
                expected = Partial() if tensors[name].placements[0].is_replicate() else place
                assert t.grad.placements == (expected,), f"{kind}, {mode}, {name}: {t.grad.placements}"


@case(2)
def partial_branch_is_reduced():
    mesh, call = mesh_of(), make_float64_call("manifold", "write")
    tensors = distribute_call(call, mesh, [Shard(1)])
    tensors["branch"] = partial_of(call.tensors["branch"], mesh)
    with torch.no_grad():
        for name, t in call(tensors).items():
            close(t, call()[name], name)


@case(2)
def plain_tensors_beside_dtensors_are_refused():
    call = make_float64_call("gates", "read")
    tensors = distribute_call(call, mesh_of(), [Shard(0)])
    with pytest.raises(TypeError, match="project is a plain tensor"):
        call(tensors | {"project": call.tensors["project"]})


test_dtensor_streams = make_test(globals())
