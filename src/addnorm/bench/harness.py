"""Code that every benchmark shares: cases as data, a run of one case after the other, resuming, and the JSON document.

A benchmark has cases (`Case`), a function that measures one of them (`Results`: lists of rows by part), and a document.
`run_cases` measures the cases; `write` saves a document; `resumable` reads an unfinished one, so that the next run continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from addnorm._util import files, jsonio

__all__ = [
    "Case",
    "Document",
    "Progress",
    "Results",
    "Row",
    "Run",
    "Stop",
    "busy_path",
    "by_case",
    "describe_load",
    "find_obstacle",
    "header",
    "new_results",
    "partial_path",
    "publish",
    "read",
    "resumable",
    "run_cases",
    "write",
]  # fmt: skip

MAX_LOAD = 1.0  # before a run whose times are published
MAX_OTHERS = 0.5  # cores that other processes may use during such a run

Row = dict[str, Any]
Results = dict[str, list[Row]]
Document = dict[str, Any]
Progress = Callable[[str], None]


class Case(SimpleNamespace):
    """One line of a benchmark's matrix: named values, such as the norm and the shape. They begin each of its rows.

    Example:
        >>> from addnorm.bench.harness import Case
        >>> case = Case(norm="rms", rows=128)
        >>> case.rows, case.but(rows=1).row(variant="eager")
        (128, {'norm': 'rms', 'rows': 1, 'variant': 'eager'})
    """

    def __hash__(self) -> int:  # type: ignore[override]  # a case is never changed
        return hash(frozenset(vars(self).items()))

    def but(self, **values: Any) -> Case:
        """Return the case with other values."""
        return Case(**{**vars(self), **values})

    def row(self, **values: Any) -> Row:
        """Return a row of this case."""
        return {**vars(self), **values}

    @classmethod
    def of(cls, row: Row, fields: Iterable[str]) -> Case:
        """Return the case that a row belongs to."""
        return cls(**{name: row[name] for name in fields})


class Stop(RuntimeError):  # it ends a run, which need not be an error
    """Exception that ends a run before its last case.

    Args:
        ended: reason, for the document.
        results: rows of the unfinished case that the document keeps.
    """

    def __init__(self, ended: str, results: Results | None = None) -> None:
        super().__init__(ended)
        self.ended, self.results = ended, results or {}


@dataclass
class Run:
    """State of a run: rows by part, the cases that are measured, and those that are left.

    Attributes:
        results: rows by part.
        done: cases that are measured.
        left: cases that are not.
        ended: None while it runs; then "done", "budget", "interrupt" or another reason.
        seconds: duration, with that of the runs that it continues.
    """

    results: Results
    done: list[Case] = field(default_factory=list)
    left: list[Case] = field(default_factory=list)
    ended: str | None = None
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether it ended as intended: with the last case, or with the budget."""
        return self.ended in ("done", "budget")


def new_results(*parts: str) -> Results:
    """Return an empty list of rows for each part."""
    return {part: [] for part in parts}


def run_cases(
    cases: Sequence[Case], measure: Callable[[Case, float | None], Results], earlier: Run, *,
    title: Callable[[Case], str] = str, budget: float | None = None, progress: Progress | None = None,
    save: Callable[[Run], object] | None = None,
) -> Run:  # fmt: skip
    """Measure one case after the other.

    An interrupt (Ctrl-C) or a `Stop` ends the run early; the cases measured so far remain.

    Args:
        cases: the most important first.
        measure: function of a case and a deadline of `time.monotonic` (None: none); returns the rows of the case by part.
        earlier: run to continue. Its cases are not measured again.
        title: text of a case, for the progress.
        budget: seconds after which no further case begins. The first case is always measured.
        progress: called with one line before each case.
        save: called with the run after each case.
    """
    start, before, longest = time.monotonic(), earlier.seconds, 0.0
    run = Run({part: [*rows] for part, rows in earlier.results.items()}, [*earlier.done])
    measured = {*run.done}
    run.left = [case for case in cases if case not in measured]
    total = len(run.left)
    try:
        for i, case in enumerate([*run.left]):
            begun = time.monotonic()
            if budget is not None and i and begun - start + longest > budget:
                raise Stop("budget")
            if progress is not None:
                progress(f"{i + 1:3}/{total}  {begun - start:5.0f} s  {title(case)}")
            results = measure(case, start + budget if budget is not None and i else None)
            for part, rows in results.items():
                run.results[part] += rows
            run.done.append(case)
            run.left.remove(case)
            run.seconds = before + time.monotonic() - start
            if i:  # the first case includes torch's own first imports and compilations
                longest = max(longest, time.monotonic() - begun)
            if save is not None:
                save(run)
        run.ended = "done"
    except Stop as stop:
        run.ended = stop.ended
        for part, rows in stop.results.items():
            run.results[part] += rows
    except KeyboardInterrupt:
        run.ended = "interrupt"
    run.seconds = before + time.monotonic() - start
    return run


