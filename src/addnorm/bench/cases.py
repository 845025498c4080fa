"""Cases of the benchmark of the operation: norms, jobs, shapes, dtypes, threads; each job in eager PyTorch and in addnorm.

Both expressions of a job are functions of the same tensors, and each is one Python frame.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from addnorm import add_layer_norm, add_layer_norm_, add_rms_norm, add_rms_norm_
from addnorm._util.norms import KINDS
from addnorm.bench.harness import Case
from addnorm.reference import Norm

FIELDS = ("norm", "job", "rows", "d", "dtype", "threads")
SHAPES = ((1, 768), (1, 4096), (128, 768), (512, 768), (2048, 1024), (8192, 768), (4096, 4096))
ONE_THREAD_SHAPES = ((128, 768), (2048, 1024))  # one in the second level of the cache, one in the last
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NORMS: dict[Norm, str] = {name: kind.title for name, kind in KINDS.items()}
DROPOUT = 0.1


class Job(NamedTuple):
    """Use of the operation that is timed.

    Attributes:
        title: in tables.
        tensors: number of tensors of rows x d that it must read or write.
        backward: whether gradients are computed too.
        compiled: whether torch.compile is timed; not where its eager expression is that of another job.
    """

    title: str
    tensors: int
    backward: bool = False
    compiled: bool = True


JOBS = {
    "forward": Job("forward, y alone", 3),  # reads x and Sublayer(x), writes y
    "forward_stream": Job("forward, y and the stream", 4),  # writes z too
    "forward_backward": Job("forward + backward", 8, backward=True),  # then reads dy, dz and z, and writes one gradient
    "dropout": Job(f"forward + backward, dropout {DROPOUT}", 9, backward=True),  # the two gradients differ
    "everything": Job("forward + backward, all options", 10, backward=True),  # reads Sublayer(x) once more
    "in_place": Job("in place, y and the stream", 4, compiled=False),
    "reuse": Job("into given memory, y alone", 3, compiled=False),
}
PLAIN = ("forward", "forward_stream", "forward_backward")  # without options, into new tensors


def output_bytes(case: Case) -> int:
    """Return the bytes of y."""
    return int(case.rows * case.d * DTYPES[case.dtype].itemsize)


def title(case: Case) -> str:
    """Return the title of the table that a case belongs to."""
    threads = f", {case.threads} thread{'s'[: case.threads > 1]}"
    return f"{NORMS[case.norm]}: {JOBS[case.job].title}{threads}"


def full_title(case: Case) -> str:
    """Return a case in words."""
    return f"{title(case)}, {case.rows} x {case.d} {case.dtype}"


def matrix(
    norms: Sequence[Norm] = tuple(NORMS),
    dtypes: Sequence[str] = tuple(DTYPES),
    shapes: Sequence[tuple[int, int]] = SHAPES,
    *,
    jobs: Sequence[str] = tuple(JOBS),
    threads: int | None = None,
) -> list[Case]:
    """Return a case for every combination, the norm outermost. `threads` None: as many as torch has."""
    threads = threads or torch.get_num_threads()
    lines = itertools.product(norms, jobs, shapes, dtypes)
    return [
        Case(norm=norm, job=job, rows=rows, d=d, dtype=dtype, threads=threads) for norm, job, (rows, d), dtype in lines
    ]


def whole(
    norms: Sequence[Norm] = tuple(NORMS), dtypes: Sequence[str] = tuple(DTYPES), threads: int | None = None
) -> list[Case]:
    """Return the whole matrix, and a few of its shapes on one thread."""
    cases = matrix(norms, dtypes, threads=threads)
    return list(dict.fromkeys(cases + matrix(norms, dtypes, ONE_THREAD_SHAPES, threads=1)))


EPS = {"layer": 1e-5, "rms": 1e-6}
# In place, a call's y is the next call's branch. With a weight and a bias of a millionth all the calls of a case, some
# 100,000, move the stream by a tenth: the values stay ordinary, and every call moves the bytes that it would have moved.
IN_PLACE_SCALE = 2.0**-20

Call = Callable[..., Any]
Pair = tuple[Call, Call]


def expressions(norm: Norm, job: str, d: int, eps: float | None = None) -> dict[str, Call]:
    """Return `eager` and `addnorm` as functions of the tensors of `inputs`: (residual, branch, weight, bias, ...)."""
    pairs = {"layer": _layer_norm, "rms": _rms_norm}[norm]((d,), EPS[norm] if eps is None else eps)
    pairs["forward_backward"] = pairs["forward_stream"]
    return dict(zip(("eager", "addnorm"), pairs[job], strict=True))


def _layer_norm(shape: tuple[int], eps: float) -> dict[str, Pair]:
    return {
        "forward": (
            lambda x, s, w, b: F.layer_norm(x + s, shape, w, b, eps),
            lambda x, s, w, b: add_layer_norm(x, s, w, b, eps),
        ),
        "forward_stream": (
            lambda x, s, w, b: (F.layer_norm(z := x + s, shape, w, b, eps), z),
            lambda x, s, w, b: add_layer_norm(x, s, w, b, eps, return_residual=True),
        ),
        "dropout": (
            lambda x, s, w, b: (F.layer_norm(z := x + F.dropout(s, DROPOUT), shape, w, b, eps), z),
            lambda x, s, w, b: add_layer_norm(x, s, w, b, eps, dropout_p=DROPOUT, return_residual=True),
        ),
        "everything": (
            lambda x, s, w, b, g, c: (F.layer_norm(z := x + g * F.dropout(s + c, DROPOUT), shape, w, b, eps), z),
            lambda x, s, w, b, g, c: add_layer_norm(
                x, s, w, b, eps, layer_scale=g, branch_bias=c, dropout_p=DROPOUT, return_residual=True
            ),
        ),
        "in_place": (
            lambda x, s, w, b: (F.layer_norm(z := x + s, shape, w, b, eps), z),
            lambda x, s, w, b: (add_layer_norm_(x, s, w, b, eps), x),
        ),
        "reuse": (
            lambda x, s, w, b, y: F.layer_norm(x + s, shape, w, b, eps),
            lambda x, s, w, b, y: add_layer_norm(x, s, w, b, eps, out=y),
        ),
    }


def _rms_norm(shape: tuple[int], eps: float) -> dict[str, Pair]:
    return {
        "forward": (
            lambda x, s, w, b: F.rms_norm(x + s, shape, w, eps),
            lambda x, s, w, b: add_rms_norm(x, s, w, None, eps),
        ),
        "forward_stream": (
            lambda x, s, w, b: (F.rms_norm(z := x + s, shape, w, eps), z),
            lambda x, s, w, b: add_rms_norm(x, s, w, None, eps, return_residual=True),
        ),
        "dropout": (
            lambda x, s, w, b: (F.rms_norm(z := x + F.dropout(s, DROPOUT), shape, w, eps), z),
            lambda x, s, w, b: add_rms_norm(x, s, w, None, eps, dropout_p=DROPOUT, return_residual=True),
        ),
        "everything": (
            lambda x, s, w, b, g, c: (F.rms_norm(z := x + g * F.dropout(s + c, DROPOUT), shape, w, eps), z),
            lambda x, s, w, b, g, c: add_rms_norm(
                x, s, w, None, eps, layer_scale=g, branch_bias=c, dropout_p=DROPOUT, return_residual=True
            ),
        ),
        "in_place": (
            lambda x, s, w, b: (F.rms_norm(z := x + s, shape, w, eps), z),
            lambda x, s, w, b: (add_rms_norm_(x, s, w, None, eps), x),
        ),
        "reuse": (
            lambda x, s, w, b, y: F.rms_norm(x + s, shape, w, eps),
            lambda x, s, w, b, y: add_rms_norm(x, s, w, None, eps, out=y),
        ),
    }


def inputs(
    job: str, rows: int, d: int, dtype: torch.dtype, parameters: torch.dtype | None = None, grad: bool = False
) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """Return (residual, branch, weight, bias, ...), and the gradients of y and z. They are random, the same in every call.

    Further arguments: layer scale and branch bias for `everything`, the output tensor for `reuse`.
    """
    rng = torch.Generator().manual_seed(0)
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    x, s, dy, dz = (torch.randn(rows, d, generator=rng, dtype=drawn).to(dtype) for _ in range(4))
    count = 4 if job == "everything" else 2
    vectors = [torch.rand(d, generator=rng, dtype=drawn).add_(0.5).to(parameters or dtype) for _ in range(count)]
    if job == "in_place":
        vectors = [t.mul_(IN_PLACE_SCALE) for t in vectors]
    args = [t.requires_grad_(grad) for t in (x, s, *vectors)]
    return [*args, torch.empty_like(dy)] if job == "reuse" else args, (dy, dz)


def differentiable(norm: Norm, args: list[Tensor]) -> list[Tensor]:
    """Return the arguments that have a gradient: RMSNorm has no bias."""
    return args if norm == "layer" else [t for k, t in enumerate(args) if k != 3]
