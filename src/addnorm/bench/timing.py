"""The stopwatch: cells, their variants, and how one is timed.

What a time from here means (benchmarks/README.md says why):

- All variants of a cell run in one process, interleaved round by round, the order rotated; medians and quartiles.
- Before a variant is timed it is called once untimed, with the garbage of the one before it gone and the collector off.
- The allocator is in the state of a process that has lived for a while, the same for all (`settle_allocator`).
- Bandwidth is that of the bytes which must move, as a share of what `torch.add(out=)` of the same size reaches.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from addnorm.functional import add_layer_norm, add_rms_norm
from addnorm.reference import Norm

SHAPES = ((1, 768), (1, 4096), (128, 768), (512, 768), (2048, 1024), (8192, 768), (4096, 4096))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NORMS: dict[Norm, str] = {"layer": "LayerNorm", "rms": "RMSNorm"}
EPS = {"layer": 1e-5, "rms": 1e-6}
ROUNDS = 21
SEGMENT_MS = 5.0  # what one timed loop should take, so that the clock and the loop do not count

Row = dict[str, Any]
Call = Callable[..., Any]


class Job(NamedTuple):
    """What is timed, and how many tensors of rows x d it must read or write at least."""

    title: str
    tensors: int


JOBS = {
    "forward": Job("forward, y alone", 3),  # reads x and Sublayer(x), writes y
    "forward_stream": Job("forward, y and the stream", 4),  # writes z too
    "forward_backward": Job("forward + backward", 8),  # then reads dy, dz and z, and writes one gradient
}
ADD_TENSORS = 3


class Cell(NamedTuple):
    """One line of the matrix."""

    norm: Norm
    job: str
    rows: int
    d: int
    dtype: str

    @property
    def output_bytes(self) -> int:
        """Those of y."""
        return self.rows * self.d * DTYPES[self.dtype].itemsize


def matrix(
    norms: Sequence[Norm] = tuple(NORMS),
    dtypes: Sequence[str] = tuple(DTYPES),
    shapes: Sequence[tuple[int, int]] = SHAPES,
) -> list[Cell]:
    """Every combination with every job, the norm outermost."""
    return [Cell(norm, job, *shape, dtype) for norm in norms for job in JOBS for shape in shapes for dtype in dtypes]


def expressions(norm: Norm, stream: bool, d: int) -> dict[str, Call]:
    """`eager` and `addnorm`: the same expression of (residual, branch, weight, bias), each one Python frame."""
    shape, eps = (d,), EPS[norm]
    table: dict[tuple[Norm, bool], tuple[Call, Call]] = {
        ("layer", False): (
            lambda x, s, w, b: F.layer_norm(x + s, shape, w, b, eps),
            lambda x, s, w, b: add_layer_norm(x, s, w, b, eps),
        ),
        ("layer", True): (
            lambda x, s, w, b: (F.layer_norm(z := x + s, shape, w, b, eps), z),
            lambda x, s, w, b: add_layer_norm(x, s, w, b, eps, return_residual=True),
        ),
        ("rms", False): (
            lambda x, s, w, b: F.rms_norm(x + s, shape, w, eps),
            lambda x, s, w, b: add_rms_norm(x, s, w, None, eps),
        ),
        ("rms", True): (
            lambda x, s, w, b: (F.rms_norm(z := x + s, shape, w, eps), z),
            lambda x, s, w, b: add_rms_norm(x, s, w, None, eps, return_residual=True),
        ),
    }
    return dict(zip(("eager", "addnorm"), table[norm, stream], strict=True))


def inputs(
    rows: int, d: int, dtype: torch.dtype, parameters: torch.dtype | None = None, grad: bool = False
) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """(residual, branch, weight, bias), and the gradients of y and z: random, the same every time."""
    rng = torch.Generator().manual_seed(0)
    x, s, dy, dz = (torch.randn(rows, d, generator=rng).to(dtype) for _ in range(4))
    w, b = (torch.rand(d, generator=rng).add_(0.5).to(parameters or dtype) for _ in range(2))
    return [t.requires_grad_(grad) for t in (x, s, w, b)], (dy, dz)


def learned(norm: Norm, args: list[Tensor]) -> list[Tensor]:
    """Those of the arguments that have a gradient: RMSNorm has no bias."""
    return args if norm == "layer" else args[:3]


def variants(cell: Cell, compiled: bool) -> tuple[dict[str, Call], list[Tensor]]:
    """Every variant as a function of the same arguments, and the arguments."""
    backward = cell.job == "forward_backward"
    args, cotangents = inputs(cell.rows, cell.d, DTYPES[cell.dtype], grad=backward)
    calls = expressions(cell.norm, cell.job != "forward", cell.d)
    if compiled:
        torch.compiler.reset()  # this cell's graph alone, without the guards of those before it
        calls["compile"] = torch.compile(calls["eager"], dynamic=False, fullgraph=True)
    if backward:
        wanted = learned(cell.norm, args)
        calls = {name: _with_gradients(call, wanted, cotangents) for name, call in calls.items()}
    left, right = args[0].detach(), args[1].detach()
    out = torch.empty_like(left)
    calls["add"] = lambda *_: torch.add(left, right, out=out)
    return calls, args


def _with_gradients(call: Call, wanted: list[Tensor], cotangents: tuple[Tensor, Tensor]) -> Call:
    grad = torch.autograd.grad
    return lambda x, s, w, b: grad(call(x, s, w, b), wanted, cotangents)


def settle_allocator() -> None:
    """Bring glibc's malloc into the state of a process that has lived for a while.

    Blocks above a threshold it maps afresh, to be paged in at every call; and it raises the threshold, to 32 MiB at
    most, only when such a block is freed. Without this, what ran first would decide what the next one costs.
    """
    torch.empty(8 * 1024 * 1024 - 4096, dtype=torch.float32)  # just below 32 MiB, and freed at once


def _seconds(call: Call, args: list[Tensor], repeats: int) -> float:
    start = time.perf_counter_ns()
    for _ in itertools.repeat(None, repeats):
        call(*args)
    return (time.perf_counter_ns() - start) / 1e9


def _calibrated(call: Call, args: list[Tensor]) -> int:
    call(*args)  # compiles, where that is what it does; starts the threads
    once = min(_seconds(call, args, 1) for _ in range(5))
    return max(1, min(10_000, round(SEGMENT_MS / 1e3 / once)))


@contextmanager
def _collected_by_hand() -> Iterator[None]:
    """No collection but those asked for, and these look only at what is new: the 100,000 objects of torch stay out."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def measure(cell: Cell, *, rounds: int = ROUNDS, compiled: bool = False) -> tuple[list[Row], list[Row]]:
    """The rows of one cell, one a variant; and what failed to compile, with the error."""
    calls, args = variants(cell, compiled)
    repeats, failures = {}, []
    for name, call in calls.items():
        try:
            repeats[name] = _calibrated(call, args)
        except Exception as error:
            if name != "compile":
                raise
            failures.append({**cell._asdict(), "variant": name, "error": f"{type(error).__name__}: {error}"[:300]})
    names = list(repeats)
    samples: dict[str, list[float]] = {name: [] for name in names}
    with _collected_by_hand():
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                gc.collect()
                calls[name](*args)
                samples[name].append(_seconds(calls[name], args, repeats[name]) / repeats[name] * 1e6)
    return _rows(cell, samples, repeats), failures


def _rows(cell: Cell, samples: dict[str, list[float]], repeats: dict[str, int]) -> list[Row]:
    medians = {name: statistics.median(times) for name, times in samples.items()}
    rows = []
    for name, times in samples.items():
        q1, _, q3 = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
        tensors = ADD_TENSORS if name == "add" else JOBS[cell.job].tensors
        rows.append({
            **cell._asdict(), "variant": name, "median_us": medians[name], "q1_us": q1, "q3_us": q3,
            "repeats": repeats[name], "ratio_to_eager": medians["eager"] / medians[name],
            "bytes": tensors * cell.output_bytes,
            "share_of_add_bandwidth": tensors / ADD_TENSORS * medians["add"] / medians[name],
        })  # fmt: skip
    return rows
