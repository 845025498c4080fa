"""Routes of the table in docs/routes.md that need two processes: cases for the launcher of distributed.py, one for each cell.

Every process computes the result of eager mode with all samples itself, and compares its part with it.
"""

import functools
import warnings

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from support.distributed import case
from support.dtensors import mesh_of
from support.parallel_models import packed
from support.route_calls import Run, compare, cotangent, gradients_of, run_eager, take_model, train
from support.route_models import OPERATIONS

WORLD_SIZE = 2


def expect_part(operation, dtype):
    """Return the result of eager mode: the output of this process's samples, and the gradients of all."""
    expected = run_eager(operation, dtype)
    return expected._replace(output=expected.output.chunk(WORLD_SIZE)[dist.get_rank()])


def train_part(model, operation, dtype):
    """Train a wrapped model, which averages the gradients, on this process's samples."""
    rank = dist.get_rank()
    return train(model, model, operation.inputs(dtype).chunk(WORLD_SIZE)[rank], rank, WORLD_SIZE)


def run_ddp(operation, dtype):
    expected = expect_part(operation, dtype)
    model = DistributedDataParallel(take_model(operation, dtype))
    return compare(train_part(model, operation, dtype), expected)


def run_fsdp2(operation, dtype, *, units=""):
    expected, mesh = expect_part(operation, dtype), mesh_of()
    model = take_model(operation, dtype)
    for module in getattr(operation, units)(model) if units else ():
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return compare(train_part(model, operation, dtype), expected)


def run_tensor_parallel(operation, dtype, *, sequence=False):
    expected, model = run_eager(operation, dtype), take_model(operation, dtype)
    operation.shard(model, mesh_of(), sequence=sequence)
    run = train(model, model, operation.inputs(dtype))
    return compare(run._replace(gradients=packed(run.gradients)), expected)


def run_pipeline(operation, dtype):
    """Run two stages, each on two microbatches, with GPipe."""
    expected, rank = run_eager(operation, dtype), dist.get_rank()
    model, x = take_model(operation, dtype), operation.inputs(dtype)
    module, names = operation.make_stage(model, x.chunk(2)[0], rank)
    module.zero_grad()
    stage = PipelineStage(module, rank, WORLD_SIZE, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda output, target: (output * target).mean())
    keywords = {"ids": x} if operation.is_fused else {}  # the second stage needs the padding
    with torch.profiler.profile() as profile:
        if rank == 0:
            schedule.step(x)
            output = expected.output  # the other process has it
        else:
            output = schedule.step(target=cotangent(expected.output), losses=[], **keywords)
    calls = sum(event.name.startswith("addnorm::") for event in profile.events())
    gradients = gradients_of(stage.submod)
    for old, new in names.items():
        gradients = {name.replace(old, new): grad for name, grad in gradients.items()}
    assert len(gradients) > 4
    part = expected._replace(gradients={name: expected.gradients[name] for name in gradients})
    return compare(Run(output.detach(), gradients, calls), part)


ROUTES = {
    "pipeline": run_pipeline,
    "DDP": run_ddp,
    "FSDP2, root": run_fsdp2,
    "FSDP2, layers": functools.partial(run_fsdp2, units="layers"),
    "FSDP2, sublayers": functools.partial(run_fsdp2, units="sublayers"),
    "tensor parallel": run_tensor_parallel,
    "sequence parallel": functools.partial(run_tensor_parallel, sequence=True),
}


def measure_cell(route, operation):
    """Return the comparison of a cell for each dtype."""
    results = {}
    for dtype in OPERATIONS[operation].dtypes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, while it captures and shards
            results[str(dtype)] = ROUTES[route](OPERATIONS[operation], dtype)
    return results


def name_case(route, operation):
    """Return the name of a cell's case."""
    return f"{route}, {operation}".replace(", ", "__").replace(" ", "_").replace("-", "_")


for _route in ROUTES:
    for _operation in OPERATIONS:
        globals()[name_case(_route, _operation)] = case(WORLD_SIZE)(functools.partial(measure_cell, _route, _operation))
