"""Cases of the GPU benchmark, the most important first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from addnorm.bench.case import Case, Selection, grid, select
from addnorm.bench.jobs import NORMS, tensor_bytes

FIELDS = ("norm", "job", "rows", "d", "dtype", "device")
MB = 1e6
LARGE, MEDIUM = 64 * MB, 16 * MB  # bytes of the branch from which the targets hold
TARGET_D = (1024, 2048, 4096, 8192, 16384)
TIMED = ("forward", "forward_stream", "backward", "forward_backward", "dropout")


def tier(
    dtypes: Iterable[str], jobs: Iterable[str], ds: Iterable[int], *sizes: float, rows: Iterable[int] = ()
) -> list[Case]:
    """Return cases with one purpose: every norm, dtype, d and job, with each size in bytes and each number of rows."""
    return [
        case for dtype, d in itertools.product(dtypes, ds)
        for case in grid(
            dtype=[dtype], d=[d], rows=[*(rows_for(size, d, dtype) for size in sizes), *rows], norm=NORMS, job=jobs
        )
    ]  # fmt: skip


def rows_for(size: float, d: int, dtype: str) -> int:
    """Return the smallest power of two as the number of rows with which the branch has at least `size` bytes."""
    return 1 << math.ceil(math.log2(size / tensor_bytes(Case(rows=1, d=d, dtype=dtype))))


# First a case of every kind, at d = 4096, then the other sizes: the cases that the budget leaves are more of the same kinds.
# A case of an earlier tier is not repeated.
APART, TOGETHER, FEW = ("forward_stream", "backward"), ("forward_stream", "forward_backward"), (1, 128)
CASES = dict.fromkeys([
    *tier(["bfloat16"], (*APART, "forward"), [4096], LARGE),
    *tier(["bfloat16"], APART, TARGET_D, LARGE),
    *tier(["bfloat16"], TOGETHER, [4096, 768], rows=FEW),
    *tier(["bfloat16", "mixed"], ("dropout", "forward_backward"), [4096], LARGE),
    *tier(["float16", "float32"], APART, [4096], LARGE),
    *tier(["mixed"], APART, TARGET_D, LARGE),
    *tier(["bfloat16"], (*APART, "forward"), [4096], MEDIUM),
    *tier(["bfloat16"], ["forward"], TARGET_D, LARGE),
    *tier(["bfloat16"], APART, [768, 32768, 65536], LARGE),
    *tier(["bfloat16"], TOGETHER, [768, 4096], rows=[1024]),
])  # fmt: skip


def plan(selected: Selection, threads: int = 0) -> list[Case]:
    """Return the cases, the most important first, or the `selected` ones.

    If both d and rows are selected, the result is every combination of the selected values instead, by default with bfloat16 and
    all jobs, so that any size can be measured. The number of threads has no effect.

    Raises:
        ValueError: the plan has no such case.
    """
    if {"d", "rows"} <= selected.keys():
        sizes = {"dtype": ("bfloat16",), "d": (), "rows": (), "norm": NORMS, "job": TIMED}
        return grid(**{name: selected.get(name, values) for name, values in sizes.items()})
    try:
        return select(CASES, selected)
    except ValueError as error:
        raise ValueError(f"{error}: give both d and rows to measure other sizes") from None
