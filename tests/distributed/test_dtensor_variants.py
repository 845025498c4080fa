"""Tests of all variants of calls with DTensors, in two and in four processes, and on meshes of two dimensions."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from support.cases import VARIANTS, gradients, make
from support.distributed import case, make_test
from support.dtensors import (
    FLOAT64,
    ODD,
    PLACES,
    SHAPE,
    SOME,
    check_variants,
    close,
    communication,
    distribute,
    leaves,
    mesh_of,
    partial_of,
)


@case(2, 4)
def variants_equal_one_process():
    for place in PLACES.values():
        check_variants(FLOAT64, mesh_of(), [place])


@case(4)
def uneven_shards_equal_one_process():
    for place in (Shard(0), Shard(1)):
        check_variants(FLOAT64, mesh_of(), [place], ODD)


@case(4)
def two_dimensional_meshes_equal_one_process():
    places = (Shard(0), Shard(1), Replicate(), Shard(2))
    for placements in ([first, second] for first in places for second in places):
        for shape in (SHAPE, ODD):
            check_variants(SOME, mesh_of(2, 2), placements, shape)


@case(4)
def partial_branches_are_reduced_once():
    mesh, wide = mesh_of(), mesh_of(2, 2)
    call = make("LayerNorm", "float64", SHAPE)
    expected = call()
    cases = (
        (mesh, [Shard(0)], {"reduce_scatter_tensor": 1}),
        (mesh, [Shard(1)], {"reduce_scatter_tensor": 1}),
        (mesh, [Replicate()], {"all_reduce": 1}),
        (wide, [Shard(0), Replicate()], {"all_reduce": 1}),
        (wide, [Shard(0), Shard(1)], {"reduce_scatter_tensor": 1}),
        (wide, [Replicate(), Shard(1)], {"reduce_scatter_tensor": 1}),
    )
    for mesh, placements, collectives in cases:
        tensors = distribute(call, mesh, placements)
        tensors["branch"] = partial_of(call.tensors["branch"], mesh, *placements[:-1])
        outputs = {}
        with torch.no_grad():
            assert (
                communication(lambda tensors=tensors, outputs=outputs: outputs.update(call(tensors))) == collectives
            ), placements
        for name, t in outputs.items():
            assert t.placements == tuple(placements)
            close(t, expected[name], f"{placements}, {name}")


@case(2)
def compiled_calls_equal_eager_ones():
    mesh = mesh_of()
    for label in ("LayerNorm", "everything, RMSNorm"):
        call = make(label, "float64", SHAPE)
        inputs = leaves(distribute(call, mesh, [Shard(1)]))
        compiled = torch.compile(lambda tensors, call=call: call(tensors)["y"], backend="aot_eager", fullgraph=True)
        y = compiled(inputs)
        close(y, call()["y"], label)
        cotangent = torch.randn(SHAPE, dtype=torch.float64)
        dist.broadcast(cotangent, 0)
        y.backward(distribute_tensor(cotangent, mesh, [Shard(1)]))
        grads = gradients(call, {"y": cotangent})
        for name, t in inputs.items():
            close(t.grad, grads[name], f"{label}, gradient of {name}")


@case(2)
def rows_have_the_bits_of_one_process():
    mesh = mesh_of()
    for label, variant in VARIANTS.items():
        for dtypes in ("float32", "bfloat16 with float32 parameters", "float32 stream, bfloat16 branch"):
            call = make(variant, dtypes, SHAPE)
            for place in (Shard(0), Shard(1)):
                for name, t in call(distribute(call, mesh, [place])).items():
                    expected = call()[name]
                    assert t.dtype == expected.dtype, (label, dtypes, name)
                    assert torch.equal(t.full_tensor(), expected), (label, dtypes, place, name)


test_dtensor_variants = pytest.mark.slow(make_test(globals()))
