"""Comparison of calls with DTensors with the same calls in one process."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from support.cases import OWN_DTYPES, cotangents, make

SHAPE = (4, 6, 8)
ODD = (3, 5, 7)  # shards of different sizes, some of them empty, whose elements begin inside a block of the mask
PLACES = {"rows": Shard(0), "tokens": Shard(1), "replicated": Replicate(), "features": Shard(2)}
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
ROWS = ("residual", "branch")


def mesh_of(*shape):
    return init_device_mesh("cpu", shape or (dist.get_world_size(),))


def distribute(call, mesh, *placements):
    """Return a call's tensors as DTensors: the stream placed, the parameters replicated."""
    replicated = [Replicate()] * mesh.ndim

    def place(name, t):
        if name == "row_scale":
            return [
                p if isinstance(p, Shard) and p.dim < t.dim() and t.shape[p.dim] > 1 else Replicate()
                for p in placements
            ]
        return placements if name in ROWS else replicated

    return {name: distribute_tensor(t, mesh, place(name, t)) for name, t in call.tensors.items()}


def leaves(tensors):
    return {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}


def close(actual, expected, message):
    actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
    torch.testing.assert_close(actual, expected, **TOLERANCE, msg=lambda text: f"{message}: {text}")


def compare(call, mesh, placements, message):
    """Compare outputs and gradients of a call with those of one process; also y alone, and calls without gradients."""
    tensors = distribute(call, mesh, *placements)
    functions = (
        {"": call} if call.norm == "none" else {"": call, ", y alone": lambda tensors: {"y": call.y_alone(tensors)}}
    )
    for alone, function in functions.items():
        with torch.no_grad():
            for name, t in function(tensors).items():
                close(t, function(call.tensors)[name], f"{message}{alone}, {name} without gradients")
        compare_gradients(function, call.tensors, tensors, f"{message}{alone}")


def compare_gradients(function, tensors, placed, message, reference=None):
    """Compare outputs and gradients of a function of DTensors with those of the whole tensors in one process.

    Args:
        function: returns outputs by name from tensors by name.
        tensors: the whole tensors.
        placed: the DTensors.
        message: begins the message of an error.
        reference: the function in one process; None is the same.
    """
    inputs, whole = leaves(placed), leaves(tensors)
    outputs, expected = function(inputs), (reference or function)(whole)
    for name, t in outputs.items():
        close(t, expected[name], f"{message}, {name}")
    grad_outputs = cotangents(expected)
    cut = [
        distribute_tensor(t, outputs[name].device_mesh, outputs[name].placements) for name, t in grad_outputs.items()
    ]
    torch.autograd.backward([outputs[name] for name in grad_outputs], cut)
    torch.autograd.backward([expected[name] for name in grad_outputs], [*grad_outputs.values()])
    for name, t in inputs.items():
        close(t.grad, whole[name].grad, f"{message}, gradient of {name}")


def partial_of(t, mesh, *placements):
    """Return `t` as a DTensor whose parts on the last dimension of the mesh sum up to it."""
    whole = distribute_tensor(t, mesh, [*placements, Replicate()]).to_local()
    rank, n = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    part = whole if rank == n - 1 else whole * (rank + 1.0)
    part = part - sum(range(1, n)) * whole if rank == n - 1 else part
    return DTensor.from_local(part, mesh, [*placements, Partial()])


# Variants whose results are float64.
FLOAT64 = OWN_DTYPES
# Some of them, which have every option and every pattern of missing arguments.
SOME = {
    label: variant
    for label, variant in FLOAT64.items()
    if label.startswith(("everything", "LayerNorm", "the add", "RMS"))
}


def check_variants(variants, mesh, placements, shape=SHAPE):
    """Compare the variants of the operation with one process."""
    for label, variant in variants.items():
        compare(make(variant, "float64", shape), mesh, placements, f"{label}, {placements}, {shape}")


def communication(function):
    """Return how often each collective ran during a call."""
    with CommDebugMode() as trace:
        function()
    return {name._qualified_op_name.split("::")[1]: n for name, n in trace.get_comm_counts().items() if n}


def assert_no_communication(call, inputs, message):
    """Check that a call and its backward communicate nothing, and return the outputs."""
    outputs = call(inputs)
    ones = [distribute_tensor(torch.ones(t.shape).double(), t.device_mesh, t.placements) for t in outputs.values()]
    counts = communication(lambda: torch.autograd.backward([*call(inputs).values()], ones))
    assert counts == {}, message
    return outputs
