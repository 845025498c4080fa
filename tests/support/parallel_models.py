"""Comparison with one process: models under a parallel plan, and the gradients of wrapped or sharded encoders."""

import copy
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import addnorm
from addnorm.distributed import parallelize
from support.dtensors import TOLERANCE, mesh_of
from support.instrumented_model import assert_same_numbers, backward, compute_loss, step
from support.torch_transformers import randomize

SIZES = {"d_model": 16, "nhead": 4, "dtype": torch.float64}


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def packed(gradients):
    """Return gradients with those of separate projections concatenated, under the names of the packed ones."""
    result = {}
    for name, t in gradients.items():
        head, _, kind = name.rpartition(".")
        parent, _, part = head.rpartition(".")
        if part in ("q", "k", "v") and parent.endswith(("in_proj", "kv_proj")):
            key = f"{parent}.{kind}"
            result[key] = torch.cat([result[key], t]) if key in result else t
        else:
            result[name] = t
    return result


def gradients_of(model):
    """Return the whole gradients of all parameters, under the names of the packed projections."""
    return packed({name: whole(p.grad) for name, p in model.named_parameters()})


def parallel_copy(model, sequence_parallel):
    """Return a copy of the model under the plan of all processes."""
    return parallelize(copy.deepcopy(model), mesh_of(), sequence_parallel=sequence_parallel)


def compare(model, *inputs, plans=(False, True), prepare=lambda model: None, **options):
    """Compare a model under both plans with one process: output, gradients of all parameters and of the inputs."""
    expected = run(model, inputs, options)
    for sequence_parallel in plans:
        ours = parallel_copy(model, sequence_parallel)
        prepare(ours)
        actual = run(ours, inputs, options)
        assert type(actual[0]) is torch.Tensor
        assert_close(actual, expected, **TOLERANCE)


def run(model, inputs, options):
    """Return the output, the gradients of the parameters, and those of the inputs."""
    model.zero_grad()
    arguments = [x.clone().requires_grad_() for x in inputs]
    torch.manual_seed(3)
    y = model(*arguments, **options)
    compute_loss(y).backward()
    return y, gradients_of(model), [x.grad for x in arguments]


def inputs(*shapes):
    """Return random inputs of these shapes, or one of the usual shape."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes or [(2, 6, 16)]]


def share_folder():
    """Return a new folder, the same in all processes."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    return folder[0]


def compare_steps(sharded, plain, x, sites, **tolerance):
    """Compare steps and contributions of a sharded model with those of the model before.

    The steps are recorded whole and without one write, and a backward runs with half of it; `sites` are its sites in both models.
    """
    recordings, gradients, maps = [], [], []
    for model, site in zip((sharded, plain), sites, strict=True):
        recordings.append([step(model, x, gather=True)])
        with addnorm.ablate(site):
            recordings[-1].append(step(model, x, gather=True))
        with addnorm.scale_write(site, 0.5):
            model.zero_grad()
            backward(model, x)
        gradients.append(gradients_of(model))
        maps.append(addnorm.decompose(model, x).memory_map()[1])
    for actual, expected in zip(*recordings, strict=True):
        assert_same_numbers(actual, expected, **tolerance)
        for key in ("omitted", "note"):
            assert actual.metadata.get(key) == expected.metadata.get(key)
        shares = ({name: entry and entry[1] for name, entry in rec.memory_maps.items()} for rec in (actual, expected))
        assert_close(*shares, **tolerance)
    assert_close(gradients[0], gradients[1], **tolerance)
    assert_close(maps[0], maps[1], **tolerance)


# Data parallelism


def encoder(wiring="pre_ln", **options):
    torch.manual_seed(3)
    return randomize(addnorm.nn.Encoder(3, 16, 2, wiring=wiring, dtype=torch.float64, **options))


def batch():
    """Return inputs and cotangents of 4 samples."""
    return torch.randn(2, 4, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(8))


def part(t):
    return t.chunk(dist.get_world_size())[dist.get_rank()]


def train(model, select=part):
    """Return the gradients of this rank's samples, averaged by the model's wrapper."""
    x, dy = map(select, batch())
    model.zero_grad()
    (model(x) * dy).mean().backward()
    return {name.removeprefix("module."): grad for name, grad in gradients_of(model).items()}


def check_gradients(actual, model):
    """Compare gradients of all ranks with those of one process that has all samples."""
    assert_close(actual, train(model, lambda t: t), **TOLERANCE)


def shard(model, *modules, **options):
    """Shard modules, or lists of modules as one group, and the root."""
    for module in modules:
        fully_shard(module, mesh=mesh_of(), **options)
    return fully_shard(model, mesh=mesh_of(), **options)


def shard_layers(model):
    return shard(model, *model.stack.layers)
