"""What is timed on a GPU: the jobs and the bytes they must move, the dtypes, the plan with the most important cells first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from addnorm.bench.jobs import DROPOUT, NORMS
from addnorm.reference import Norm

MB = 1e6
LARGE, MEDIUM = 64 * MB, 16 * MB  # of the smaller of a cell's tensors: where the targets are
TARGET_D = (1024, 2048, 4096, 8192, 16384)


class Dtypes(NamedTuple):
    """Those of the stream (x, z), of the branch (Sublayer(x), y), and of weight and bias."""

    title: str
    stream: torch.dtype
    branch: torch.dtype
    parameters: torch.dtype


DTYPES = {
    "bfloat16": Dtypes("bfloat16", torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "mixed": Dtypes("float32 stream, bfloat16 branch", torch.float32, torch.bfloat16, torch.float32),
    "float16": Dtypes("float16", torch.float16, torch.float16, torch.float16),
    "float32": Dtypes("float32", torch.float32, torch.float32, torch.float32),
}

# Every tensor of rows x d, and whose dtype it has. The gradient of the branch is that of the residual, one tensor, where
# their dtypes are the same and nothing was dropped.
STREAM, BRANCH = ("x", "z", "dz", "dx"), ("s", "y", "dy", "ds")
FORWARD, BACKWARD = ("x", "s", "y", "z"), ("dy", "dz", "z", "dx", "ds")


class Job(NamedTuple):
    """One thing that is timed."""

    title: str
    moves: tuple[str, ...]  # the tensors that it must read or write, at least
    stream: bool = True  # z is returned too
    forward: bool = True  # is in the time
    backward: bool = False
    dropout: float = 0.0


JOBS = {
    "forward": Job("forward, y alone", ("x", "s", "y"), stream=False),
    "forward_stream": Job("forward, y and the stream", FORWARD),
    "backward": Job("backward", BACKWARD, forward=False, backward=True),
    "forward_backward": Job("forward + backward", FORWARD + BACKWARD, backward=True),
    "dropout": Job(f"forward + backward, dropout {DROPOUT}", FORWARD + BACKWARD, backward=True, dropout=DROPOUT),
}


class Cell(NamedTuple):
    """One line of the plan."""

    norm: Norm
    job: str
    rows: int
    d: int
    dtype: str

    @property
    def tensor_bytes(self) -> int:
        """Those of the branch, and of y: the smaller tensors, where the stream is wider."""
        return self.rows * self.d * DTYPES[self.dtype].branch.itemsize

    @property
    def bytes(self) -> int:
        """That must move: each tensor with its own dtype. Parameters and statistics are nothing beside them."""
        dtypes, job = DTYPES[self.dtype], JOBS[self.job]
        one_gradient = dtypes.stream == dtypes.branch and not job.dropout
        moved = [name for name in job.moves if not (name == "ds" and one_gradient)]
        sizes = [(dtypes.stream if name in STREAM else dtypes.branch).itemsize for name in moved]
        return self.rows * self.d * sum(sizes)

    @property
    def title(self) -> str:
        """The cell in words."""
        return f"{NORMS[self.norm]}, {JOBS[self.job].title}, {self.rows} x {self.d} {self.dtype}"


class Tier(NamedTuple):
    """Cells of one purpose: every d with each size in bytes and each number of rows."""

    dtypes: tuple[str, ...]
    jobs: tuple[str, ...]
    ds: tuple[int, ...]
    sizes: tuple[float, ...] = ()
    rows: tuple[int, ...] = ()


# First a cell of every kind, at d = 4096, then the other sizes: what the budget leaves is more of the same. A cell that stands
# in an earlier tier is not measured again.
APART, TOGETHER, FEW = ("forward_stream", "backward"), ("forward_stream", "forward_backward"), (1, 128)
TIERS = (
    Tier(("bfloat16",), (*APART, "forward"), (4096,), (LARGE,)),
    Tier(("bfloat16",), TOGETHER, (4096,), rows=FEW),
    Tier(("bfloat16",), APART, TARGET_D, (LARGE,)),
    Tier(("mixed",), APART, (4096,), (LARGE,)),
    Tier(("bfloat16",), ("dropout", "forward_backward"), (4096,), (LARGE,)),
    Tier(("bfloat16",), (*APART, "forward"), (4096,), (MEDIUM,)),
    Tier(("bfloat16",), TOGETHER, (768,), rows=FEW),
    Tier(("float16", "float32"), APART, (4096,), (LARGE,)),
    Tier(("bfloat16",), ("forward",), TARGET_D, (LARGE,)),
    Tier(("mixed",), APART, TARGET_D, (LARGE,)),
    Tier(("bfloat16",), APART, (768, 32768, 65536), (LARGE,)),
    Tier(("float32",), APART, (1024, 16384), (LARGE,)),
    Tier(("bfloat16",), APART, (1024, 16384), (MEDIUM,)),
    Tier(("mixed",), ("dropout", "forward_backward"), (4096,), (LARGE,)),
    Tier(("bfloat16",), TOGETHER, (768, 4096), rows=(1024,)),
    Tier(("bfloat16",), ("dropout",), (768,), rows=(128,)),
)


def rows_for(size: float, d: int, dtype: str) -> int:
    """The power of two that makes a tensor of the branch at least `size` bytes."""
    rows = 1
    while Cell("layer", "forward", rows, d, dtype).tensor_bytes < size:
        rows *= 2
    return rows


def plan(
    norms: Sequence[Norm] = tuple(NORMS),
    dtypes: Sequence[str] | None = None,
    jobs: Sequence[str] | None = None,
    ds: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
) -> list[Cell]:
    """The cells in their order; what is given takes a part.

    Where both ds and rows are given, the cells are every combination instead, of bfloat16 and all jobs unless these are
    given too: so that any size can be measured.

    Raises:
        ValueError: no cell of the plan is of that kind.
    """
    if ds and rows:
        lines = itertools.product(dtypes or ("bfloat16",), ds, rows, norms, jobs or JOBS)
        return [Cell(norm, job, n, d, dtype) for dtype, d, n, norm, job in lines]
    asked = {"dtype": dtypes, "job": jobs, "d": ds, "rows": rows, "norm": norms}
    found = [
        cell for cell in dict.fromkeys(_whole()) if all(not some or getattr(cell, name) in some for name, some in asked.items())
    ]  # fmt: skip
    if not found:
        given = ", ".join(f"{name} {'/'.join(map(str, some))}" for name, some in asked.items() if some)
        raise ValueError(
            f"no cell of the plan has {given}: give both d and rows, and the cells are made of what you give"
        )
    return found


def _whole() -> Iterator[Cell]:
    for tier in TIERS:
        for dtype, d in itertools.product(tier.dtypes, tier.ds):
            for n in (*(rows_for(size, d, dtype) for size in tier.sizes), *tier.rows):
                for norm, job in itertools.product(NORMS, tier.jobs):
                    yield Cell(norm, job, n, d, dtype)