def header(schema: int, run: Run) -> Document:
    """Return the beginning of every document: schema, date, and whether the run is complete."""
    return {
        "schema": schema, "date": datetime.now(UTC).isoformat(timespec="seconds"), "complete": run.complete,
    }  # fmt: skip


def by_case(rows: Iterable[Row], fields: Sequence[str]) -> dict[Case, dict[str, Row]]:
    """Return the rows by case, then by variant."""
    results: dict[Case, dict[str, Row]] = {}
    for row in rows:
        results.setdefault(Case.of(row, fields), {})[row["variant"]] = row
    return results


def partial_path(path: Path) -> Path:
    """Return where a document that is not complete is written: NAME.partial.json."""
    return path.with_suffix(f".partial{path.suffix}")


def write(document: Document, path: Path) -> Path:
    """Write a document atomically, one row a line, and return its path.

    A document that is not complete goes to `partial_path` and never replaces a complete one; a complete one removes it.
    """
    if not document["complete"]:
        return files.write_text(partial_path(path), jsonio.dumps(document))
    files.write_text(path, jsonio.dumps(document))
    partial_path(path).unlink(missing_ok=True)
    return path


def busy_path(path: Path) -> Path:
    """Return where a document that is not published is written: NAME.busy.json."""
    return path.with_suffix(f".busy{path.suffix}")


def describe_load(document: Document) -> str | None:
    """Return why times were not measured on an idle machine, in words, or None."""
    others = document.get("load_of_others")
    if document["load"] > MAX_LOAD:
        return f"the load was {document['load']:.1f} before the run, expected at most {MAX_LOAD:.0f}"
    if others is not None and others > MAX_OTHERS:
        return f"other processes used {others:.1f} cores during the run, expected at most {MAX_OTHERS}"
    return None


def find_obstacle(document: Document) -> str | None:
    """Return why a document of times is not published, in words, or None."""
    if document.get("dirty"):
        return "the checkout has changes, expected the code of its commit"
    return describe_load(document)


def publish(document: Document, path: Path, *, force: bool = False) -> bool:
    """Write a document of times and print where, and return whether it is at its path.

    The document of a busy machine, or of code that no commit has, goes to `busy_path`, unless it is forced: then it is
    marked, and pages say so.

    Args:
        document: with the columns of `environment.LoadMeter`.
        path: of the results.
        force: write it to the path in any case.
    """
    reason = find_obstacle(document)
    if reason is None or not document["complete"]:
        print(f"Written: {write(document, path)}")
        return True
    if force:
        print(f"Written: {write({**document, 'forced': True}, path)}, marked: {reason}.")
        return True
    print(f"Not published, {reason}: written to {write(document, busy_path(path))}; measure again, or pass --force.")
    return False


def read(path: Path) -> Document:
    """Return the document in a file."""
    document: Document = jsonio.loads(path.read_text(encoding="utf-8"))
    return document


def resumable(
    paths: Iterable[Path], here: Document, identity: Callable[[Document], Row], remedy: str = "delete it"
) -> Document | None:
    """Return the first document among the paths that exists, if this run can continue it, or None.

    Args:
        paths: of documents of earlier runs.
        here: a document of this run, or the part of it that `identity` reads.
        identity: function of a document: the values that both runs must share.
        remedy: what to do otherwise, for the error.

    Raises:
        ValueError: the earlier run differs in one of the values.
    """
    for path in paths:
        if path.exists():
            document, mine = read(path), identity(here)
            for name, theirs in identity(document).items():
                if theirs != mine[name]:
                    raise ValueError(f"{path.name} has {name} {theirs}, this run has {mine[name]}: {remedy}.")
            return document
    return None
