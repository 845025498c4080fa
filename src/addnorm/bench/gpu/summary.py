"""Targets of the GPU benchmark, and a document as Markdown: for docs/performance.md and for the script's output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import geometric_mean

from addnorm._util.blocks import Column, Table
from addnorm._util.render import to_markdown
from addnorm.bench.cases import NORMS
from addnorm.bench.gpu.cases import DTYPES, FIELDS, JOBS, LARGE, MEDIUM, TARGET_D, tensor_bytes, title
from addnorm.bench.gpu.variants import EVERY
from addnorm.bench.harness import Case, Document, Row, by_case
from addnorm.bench.tables import digits
from addnorm.bench.targets import Goal, Target

NAMES = {"eager": "eager", "compile": "torch.compile", "liger": "Liger", "flash_attn": "flash-attn", "quack": "QuACK"}
JUDGED = ("eager", "compile", "liger")
COMMAND = "python benchmarks/bench_gpu.py"
UNMEASURED = f"Nothing has been measured on a GPU yet. `{COMMAND}` does it, and writes `benchmarks/results/gpu.json`."


def share(rows: Mapping[str, Row]) -> float | None:
    """Return addnorm's share of the copy bandwidth."""
    return float(rows["addnorm"]["share_of_copy"]) if "addnorm" in rows else None


def over(peer: str, part: str) -> Callable[[Mapping[str, Row]], float | None]:
    """Return the function of a case's rows that divides addnorm's time by the peer's: 1 and below is no slower."""

    def number(rows: Mapping[str, Row]) -> float | None:
        if "addnorm" not in rows or peer not in rows:
            return None
        return float(rows["addnorm"][f"{part}_us"] / rows[peer][f"{part}_us"])

    return number


def _aimed(case: Case) -> bool:
    return tensor_bytes(case) >= LARGE and TARGET_D[0] <= case.d <= TARGET_D[-1]


SIZES = "64 MB and more, d 1024 to 16384: lowest share of the copy bandwidth"
GOALS = (
    Goal(Target(f"forward, {SIZES}", ">=", 0.9), share, min, lambda case: _aimed(case) and not JOBS[case.job].backward),
    Goal(Target(f"backward, {SIZES}", ">=", 0.8), share, min, lambda case: _aimed(case) and case.job == "backward"),
    *(Goal(Target(f"device time over {NAMES[peer]}'s: highest", "<=", 1.0), over(peer, "device"), max) for peer in JUDGED),
    *(Goal(Target(f"call time over {NAMES[peer]}'s, 16 MB and more: highest", "<=", 1.0), over(peer, "call"), max,
           lambda case: tensor_bytes(case) >= MEDIUM) for peer in JUDGED),
    *(Goal(Target(f"device time over {name}'s: mean", "<=", None), over(peer, "device"), geometric_mean)
      for peer, name in NAMES.items()),
    *(Goal(Target(f"host time over {NAMES[peer]}'s: mean", "<=", None), over(peer, "host"), geometric_mean)
      for peer in ("eager", "compile")),
)  # fmt: skip


def summarize(rows: Iterable[Row], failures: Sequence[Row], *, judged: bool) -> list[Row]:
    """Return every goal for each norm among the rows, and in how many cases addnorm itself was wrong or failed.

    Args:
        rows: rows of the document.
        failures: failures of the document.
        judged: whether the targets apply, which are for a GPU.
    """
    cases, summary = by_case(rows, FIELDS), []
    for norm in dict.fromkeys(case.norm for case in cases):
        chosen = {case: results for case, results in cases.items() if case.norm == norm}
        for goal in GOALS:
            numbers = goal.numbers(chosen)
            target = goal.target if judged else goal.target._replace(bound=None)
            if not numbers and target.bound is None:
                continue
            row = target.row(goal.statistic([*numbers.values()]) if numbers else None, norm, cells=len(numbers))
            if target.bound is not None:
                row["cells_met"] = sum(map(bool, map(target.met, numbers.values())))
                worst = min if target.compare == ">=" else max
                row["worst"] = title(worst(numbers, key=numbers.__getitem__)) if numbers else None
            summary.append(row)
    return [*summary, Target("cells in which addnorm is wrong or fails", "==", 0).row(failed_cases(failures))]


def failed_cases(failures: Iterable[Row]) -> int:
    """Return in how many cases addnorm was wrong or failed, alone or with all others."""
    return sum(row["variant"] in ("addnorm", EVERY) for row in failures)


# ------------------------------------------------------------------------------------------------------------- Markdown


def section(document: Document | None) -> str:
    """Return the section of the page; without a document, the sentence that nothing was measured.

    Raises:
        ValueError: the document is not of a GPU.
    """
    if document is None:
        return UNMEASURED
    if document["device"]["type"] != "cuda":
        raise ValueError(
            f"the document is of {document['device']['name']}, expected one of a GPU: run {COMMAND} on a machine with one"
        )
    return report(document)


