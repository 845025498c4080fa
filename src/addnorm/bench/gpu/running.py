"""The run: a cell after the other, and the document, which is whole after each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from addnorm import bench
from addnorm.bench import machine
from addnorm.bench.gpu import calls, clock, variants
from addnorm.bench.gpu.cells import Cell
from addnorm.bench.gpu.clock import Clock
from addnorm.bench.gpu.device import Copies, describe, triton_version
from addnorm.bench.gpu.measuring import PARTS, DeviceLost, Found, OutOfTime, alive, free, measure
from addnorm.bench.gpu.summary import by_cell, summarize
from addnorm.bench.gpu.variants import COPY, EVERY
from addnorm.bench.timing import Row

SCHEMA = 1
BUDGET = 540.0  # seconds of a run, compilation included
SAME = {"another device": "device", "other versions": "versions", "another commit": "commit"}  # in runs of one document

Document = dict[str, Any]


def run(
    cells: Sequence[Cell], device: torch.device, *,
    rounds: int = clock.ROUNDS, budget: float | None = BUDGET, asked: Sequence[str] | None = None,
    earlier: Document | None = None, save: Callable[[Document], object] = lambda document: None,
    progress: Callable[[str], None] = lambda line: None, commit: str | None = None,
) -> Document:  # fmt: skip
    """Measures the cells and returns the document; `save` is given it after each cell, not yet `complete`.

    An interrupt, or a device that is lost, ends it early: the document has what was measured, and is not `complete`. The budget
    ends it as it was meant to: what is left stands under `left`.

    Args:
        cells: the most important first.
        device: where.
        rounds: how often each variant is timed.
        budget: seconds, after which no further cell or variant begins; a cell that is begun then is left for a run to come, but
            for the first, which is always measured. None is no limit.
        asked: the variants (None: those of the plan).
        earlier: a document to go on from (`resumable`): its cells are not measured again.
        save: what to do with the document after each cell.
        progress: is told each cell before it is measured.
        commit: of the sources, where they are no checkout.
    """
    start, timekeeper, about = time.monotonic(), clock.clock_of(device), describe(device)
    head = identity(device, commit)
    found: Found = {part: list(earlier[part]) if earlier else [] for part in PARTS}
    done = [Cell(**one) for one in earlier["cells"]] if earlier else []
    copies = Copies(device, timekeeper, earlier["copy"]["bytes_per_second"] if earlier else None)
    before = earlier["seconds"] if earlier else 0.0
    left = [cell for cell in cells if cell not in done]
    longest, ended = 0.0, None

    def document() -> Document:
        return _document(
            head, about, timekeeper, found, done, left, copies, ended, before + time.monotonic() - start,
            {"rounds": rounds, "budget": budget, "variants": list(asked) if asked else None},
        )  # fmt: skip

    copies.measure()
    try:
        for i, cell in enumerate(list(left)):
            begun = time.monotonic()
            if budget is not None and i and begun - start + longest > budget:
                ended = "budget"
                break
            deadline = None if budget is None or not i else start + budget
            progress(f"{i + 1:3}/{i + len(left)}  {begun - start:5.0f} s  {cell.title}")
            lost = _failed(found, cell)  # in a run that the device did not survive
            if EVERY not in lost:
                one = _measured(
                    cell, device, timekeeper, rounds=rounds, asked=asked, without=lost, cache=about["l2_bytes"],
                    deadline=deadline,
                )  # fmt: skip
                for part in PARTS:
                    found[part] += one[part]
            done.append(cell)
            left.remove(cell)
            copies.measure()
            if i:  # the first has torch's own first imports and compilations in it
                longest = max(longest, time.monotonic() - begun)
            save(document())
        ended = ended or "done"
    except OutOfTime:
        ended = "budget"
    except KeyboardInterrupt:
        ended = "interrupt"
    except DeviceLost as error:
        found["failures"] += error.found["failures"]  # the cell is measured again, without what failed here
        ended = f"the device was lost: {error}"
    return document()


def _measured(cell: Cell, device: torch.device, timekeeper: Clock, **options: Any) -> Found:
    """`measure`; where it fails as a whole (for memory, say) that is the cell's failure, and the others are measured."""
    try:
        return measure(cell, device, timekeeper, **options)
    except (DeviceLost, OutOfTime):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"[:300]
        found: Found = {"errors": [], "failures": [{**cell._asdict(), "variant": EVERY, "error": said}], "rows": []}
        alive(timekeeper, found)
    free(device)  # what the failure kept alive is let go by now
    return found


