"""The tensors of a cell, in as many sets as keep the cache cold, and what is timed: a call of one set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from addnorm.bench.expressions import Call
from addnorm.bench.gpu.cells import DTYPES, JOBS, Cell, Job

TIMES_CACHE = 3  # what the sets together are, in caches
MOST_SETS = 256

Timed = Callable[[int], object]


class Set(NamedTuple):
    """The inputs of one call: (residual, branch, weight, bias), those with a gradient, and the gradients of y and z."""

    args: tuple[Tensor | None, ...]
    wanted: tuple[Tensor, ...]
    cotangents: tuple[Tensor, Tensor] | tuple[()]


def how_many(cell: Cell, cache: int) -> int:
    """So many sets that a call finds nothing of the one before it in the cache, two at least."""
    return max(2, min(MOST_SETS, -(-TIMES_CACHE * cache // (2 * cell.tensor_bytes))))


def is_cold(cell: Cell, cache: int, sets: int) -> bool:
    """Whether the inputs of all sets together are larger than the cache."""
    return sets * 2 * cell.tensor_bytes > cache


def inputs(cell: Cell, device: torch.device, sets: int) -> list[Set]:
    """Random sets, the same at every run; weight and bias are the same in all.

    Where the job has dropout, no element of the branch is small: then z tells which were dropped (`check`).
    """
    rng = torch.Generator(device).manual_seed(0)
    dtypes, job = DTYPES[cell.dtype], JOBS[cell.job]

    def drawn(dtype: torch.dtype) -> Tensor:
        return torch.randn(cell.rows, cell.d, generator=rng, device=device).to(dtype)

    vectors = [torch.rand(cell.d, generator=rng, device=device).add_(0.5).to(dtypes.parameters) for _ in range(2)]
    w, b = (t.requires_grad_(job.backward) for t in vectors)
    bias = b if cell.norm == "layer" else None
    found = []
    for _ in range(sets):
        x, s = drawn(dtypes.stream), drawn(dtypes.branch)
        if job.dropout:
            s = torch.copysign(s.abs() + 0.5, s)
        x.requires_grad_(job.backward), s.requires_grad_(job.backward)
        args = (x, s, w, bias)
        cotangents = (drawn(dtypes.branch), drawn(dtypes.stream)) if job.backward else ()
        wanted = tuple(t for t in args if t is not None) if job.backward else ()
        found.append(Set(args, wanted, cotangents))
    return found


def gradients(job: Job, outputs: Any, one: Set) -> tuple[Tensor, ...]:
    """Those of what a variant returned on a set. The graph of `backward` is kept, from its first run on.

    `torch.compile` decides at the first one whether the backward may write over what was saved (`measuring._graphs_are_kept`).
    """
    return torch.autograd.grad(outputs, one.wanted, one.cotangents, retain_graph=not job.forward)


def timed(cell: Cell, forward: Call, sets: list[Set]) -> Timed:
    """What is timed: the job on set i, its result returned and dropped. For `backward` the graphs are made here, and kept."""
    job = JOBS[cell.job]
    args = [one.args for one in sets]
    if not job.backward:
        return lambda i: forward(*args[i])
    if job.forward:
        return lambda i: gradients(job, forward(*args[i]), sets[i])
    graphs = [forward(*one) for one in args]
    return lambda i: gradients(job, graphs[i], sets[i])


def copier(cell: Cell, device: torch.device, sets: int) -> Timed:
    """A kernel that reads and writes as many bytes as the cell must move (`device.WAYS` says why not the driver's copy)."""
    words = max(1, cell.bytes // 8)  # of four bytes, read and written
    sources = [torch.randint(-(2**31), 2**31, (words,), dtype=torch.int32, device=device) for _ in range(sets)]
    targets = [torch.empty_like(source) for source in sources]
    return lambda i: torch.bitwise_not(sources[i], out=targets[i])
