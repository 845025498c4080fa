"""What is timed: the jobs, and the cells of the matrix they make with norms, sizes, dtypes and threads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from addnorm.reference import Norm

SHAPES = ((1, 768), (1, 4096), (128, 768), (512, 768), (2048, 1024), (8192, 768), (4096, 4096))
ONE_THREAD_SHAPES = ((128, 768), (2048, 1024))  # one in the second level of the cache, one in the last
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NORMS: dict[Norm, str] = {"layer": "LayerNorm", "rms": "RMSNorm"}
DROPOUT = 0.1


class Job(NamedTuple):
    """One thing that users do; `expressions` has how they write it."""

    title: str
    tensors: int  # of rows x d, that it must read or write at least
    backward: bool = False
    compiled: bool = True  # torch.compile of its eager expression is not that of another job


JOBS = {
    "forward": Job("forward, y alone", 3),  # reads x and Sublayer(x), writes y
    "forward_stream": Job("forward, y and the stream", 4),  # writes z too
    "forward_backward": Job("forward + backward", 8, backward=True),  # then reads dy, dz and z, and writes one gradient
    "dropout": Job(f"forward + backward, dropout {DROPOUT}", 9, backward=True),  # the two gradients differ
    "everything": Job("forward + backward, all options", 10, backward=True),  # reads Sublayer(x) once more
    "in_place": Job("in place, y and the stream", 4, compiled=False),
    "reuse": Job("into given memory, y alone", 3, compiled=False),
}
PLAIN = ("forward", "forward_stream", "forward_backward")  # no option, new tensors


class Cell(NamedTuple):
    """One line of the matrix."""

    norm: Norm
    job: str
    rows: int
    d: int
    dtype: str
    threads: int

    @property
    def output_bytes(self) -> int:
        """Those of y."""
        return self.rows * self.d * DTYPES[self.dtype].itemsize


def matrix(
    norms: Sequence[Norm] = tuple(NORMS),
    dtypes: Sequence[str] = tuple(DTYPES),
    shapes: Sequence[tuple[int, int]] = SHAPES,
    *,
    jobs: Sequence[str] = tuple(JOBS),
    threads: int | None = None,
) -> list[Cell]:
    """Every combination, the norm outermost; `threads` None is what torch has."""
    threads = threads or torch.get_num_threads()
    lines = itertools.product(norms, jobs, shapes, dtypes)
    return [Cell(norm, job, rows, d, dtype, threads) for norm, job, (rows, d), dtype in lines]


def whole(
    norms: Sequence[Norm] = tuple(NORMS), dtypes: Sequence[str] = tuple(DTYPES), threads: int | None = None
) -> list[Cell]:
    """The matrix, and a few of its sizes with one thread."""
    cells = matrix(norms, dtypes, threads=threads)
    return list(dict.fromkeys(cells + matrix(norms, dtypes, ONE_THREAD_SHAPES, threads=1)))
