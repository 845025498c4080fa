"""What the times must show on a GPU: targets as data, computed from the rows of a document and from nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean
from typing import NamedTuple

from addnorm.bench import frame
from addnorm.bench.gpu.cells import JOBS, LARGE, MEDIUM, TARGET_D, Cell
from addnorm.bench.gpu.variants import EVERY
from addnorm.bench.summary import COMPARE, claim
from addnorm.bench.timing import Row

Rows = dict[str, Row]


class Goal(NamedTuple):
    """A statistic of a number over cells, and its target, if it has one."""

    name: str
    value: Callable[[Rows], float | None]  # of a cell's rows by variant; None where they have not what it needs
    statistic: Callable[[list[float]], float]
    compare: str
    target: float | None
    where: Callable[[Cell], bool]


def share(rows: Rows) -> float | None:
    """addnorm's share of the copy bandwidth."""
    return float(rows["addnorm"]["share_of_copy"]) if "addnorm" in rows else None


def over(peer: str, part: str) -> Callable[[Rows], float | None]:
    """addnorm's time over the peer's: 1 and below is no slower."""

    def value(rows: Rows) -> float | None:
        if "addnorm" not in rows or peer not in rows:
            return None
        return float(rows["addnorm"][f"{part}_us"] / rows[peer][f"{part}_us"])

    return value


def _aimed(cell: Cell) -> bool:
    return cell.tensor_bytes >= LARGE and TARGET_D[0] <= cell.d <= TARGET_D[-1]


NAMES = {"eager": "eager", "compile": "torch.compile", "liger": "Liger", "flash_attn": "flash-attn", "quack": "QuACK"}
JUDGED = ("eager", "compile", "liger")
GOALS = (
    Goal("forward, 64 MB and more, d 1024 to 16384: lowest share of the copy bandwidth", share, min, ">=", 0.9,
         lambda cell: _aimed(cell) and not JOBS[cell.job].backward),
    Goal("backward, 64 MB and more, d 1024 to 16384: lowest share of the copy bandwidth", share, min, ">=", 0.8,
         lambda cell: _aimed(cell) and cell.job == "backward"),
    *(Goal(f"device time over {NAMES[peer]}'s: highest", over(peer, "device"), max, "<=", 1.0, lambda cell: True)
      for peer in JUDGED),
    *(Goal(f"call time over {NAMES[peer]}'s, 16 MB and more: highest", over(peer, "call"), max, "<=", 1.0,
           lambda cell: cell.tensor_bytes >= MEDIUM) for peer in JUDGED),
    *(Goal(f"device time over {name}'s: mean", over(peer, "device"), geometric_mean, "<=", None, lambda cell: True)
      for peer, name in NAMES.items()),
    *(Goal(f"host time over {NAMES[peer]}'s: mean", over(peer, "host"), geometric_mean, "<=", None, lambda cell: True)
      for peer in ("eager", "compile")),
)  # fmt: skip


def by_cell(rows: Iterable[Row]) -> dict[Cell, Rows]:
    """The rows of a document: cell -> variant -> row."""
    return frame.by_cell(rows, Cell)


def summarize(rows: Iterable[Row], failures: Sequence[Row], *, judged: bool) -> list[Row]:
    """`GOALS` for each norm among the rows, and in how many cells addnorm itself was wrong or failed.

    Args:
        rows: of the document.
        failures: of the document.
        judged: whether there are targets: they are for a GPU.
    """
    found, summary = by_cell(rows), []
    for norm in dict.fromkeys(cell.norm for cell in found):
        for goal in GOALS:
            values = {
                cell: value for cell, some in found.items()
                if cell.norm == norm and goal.where(cell) and (value := goal.value(some)) is not None
            }  # fmt: skip
            target = goal.target if judged else None
            if not values and target is None:
                continue
            one = claim(goal.name, norm, goal.statistic([*values.values()]) if values else None, goal.compare, target,
                        cells=len(values))  # fmt: skip
            if target is not None:
                reached = COMPARE[goal.compare]
                one["cells_met"] = sum(reached(value, target) for value in values.values())
                one["worst"] = (
                    (min if goal.compare == ">=" else max)(values, key=values.__getitem__).title if values else None
                )
            summary.append(one)
    return [*summary, claim("cells in which addnorm is wrong or fails", None, broken(failures), "==", 0)]


def broken(failures: Iterable[Row]) -> int:
    """In how many cells addnorm was wrong or failed, itself or with all others."""
    return sum(one["variant"] in ("addnorm", EVERY) for one in failures)
