"""What the times must show: targets as data, computed from the rows of a document and from nothing else."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from statistics import geometric_mean
from typing import Any, NamedTuple

from addnorm.bench import frame
from addnorm.bench.jobs import JOBS, PLAIN, Cell
from addnorm.bench.timing import Row

LARGE = 32e6  # bytes of y: above glibc's highest threshold for mapping, so that fresh pages dominate

COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "<": operator.lt,
    "==": operator.eq,
}


class Goal(NamedTuple):
    """A statistic over cells of a peer's time over ours (`add`: of ours over the peer's), and its target, if it has one."""

    name: str
    statistic: Callable[[list[float]], float]
    peer: str
    compare: str
    target: float | None
    where: Callable[[Cell, float], bool]  # of the cell and the bytes of the last-level cache


def _plain(cell: Cell) -> bool:
    return cell.job in PLAIN


def _forward(cell: Cell) -> bool:
    return _plain(cell) and not JOBS[cell.job].backward


def _backward(cell: Cell) -> bool:
    return _plain(cell) and JOBS[cell.job].backward


def _batch(cell: Cell) -> bool:
    return cell.rows >= 128 and cell.output_bytes < LARGE


GOALS = (
    Goal("forward, 128+ rows, under 32 MB: mean", geometric_mean, "eager", ">=", 2.8,
         lambda cell, _: _forward(cell) and _batch(cell)),
    Goal("forward, one row: mean", geometric_mean, "eager", ">=", 1.25,
         lambda cell, _: _forward(cell) and cell.rows == 1),
    Goal("forward, over 32 MB: lowest", min, "eager", ">=", 0.95,
         lambda cell, _: _forward(cell) and cell.output_bytes >= LARGE),
    Goal("with backward, 128+ rows, under 32 MB: mean", geometric_mean, "eager", ">=", 2.5,
         lambda cell, _: _backward(cell) and _batch(cell)),
    Goal("with backward: lowest", min, "eager", ">=", 0.95, lambda cell, _: _backward(cell)),
    Goal("without options: lowest", min, "eager", ">=", 0.95, lambda cell, _: _plain(cell)),
    Goal("without options, under 32 MB: lowest", min, "compile", ">=", 0.95,
         lambda cell, _: _plain(cell) and cell.output_bytes < LARGE),
    Goal("y alone, float32, 128+ rows, in cache: highest", max, "add", "<=", 1.8,
         lambda cell, cache: cell.job == "forward" and cell.dtype == "float32" and cell.rows >= 128
         and 3 * cell.output_bytes <= cache),
    Goal("dropout, with backward: mean", geometric_mean, "eager", ">=", 3.0, lambda cell, _: cell.job == "dropout"),
    Goal("all options, with backward: mean", geometric_mean, "eager", ">=", 4.0,
         lambda cell, _: cell.job == "everything"),
    Goal("in place, 4096 x 4096: lowest", min, "eager", ">=", 4.0,
         lambda cell, _: cell.job == "in_place" and (cell.rows, cell.d) == (4096, 4096)),
    Goal("y into given memory, 4096 x 4096: highest", max, "add", "<=", 1.3,
         lambda cell, _: cell.job == "reuse" and (cell.rows, cell.d) == (4096, 4096)),
    Goal("dropout and all options: mean", geometric_mean, "compile", ">=", None,
         lambda cell, _: cell.job in ("dropout", "everything")),
    Goal("forward, float32: mean", geometric_mean, "onnxruntime", ">=", None, lambda cell, _: _forward(cell)),
    Goal("y into given memory, float32: mean", geometric_mean, "onnxruntime", ">=", None,
         lambda cell, _: cell.job == "reuse"),
)  # fmt: skip

VERSUS = {"eager": "x eager", "compile": "x compile", "onnxruntime": "x onnxruntime", "add": "x add's time"}


def by_cell(rows: list[Row]) -> dict[Cell, dict[str, Row]]:
    """The rows of a document: cell -> variant -> row."""
    return frame.by_cell(rows, Cell)


def claim(name: str, norm: str | None, value: float | None, compare: str, target: float | None, **more: Any) -> Row:
    """A number next to its target; `met` is None where there is no number, or no target."""
    met = None if value is None or target is None else COMPARE[compare](value, target)
    return {"name": name, "norm": norm, **more, "value": value, "compare": compare, "target": target, "met": met}


def summarize(rows: list[Row], cache_bytes: float) -> list[Row]:
    """`GOALS`, for each norm among the rows; and again for fewer threads, without targets: those are for all threads."""
    cells, summary = by_cell(rows), []
    counts = sorted({cell.threads for cell in cells}, reverse=True)
    for threads, norm in itertools.product(counts, dict.fromkeys(cell.norm for cell in cells)):
        for goal in GOALS:
            ratios = []
            for cell, row in cells.items():
                if (cell.threads, cell.norm) == (threads, norm) and goal.peer in row and goal.where(cell, cache_bytes):
                    ratio = row[goal.peer]["median_us"] / row["addnorm"]["median_us"]
                    ratios.append(1 / ratio if goal.peer == "add" else ratio)
            target = goal.target if threads == counts[0] else None
            if ratios or target is not None:
                summary.append(claim(
                    goal.name, norm, goal.statistic(ratios) if ratios else None, goal.compare, target,
                    versus=VERSUS[goal.peer], threads=threads, cells=len(ratios),
                ))  # fmt: skip
    return summary
