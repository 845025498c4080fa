"""Tests for memory leaks: each path runs many times with tensors of a megabyte, while the process must not grow."""

import contextlib
import ctypes
import gc
import resource
from pathlib import Path

import pytest
import torch

import addnorm
from addnorm.bench.timing import settle_allocator
from support.cases import make

TIMES, WARM_UPS, MEGABYTE = 40, 10, 2**20
ROWS, D = 512, 512  # a megabyte in float32
LIMIT = 14 * MEGABYTE  # below TIMES tensors of 16 bits


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Exclude what earlier tests have made from garbage collection, which is then fast, and map each tensor's memory anew.

    Tests of the benchmarks set malloc to reuse freed blocks, which hide a leak.
    """
    gc.collect()
    gc.freeze()
    settle_allocator("fresh")
    yield
    settle_allocator("default")


def resident():
    """Return the bytes of this process in memory, after malloc has returned its free memory.

    Otherwise memory that earlier tests have freed would be reused and hide a leak.
    """
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc's malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def growth(path, times=TIMES):
    """Return the growth of the process while `path` runs `times` times, after enough runs to fill every cache."""
    for _ in range(WARM_UPS):
        path()
    before = resident()
    for _ in range(times):
        path()
    return resident() - before


def fresh(c, grad=False):
    """Return copies of the call's tensors, so that each leaked reference costs a megabyte."""
    return {name: t.clone().requires_grad_(grad) for name, t in c.tensors.items()}


def backward(c):
    tensors = fresh(c, grad=True)
    outputs = list(c(tensors).values())
    torch.autograd.grad(outputs, list(tensors.values()), [torch.ones_like(t) for t in outputs])


def dropped_graph(c):
    """Build a graph and drop it without a backward."""
    c(fresh(c, grad=True))


def strided(c):
    tensors = fresh(c, grad=True)
    for name in ("residual", "branch"):
        tensors[name] = tensors[name].t()  # 512 by 512
    outputs = c(tensors)
    torch.autograd.grad(list(outputs.values()), tensors["residual"], [torch.ones_like(t) for t in outputs.values()])


def refused(c):
    with contextlib.suppress(ValueError):
        c(fresh(c) | {"weight": torch.ones(D + 1)})
        raise AssertionError


def refused_by_torch(c):
    """Make a valid call for whose result the memory cannot be allocated."""
    weight = torch.ones(MEGABYTE // 4)
    huge = torch.zeros(1).expand(2**35, len(weight))
    with contextlib.suppress(RuntimeError):
        addnorm.add_layer_norm(huge, huge, weight)
        raise AssertionError


def second_derivative(c):
    tensors = fresh(c, grad=True)
    y = c(tensors)["y"]
    (grad,) = torch.autograd.grad(y, tensors["residual"], torch.ones_like(y), create_graph=True)
    torch.autograd.grad(grad.square().sum(), tensors["branch"])


PATHS = {
    "y alone": (lambda c: c.y_alone(fresh(c)), "LayerNorm", "float32"),
    "y and the stream": (lambda c: c(fresh(c)), "LayerNorm", "float32"),
    "backward": (backward, "LayerNorm", "float32"),
    "two gradients of two dtypes": (backward, "LayerNorm", "float32 stream, bfloat16 branch"),
    "a graph that is dropped": (dropped_graph, "LayerNorm", "float32"),
    "strided": (strided, "LayerNorm", "float32"),
    "refused": (refused, "LayerNorm", "float32"),
    "refused by torch": (refused_by_torch, "LayerNorm", "float32"),
    "layer_scale and row_scale": (backward, "row_scale and layer_scale", "float32"),
    "second derivative": (second_derivative, "RMSNorm", "float32"),
}


@pytest.mark.parametrize("name", PATHS)
def test_path_leaks_no_memory(name):
    path, variant, dtypes = PATHS[name]
    c = make(variant, dtypes, (ROWS, D))
    # The second derivative is the slowest path. All its tensors have 32 bits, so that half as many are above the limit.
    times = TIMES // 2 if path is second_derivative else TIMES
    assert growth(lambda: path(c), times) < LIMIT


def test_growth_detects_a_leak():
    freed = [torch.ones(ROWS, D) for _ in range(2 * TIMES)]
    last = torch.ones(ROWS, D)  # allocated after them, so that malloc keeps them
    del freed
    kept = []
    assert growth(lambda: kept.append(torch.ones(ROWS, D))) > 2 * LIMIT
    del last
