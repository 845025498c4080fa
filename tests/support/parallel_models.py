"""Comparison of models under a parallel plan with one process."""

from __future__ import annotations

import copy

import torch
from torch.distributed.tensor import DTensor

import addnorm
from addnorm.distributed import parallelize
from support.dtensors import TOLERANCE, mesh_of

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


def randomize(model):
    """Give norms and biases random values: with ones and zeros, errors in them would not be seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def compare(model, sequence_parallel, *inputs, **options):
    """Compare a model under the plan with one process: output, gradients of all parameters and of the inputs."""
    model.zero_grad()
    ours = parallelize(copy.deepcopy(model), mesh_of(), sequence_parallel=sequence_parallel)
    results = []
    for m in (ours, model):
        arguments = [x.clone().requires_grad_() for x in inputs]
        torch.manual_seed(3)
        y = m(*arguments, **options)
        cotangent = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
        (y * cotangent).sum().backward()
        grads = {name: whole(p.grad) for name, p in m.named_parameters()}
        results.append((y, packed(grads), [x.grad for x in arguments]))
    (y, grads, input_grads), (expected_y, expected_grads, expected_input_grads) = results
    assert type(y) is torch.Tensor
    torch.testing.assert_close(y, expected_y, **TOLERANCE)
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")
    for grad, expected in zip(input_grads, expected_input_grads, strict=True):
        torch.testing.assert_close(grad, expected, **TOLERANCE)
    return ours


def inputs(*shapes):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def compare_decoders() -> None:
    """Compare decoders with and without memory and masks, for a replicated and for a sharded stream."""
    for sequence_parallel in (False, True):
        torch.manual_seed(0)
        model = randomize(addnorm.nn.Decoder(2, **SIZES))
        compare(model, sequence_parallel, *inputs((2, 6, 16), (2, 5, 16)))
        compare(
            randomize(addnorm.nn.Decoder(2, **SIZES, cross_attention=False)), sequence_parallel, *inputs((2, 6, 16))
        )
        mask = torch.rand(2, 4, 6, 6) > 0.3
        key_mask = torch.rand(2, 5) > 0.3
        compare(model, sequence_parallel, *inputs((2, 6, 16), (2, 5, 16)), mask=mask, memory_key_mask=key_mask)