def identity(device: torch.device, commit: str | None = None) -> Document:
    """What must be the same for two runs to make one document: the device, the versions, the commit.

    `commit` is that of sources that are no checkout, such as a copy on another machine.
    """
    where = machine.environment()
    where["commit"] = where["commit"] or commit
    where["versions"] |= {"triton": triton_version(), "cuda": torch.version.cuda}
    where["peers"] = variants.versions()
    return where | {"device": describe(device)}


def resumable(path: Path, device: torch.device, commit: str | None = None) -> Document | None:
    """What an earlier run has left at the path: what was cut short if there is such, else what was complete, or None.

    Raises:
        ValueError: it was measured on another device, with other versions or of another commit.
    """
    for place in (partial(path), path):
        if place.exists():
            document: Document = json.loads(place.read_text(encoding="utf-8"))
            here = identity(device, commit)
            for what, name in SAME.items():
                theirs, mine = (one[name]["name"] if name == "device" else one[name] for one in (document, here))
                if theirs != mine:
                    raise ValueError(
                        f"{place.name} is of {what} ({theirs}) than this run ({mine}): "
                        "measure anew, without --resume, or give another --json"
                    )
            return document
    return None


def partial(path: Path) -> Path:
    """Where `bench.write` puts a document that is not complete."""
    return path.with_suffix(f".partial{path.suffix}")


def write(document: Document, path: Path) -> Path:
    """Writes it whole or not at all, and returns where; a complete one takes the place of what was cut short."""
    place = bench.write(document, path)
    if document["complete"]:
        partial(path).unlink(missing_ok=True)
    return place


def _document(
    head: Document, about: Row, timekeeper: Clock, found: Found, done: Sequence[Cell], left: Sequence[Cell],
    copies: Copies, ended: str | None, seconds: float, protocol: Row,
) -> Document:  # fmt: skip
    copied = copies.document()
    rows = _derived(found["rows"], copied["median"])
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "complete": ended in ("done", "budget"),
        "ended": ended,
        "seconds": seconds,
        **head,
        "clock": timekeeper.name,
        "missing": variants.missing(about["type"]),
        "limits": {
            name: [limit.why for limit in one.limits] for name, one in variants.VARIANTS.items() if one.limits
        },
        "protocol": {
            **protocol, "segment_seconds": clock.SEGMENT_SECONDS, "times_cache": calls.TIMES_CACHE,
            "most_sets": calls.MOST_SETS,
        },
        "copy": copied,
        "summary": summarize(rows, found["failures"], judged=about["type"] == "cuda"),
        "cells": [cell._asdict() for cell in done],
        "left": [cell._asdict() for cell in left],
        "errors": found["errors"],
        "failures": found["failures"],
        "rows": rows,
    }  # fmt: skip


def _derived(rows: Sequence[Row], copied: float) -> list[Row]:
    """Each row with what follows from the times: bandwidth, its share of the large copy's, and of the cell's own; ratios."""
    found = []
    for some in by_cell(rows).values():
        eager, copy = some.get("eager"), some.get(COPY)
        for row in some.values():
            rate = row["bytes"] / row["device_us"] * 1e6
            found.append({
                **row, "gb_per_second": rate / 1e9, "share_of_copy": rate / copied,
                "share_of_cell_copy": copy["device_us"] / row["device_us"] if copy else None,
                **{f"{part}_ratio_to_eager": eager[f"{part}_us"] / row[f"{part}_us"] if eager else None
                   for part in ("device", "call")},
            })  # fmt: skip
    return found


def _failed(found: Found, cell: Cell) -> list[str]:
    """The variants that have failed in a cell."""
    return [
        one["variant"] for one in found["failures"] if all(one[key] == value for key, value in cell._asdict().items())
    ]
