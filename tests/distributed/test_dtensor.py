"""Tests of calls with DTensors against one process: placements, options, dropout masks, communication."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh

import addnorm
from support.cases import FUNCTIONS, VARIANTS, make
from support.distributed import case, make_test
from support.dtensors import (
    FLOAT64,
    ODD,
    PLACES,
    ROWS,
    SHAPE,
    SOME,
    assert_no_communication,
    check_variants,
    close,
    communication,
    compare_gradients,
    distribute,
    leaves,
    mesh_of,
    partial_of,
)
from support.processes import run_python
from support.refusals import assert_raises

PLACED = Shard(0), Shard(1), Replicate()


def make_norm():
    """Return the mesh of all processes, and a call of LayerNorm."""
    return mesh_of(), make("LayerNorm", "float64", SHAPE)


def check_placements(variants):
    for shape, places in ((SHAPE, PLACES.values()), (ODD, (Shard(0), Shard(1)))):
        for place in places:
            check_variants(variants, mesh_of(), [place], shape)


@case(2)
def even_and_uneven_shards_equal_one_process():
    check_placements(SOME)


@case(2, 4, slow=True)
def all_variants_equal_one_process():
    check_placements(FLOAT64)


@case(2)
def two_dimensional_meshes_equal_one_process():
    variants = {label: variant for label, variant in SOME.items() if label.startswith("everything")}
    for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(0), Replicate()]):
        check_variants(variants, mesh_of(1, 2), placements)
        check_variants(variants, mesh_of(2, 1), placements)


@case(2)
def saved_outputs_equal_one_process_and_refuse_weights():
    mesh, call = make_norm()
    call.tensors["weight"] = call.tensors["weight"].abs() + 0.5  # large enough to be divided by

    def saved(tensors):
        with addnorm.save_outputs():
            return {"y": call.y_alone(tensors)}

    for place in PLACED:
        compare_gradients(saved, call.tensors, distribute(call, mesh, place), f"{place}")
    tensors = distribute(call, mesh, Shard(0))
    small = torch.full_like(call.tensors["weight"], 1.0)
    small[5] = 2.0**-11
    weight = distribute_tensor(small, mesh, [Shard(0)]).requires_grad_()
    with addnorm.save_outputs(), pytest.raises(ValueError, match=r"at feature 5, expected at least 0.000977"):
        addnorm.add_layer_norm(tensors["residual"], tensors["branch"], weight)


@case(2)
def norms_alone_and_of_two_dimensions_equal_one_process():
    mesh, rows = mesh_of(), (4, 6, 2, 8)
    for norm, shapes in (
        (addnorm.layer_norm, {"x": SHAPE, "weight": (8,), "bias": (8,)}),
        (addnorm.rms_norm, {"x": SHAPE, "weight": (8,)}),
        (
            partial(addnorm.add_layer_norm, normalized_shape=(2, 8)),
            {"residual": rows, "branch": rows, "weight": (2, 8)},
        ),
    ):
        whole = {name: torch.randn(shape).double() for name, shape in shapes.items()}
        alone = {name: distribute_tensor(t, mesh, [Replicate()]) for name, t in whole.items()}
        for place in (*map(Shard, range(4 if "branch" in whole else 3)), Replicate(), *[Partial()] * ("x" in whole)):
            placed = {
                name: partial_of(t, mesh) if place.is_partial() else distribute_tensor(t, mesh, [place])
                for name, t in whole.items()
                if name in ("x", *ROWS)
            }
            compare_gradients(lambda t, norm=norm: {"y": norm(**t)}, whole, alone | placed, f"{norm}, {place}")


@case(2)
def sharded_rows_need_no_communication():
    mesh = mesh_of()
    for place in PLACED:
        for label, variant in SOME.items():
            call = make(variant, "float64", SHAPE)
            inputs = leaves(distribute(call, mesh, place))
            outputs = assert_no_communication(call, inputs, f"{label}, {place}")
            assert all(t.placements == (place,) for t in outputs.values())
            for name, t in inputs.items():
                summed = place.is_shard() and name not in (*ROWS, "row_scale")
                if name != "row_scale" or t.shape == SHAPE[:-1]:  # another gradient is summed over what was expanded
                    assert t.grad.placements == (Partial() if summed else place,), f"{label}, {name}"


@case(2)
def features_are_gathered_as_in_layer_norm():
    mesh, call = make_norm()
    tensors = distribute(call, mesh, Shard(2))
    x, weight, bias = tensors["residual"], tensors["weight"], tensors["bias"]
    ours = communication(lambda: addnorm.layer_norm(x, weight, bias))
    assert ours == communication(lambda: torch.nn.functional.layer_norm(x, (8,), weight, bias))
    assert ours == {"all_gather_into_tensor": 1}


@case(2)
def replicated_residual_follows_a_sharded_branch():
    mesh, call = make_norm()
    tensors = distribute(call, mesh, Replicate())
    tensors["branch"] = distribute_tensor(call.tensors["branch"], mesh, [Shard(1)])
    outputs = {}
    with torch.no_grad():
        assert communication(lambda: outputs.update(call(tensors))) == {}
    assert outputs["y"].placements == (Shard(1),)
    close(outputs["y"], call()["y"], "y")


@case(2)
def dropout_draws_one_seed_for_a_mesh():
    mesh = mesh_of()
    torch.manual_seed(dist.get_rank())  # different generators
    x = torch.ones(4, 8, 8, dtype=torch.float64)
    dist.broadcast(x, 0)
    for place in (Shard(0), Shard(1), Replicate(), Shard(2)):
        t = distribute_tensor(x, mesh, [place])
        z = addnorm.add_residual(torch.zeros_like(t), t, dropout_p=0.5).full_tensor()
        values = [torch.empty_like(z) for _ in range(dist.get_world_size())]
        dist.all_gather(values, z)
        assert all(torch.equal(value, z) for value in values)
        assert 0.3 < float((z == 0).double().mean()) < 0.7
        halves = z.chunk(2, dim=place.dim if isinstance(place, Shard) else 0)
        assert not torch.equal(*halves), "the parts have masks of their own"


@case(2)
def dropout_mask_is_a_part_of_the_whole():
    mesh = mesh_of()
    seed = torch.tensor(5)
    for shape in ((2, 6, 7), (1, 8, 4), (3, 2, 2, 4)):
        x = torch.ones(shape)
        whole = addnorm.add_residual(torch.zeros_like(x), x, dropout_p=0.5, seed=seed, offset=3)
        for dim in range(len(shape)):
            t = distribute_tensor(x, mesh, [Shard(dim)])
            z = addnorm.add_residual(torch.zeros_like(t), t, dropout_p=0.5, seed=seed, offset=3)
            assert torch.equal(z.full_tensor(), whole), (shape, dim)


@case(2)
def row_scale_may_be_a_plain_tensor():
    mesh, call = make_norm()
    for shape in ((4, 1), (4, 6), (6,), ()):
        scale = torch.randn(shape, dtype=torch.float64)
        expected = addnorm.add_layer_norm(**call.tensors, row_scale=scale)
        for place in PLACES.values():
            tensors = distribute(call, mesh, place)
            close(addnorm.add_layer_norm(**tensors, row_scale=scale), expected, f"{shape}, {place}")


@case(2)
def in_place_and_out_write_the_shards():
    mesh = mesh_of()
    for label in ("LayerNorm", "everything, RMSNorm"):
        call = make(label, "float64", SHAPE)
        expected = call()
        for place in PLACED:
            tensors = distribute(call, mesh, place)
            y, z = (torch.empty_like(tensors["residual"]) for _ in range(2))
            FUNCTIONS[call.norm](**tensors, **call.options, eps=call.eps, return_residual=True, out=(y, z))
            close(y, expected["y"], f"out, {label}, {place}")
            close(z, expected["z"], f"out, {label}, {place}")
            version = tensors["branch"]._version
            in_place = {"layer": addnorm.add_layer_norm_, "rms": addnorm.add_rms_norm_}[call.norm]
            assert in_place(**tensors, **call.options, eps=call.eps) is tensors["branch"]
            close(tensors["branch"], expected["y"], f"in place, {label}, {place}")
            close(tensors["residual"], expected["z"], f"in place, {label}, {place}")
            assert tensors["branch"]._version > version
    tensors = distribute(call, mesh, Shard(0))
    tensors["branch"] = distribute_tensor(call.tensors["branch"], mesh, [Replicate()])
    assert_raises("redistribute it first", lambda: addnorm.add_layer_norm_(tensors["residual"], tensors["branch"]))


@case(2)
def plain_tensors_beside_dtensors_are_refused():
    mesh, call = make_norm()
    tensors = distribute(call, mesh, Shard(1))
    for name in tensors:
        mixed = tensors | {name: call.tensors[name]}
        assert_raises(f"TypeError: {name} is a plain tensor", partial(addnorm.add_layer_norm, **mixed))
    other = distribute_tensor(call.tensors["weight"], init_device_mesh("cpu", (1, 2)), [Replicate()] * 2)
    assert_raises("ValueError: weight is on", partial(addnorm.add_layer_norm, **tensors | {"weight": other}))


@case(2)
def shapes_of_whole_tensors_are_compared():
    """The parts of the first process have equal shapes: without a check only the other one would raise."""
    mesh = mesh_of()
    residual, branch, out = (distribute_tensor(torch.randn(n, 8), mesh, [Shard(0)]) for n in (4, 3, 3))
    assert dist.get_rank() or residual.to_local().shape == branch.to_local().shape
    for options in ({}, {"residual_scale": 2.0}, {"dropout_p": 0.5}):
        for norm, x in ((addnorm.add_layer_norm, residual), (addnorm.add_rms_norm, residual.clone().requires_grad_())):
            sentence = "ValueError: branch has shape (3, 8), expected (4, 8), the shape of residual: "
            assert assert_raises(sentence, partial(norm, x, branch, **options)).endswith(".")
    assert_raises("shape (3, 8), expected (4, 8)", partial(addnorm.add_layer_norm, residual, residual, out=out))


@case(2)
def second_derivatives_equal_one_process():
    mesh = mesh_of()
    call = make("everything, LayerNorm", "float64", SHAPE)

    def second(tensors):
        y = call(tensors)["y"]
        (grad,) = torch.autograd.grad(y.square().sum(), tensors["residual"], create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [*tensors.values()])

    for place in (Shard(0), Replicate()):
        for actual, expected in zip(
            second(leaves(distribute(call, mesh, place))), second(leaves(call.tensors)), strict=True
        ):
            close(actual, expected, f"{place}")


@case(4, slow=True)
def wide_two_dimensional_meshes_equal_one_process():
    places = (Shard(0), Shard(1), Replicate(), Shard(2))
    for placements in ([first, second] for first in places for second in places):
        for shape in (SHAPE, ODD):
            check_variants(SOME, mesh_of(2, 2), placements, shape)


@case(4, slow=True)
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
        tensors = distribute(call, mesh, *placements)
        tensors["branch"] = partial_of(call.tensors["branch"], mesh, *placements[:-1])
        outputs = {}
        with torch.no_grad():
            assert (
                communication(lambda tensors=tensors, outputs=outputs: outputs.update(call(tensors))) == collectives
            ), placements
        for name, t in outputs.items():
            assert t.placements == tuple(placements)
            close(t, expected[name], f"{placements}, {name}")


@case(2, slow=True)
def compiled_calls_equal_eager_ones():
    mesh = mesh_of()
    for label in ("LayerNorm", "everything, RMSNorm"):
        call = make(label, "float64", SHAPE)
        placed = distribute(call, mesh, Shard(1))
        compiled = torch.compile(lambda tensors, call=call: call(tensors), backend="aot_eager", fullgraph=True)
        compare_gradients(compiled, call.tensors, placed, label, reference=call)


@case(2, slow=True)
def rows_have_the_bits_of_one_process():
    mesh = mesh_of()
    for label, variant in VARIANTS.items():
        for dtypes in ("float32", "bfloat16 with float32 parameters", "float32 stream, bfloat16 branch"):
            call = make(variant, dtypes, SHAPE)
            for place in (Shard(0), Shard(1)):
                for name, t in call(distribute(call, mesh, place)).items():
                    assert torch.equal(t.full_tensor(), call()[name]), (label, dtypes, place, name)


FIRST_CALLS = {
    "without gradients": "addnorm.add_layer_norm(x, x)",
    "with gradients": "addnorm.rms_norm(x.requires_grad_()).sum().backward()",
    "option": "addnorm.add_rms_norm(x, x, dropout_p=0.5)",
    "option with gradients": "addnorm.add_rms_norm(x.requires_grad_(), x, residual_scale=2.0).sum().backward()",
    "in place": "addnorm.add_layer_norm_(x, x.clone())",
    "option in place": "addnorm.add_residual_(x, x.clone(), layer_scale=2.0)",
    "compiled": "torch.compile(lambda: addnorm.add_layer_norm(x, x), backend='aot_eager', fullgraph=True)()",
    "compiled, with a mask": (
        "seed = torch.tensor(1)\n"
        "call = lambda: addnorm.add_rms_norm(x, x, dropout_p=0.5, seed=seed)\n"
        "torch.compile(call, backend='aot_eager', fullgraph=True)()"
    ),
    "under a mode": "with CommDebugMode(): addnorm.layer_norm(x)",
}
PROGRAM = """
import os, sys, torch, addnorm
assert "torch.distributed.tensor" not in sys.modules
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
import torch._dynamo
calls = {calls}
for name, call in calls.items():
    if os.fork() == 0:
        torch.set_num_threads(1)
        try:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            x = distribute_tensor(torch.ones(2, 3, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
            exec(call)
        except BaseException as error:
            print(name, type(error).__name__, error, flush=True)
        os._exit(0)
    os.wait()
"""


def test_rules_are_registered_at_the_first_call():
    assert run_python("-c", PROGRAM.replace("{calls}", repr(FIRST_CALLS)), timeout=120).stdout == ""


test_dtensor = make_test(globals())