def report(document: Document) -> str:
    """Return the device, the targets, a table for each norm, missing variants, failures."""
    cases = by_case(document["rows"], FIELDS)
    norms = [f"{NORMS[norm]}:\n\n{times(cases, norm)}" for norm in NORMS if any(case.norm == norm for case in cases)]
    parts = [headline(document), targets(document), *norms, *notes(document)]
    return "\n\n".join(part for part in parts if part)


def headline(document: Document) -> str:
    """Return where, with what and when a document was measured, and the speed of a copy."""
    device, versions, commit = document["device"], document["versions"], document["commit"]
    parts = [f"torch {versions['torch']}", f"addnorm {versions['addnorm']}"]
    if device["type"] == "cuda":
        where = f"{device['name']}, {device['multiprocessors']} multiprocessors"
        parts += [f"CUDA {device['cuda']}", f"driver {device['driver']}", f"triton {versions['triton']}"]
    else:
        where = f"{device['name']}, which is no GPU: a trial of the script, whose times do not apply to one"
    if commit:
        parts.append(f"commit {commit[:10]}{' with changes' if document['dirty'] else ''}")
    copied = f"copies at {digits(document['copy']['median'] / 1e9)} GB/s"
    return "; ".join([where, copied, ", ".join(parts), document["date"][:10]]) + "."


def targets(document: Document) -> str:
    """Return the summary: the number beside its target, a column a norm."""
    norms = [norm for norm in NORMS if any(row["norm"] == norm for row in document["summary"])]
    values_by_target: dict[tuple[str, str], dict[str, str]] = {}
    for row in document["summary"]:
        if row["norm"]:
            target = "" if row["target"] is None else f"{row['compare']} {digits(row['target'], trim=True)}"
            values_by_target.setdefault((row["name"], target), {})[row["norm"]] = _judged(row)
    columns: list[Column | str] = [
        "measured over the cases",
        "target",
        *(Column(NORMS[norm], "right") for norm in norms),
    ]
    rows = [[*name, *(values.get(norm, "") for norm in norms)] for name, values in values_by_target.items()]
    return to_markdown(Table(columns, rows)) if rows else ""


def _judged(row: Row) -> str:
    if row["value"] is None:
        return "not measured"
    missed = f" (missed, {row['cells_met']} of {row['cells']} cases reach it)" if row["met"] is False else ""
    return f"{digits(row['value'])}{missed}"


def times(cases: Mapping[Case, Mapping[str, Row]], norm: str) -> str:
    """Return a line a case: addnorm's device time, its share of the copy's bandwidth, call and host time, and ratios to peers."""
    chosen = {case: rows for case, rows in cases.items() if case.norm == norm and "addnorm" in rows}
    if not chosen:
        return "addnorm was measured in no case."
    peers = [name for name in NAMES if any(name in rows for rows in chosen.values())]
    columns = [Column(f"/ {NAMES[name]}", "right") for name in peers]
    head: list[Column | str] = [
        Column("rows x d", "right"), "dtype", "job", Column("device, us", "right"), Column("share of the copy", "right"),
        *columns, Column("call, us", "right"), *columns, Column("host, us", "right"),
    ]  # fmt: skip
    jobs, dtypes, lines = [*JOBS], [*DTYPES], []
    for case in sorted(chosen, key=lambda case: (jobs.index(case.job), dtypes.index(case.dtype), case.d, case.rows)):
        rows = chosen[case]
        ours = rows["addnorm"]
        warm, late = "" if ours["cold"] else " (warm)", "" if ours["queued"] else " (waits)"
        lines.append([
            f"{case.rows} x {case.d}", case.dtype, JOBS[case.job].title, f"{digits(ours['device_us'])}{late}",
            f"{ours['share_of_copy']:.0%}{warm}", *(_ratio(rows, name, "device") for name in peers), digits(ours["call_us"]),
            *(_ratio(rows, name, "call") for name in peers), digits(ours["host_us"]),
        ])  # fmt: skip
    return to_markdown(Table(head, lines))


def _ratio(rows: Mapping[str, Row], peer: str, part: str) -> str:
    return f"**{rows[peer][f'{part}_us'] / rows['addnorm'][f'{part}_us']:.2f}**" if peer in rows else ""


def notes(document: Document) -> list[str]:
    """Return sentences about missing variants, failures and cases that are left."""
    notes = []
    if document["missing"]:
        notes.append(" ".join(f"{sentence}." for sentence in document["missing"].values()))
    if document["failures"]:
        lines = [
            [failure["variant"], title(Case.of(failure, FIELDS)), " ".join(failure["error"].split())]
            for failure in document["failures"]
        ]
        notes.append(f"Failed, and left out of the times:\n\n{to_markdown(Table(['variant', 'case', 'error'], lines))}")
    if document["left"]:
        done = len(document["cells"])
        ended = "the time budget was used up" if document["ended"] == "budget" else document["ended"]
        notes.append(f"{done} of {done + len(document['left'])} cases were measured ({ended}).")
    return notes
