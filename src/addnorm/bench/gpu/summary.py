"""Targets of the GPU benchmark, and a document as Markdown: for docs/performance.md and for the script's output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import geometric_mean
from typing import Any

from addnorm.bench.case import Case, Document, Row, Rows, by_case
from addnorm.bench.gpu.plan import FIELDS, LARGE, MEDIUM, TARGET_D
from addnorm.bench.gpu.variants import EVERY, VARIANTS
from addnorm.bench.jobs import DTYPES, JOBS, NORMS, tensor_bytes, title
from addnorm.bench.pages import digits, markdown, sources, target_lines, unfinished
from addnorm.bench.targets import Number, Target, ratio, value

NAMES = {name: variant.title for name, variant in VARIANTS.items() if name != "addnorm"}
JUDGED = ("eager", "compile", "liger")
COMMAND = "python benchmarks/bench_gpu.py"
UNMEASURED = (
    f"No times of a GPU are published yet. `{COMMAND}` measures them, and writes `benchmarks/results/gpu.json`."
)


def _over(peer: str, part: str) -> Number:
    """Return a function of a case's result rows: addnorm's time divided by the peer's. At most 1 means not slower."""
    return ratio(peer, "addnorm", f"{part}_us")


def _aimed(case: Case) -> bool:
    return tensor_bytes(case) >= LARGE and TARGET_D[0] <= case.d <= TARGET_D[-1]


SIZES = "64 MB and more, d 1024 to 16384: lowest share of the copy bandwidth"
SHARE = value("addnorm", "share_of_copy")
TARGETS = (
    Target(f"forward, {SIZES}", ">=", 0.9, SHARE, min, lambda case: _aimed(case) and not JOBS[case.job].backward),
    Target(f"backward, {SIZES}", ">=", 0.8, SHARE, min, lambda case: _aimed(case) and case.job == "backward"),
    *(Target(f"device time over {NAMES[peer]}'s: highest", "<=", 1.0, _over(peer, "device"), max) for peer in JUDGED),
    *(Target(f"call time over {NAMES[peer]}'s, 16 MB and more: highest", "<=", 1.0, _over(peer, "call"), max,
             lambda case: tensor_bytes(case) >= MEDIUM) for peer in JUDGED),
    *(Target(f"device time over {name}'s: mean", "<=", None, _over(peer, "device"), geometric_mean)
      for peer, name in NAMES.items()),
)  # fmt: skip


def targets(document: Document) -> list[Target]:
    """Return the targets by norm. For a document of a CPU they have no bounds."""
    each = (target._replace(by=("norm",)) for target in TARGETS)
    return [one if document["device"]["type"] == "cuda" else one._replace(bound=None) for one in each]


def failed_cases(failures: Iterable[Row]) -> int:
    """Return the number of failures of addnorm, including those of a whole case."""
    return sum(row["variant"] in ("addnorm", EVERY) for row in failures)


# ------------------------------------------------------------------------------------------------------------- Markdown


def section(document: Document | None) -> str:
    """Return the section of the page. Without a document, return the sentence that nothing was measured.

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
    norms = [
        f"{name}:\n\n{table or 'addnorm was measured in no case.'}"
        for norm, name in NORMS.items() if any(case.norm == norm for case in cases)
        for table in [markdown(_times(cases, norm))]
    ]  # fmt: skip
    summary = markdown(target_lines(row for row in document["summary"] if row["norm"]))
    failures = markdown(
        {"variant": row["variant"], "case": title(Case.of(row, FIELDS)), "error": " ".join(row["error"].split())}
        for row in document["failures"]
    )
    notes = [" ".join(f"{sentence}." for sentence in document["missing"].values())]
    notes += [f"Failed, and left out of the times:\n\n{failures}" if failures else "", unfinished(document)]
    return "\n\n".join(filter(None, [headline(document), summary, *norms, *notes]))


def headline(document: Document) -> str:
    """Return a sentence with the device, the bandwidth of a copy, the versions, the commit and the date of a document."""
    device, versions, (own, *commit) = document["device"], document["versions"], sources(document)
    parts = [f"torch {versions['torch']}", own]
    if device["type"] == "cuda":
        where = f"{device['name']}, {device['multiprocessors']} multiprocessors"
        parts += [f"CUDA {device['cuda']}", f"driver {device['driver']}", f"triton {versions['triton']}"]
    else:
        where = f"{device['name']}, which is no GPU: a trial of the script, whose times do not apply to one"
    copied = f"copies at {digits(document['copy'] / 1e9)} GB/s"
    return "; ".join([where, copied, ", ".join([*parts, *commit]), document["date"][:10]]) + "."


def _times(cases: Mapping[Case, Rows], norm: str) -> Iterator[dict[str, str]]:
    """Yield a table line per case: addnorm's times, its share of the copy's bandwidth, and the ratios to the peers' times."""
    jobs, dtypes = [*JOBS], [*DTYPES]
    chosen = [case for case, rows in cases.items() if case.norm == norm and "addnorm" in rows]
    measured = [peer for peer in NAMES if any(peer in cases[case] for case in chosen)]
    for case in sorted(chosen, key=lambda case: (jobs.index(case.job), dtypes.index(case.dtype), case.d, case.rows)):
        rows = cases[case]
        ours: Any = rows["addnorm"]

        def ratios(part: str, rows: Rows = rows) -> dict[str, str]:
            numbers = {NAMES[peer]: ratio("addnorm", peer, f"{part}_us")(rows) for peer in measured}
            return {f"{part} / {name}": f"**{one:.2f}**" if one else "" for name, one in numbers.items()}

        yield {
            "rows x d": f"{case.rows} x {case.d}", "dtype": case.dtype, "job": JOBS[case.job].title,
            "device, us": digits(ours["device_us"]), "share of the copy": f"{ours['share_of_copy']:.0%}", **ratios("device"),
            "call, us": digits(ours["call_us"]), **ratios("call"),
        }  # fmt: skip
