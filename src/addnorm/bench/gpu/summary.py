"""Targets of the GPU benchmark, and a document as Markdown: for docs/performance.md and for the script's output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import geometric_mean

from addnorm.bench import pages
from addnorm.bench.case import Case, Document, Rows, by_case
from addnorm.bench.gpu.plan import FIELDS, LARGE, MEDIUM, TARGET_D
from addnorm.bench.gpu.variants import VARIANTS
from addnorm.bench.jobs import DTYPES, JOBS, NORMS, tensor_bytes, title
from addnorm.bench.pages import digits, markdown, target_lines, unfinished
from addnorm.bench.targets import Target, ratio, value

NAMES = {name: variant.title for name, variant in VARIANTS.items() if name != "addnorm"}
JUDGED = ("eager", "compile", "liger")


def _aimed(case: Case) -> bool:
    return tensor_bytes(case) >= LARGE and TARGET_D[0] <= case.d <= TARGET_D[-1]


SIZES = "64 MB and more, d 1024 to 16384: lowest share of the copy bandwidth"
SHARE = value("addnorm", "share_of_copy")
TARGETS = (
    Target(f"forward, {SIZES}", ">=", 0.9, SHARE, min, lambda case: _aimed(case) and not JOBS[case.job].backward),
    Target(f"backward, {SIZES}", ">=", 0.8, SHARE, min, lambda case: _aimed(case) and case.job == "backward"),
    *(Target(f"device time over {NAMES[peer]}'s: highest", "<=", 1.0, ratio(peer, "addnorm"), max) for peer in JUDGED),
    *(Target(f"call time over {NAMES[peer]}'s, 16 MB and more: highest", "<=", 1.0, ratio(peer, "addnorm", "call_us"), max,
             lambda case: tensor_bytes(case) >= MEDIUM) for peer in JUDGED),
    *(Target(f"device time over {name}'s: mean", "<=", None, ratio(peer, "addnorm"), geometric_mean)
      for peer, name in NAMES.items()),
)  # fmt: skip


def targets(document: Document) -> list[Target]:
    """Return the targets by norm. For a document of a CPU they have no bounds."""
    on_gpu = document["device"]["type"] == "cuda"
    return [target._replace(by=("norm",), bound=target.bound if on_gpu else None) for target in TARGETS]


# ------------------------------------------------------------------------------------------------------------- Markdown


def section(document: Document) -> str:
    """Return the section of the page.

    Raises:
        ValueError: the document is not of a GPU.
    """
    if document["device"]["type"] != "cuda":
        raise ValueError(
            f"the document is of {document['device']['name']}, expected one of a GPU: run "
            "python benchmarks/bench_gpu.py on a machine with one"
        )
    return report(document)


def report(document: Document) -> str:
    """Return the device, the targets, a table for each norm, missing variants, failures."""
    cases = by_case(document["rows"], FIELDS)
    tables = {name: markdown(_times(cases, norm)) for norm, name in NORMS.items()}
    norms = [f"{name}:\n\n{table}" for name, table in tables.items() if table]
    summary = markdown(target_lines(document["summary"]))
    failures = markdown(
        {"variant": row["variant"], "case": title(Case.of(row, FIELDS)), "error": " ".join(row["error"].split())}
        for row in document["failures"]
    )
    notes = [" ".join(f"{sentence}." for sentence in document["missing"].values())]
    notes += [f"Failed, and left out of the times:\n\n{failures}" if failures else "", unfinished(document)]
    return "\n\n".join(filter(None, [headline(document), summary, *norms, *notes]))


def headline(document: Document) -> str:
    """Return a sentence with the device, the bandwidth of a copy, and the headline of every benchmark."""
    device = document["device"]
    if device["type"] == "cuda":
        versions = f"CUDA {device['cuda']}, driver {device['driver']}, triton {document['versions']['triton']}"
        where = f"{device['name']}, {device['multiprocessors']} multiprocessors, {versions}"
    else:
        where = f"{device['name']}, which is no GPU: a trial of the script, whose times do not apply to one"
    return f"{where}; copies at {digits(document['copy'] / 1e9)} GB/s; {pages.headline(document)}."


def _times(cases: Mapping[Case, Rows], norm: str) -> Iterator[dict[str, str]]:
    """Yield a table line per case: addnorm's times, its share of the copy's bandwidth, and the ratios to the peers' times."""
    jobs, dtypes = [*JOBS], [*DTYPES]
    chosen = [case for case, rows in cases.items() if case.norm == norm and "addnorm" in rows]
    measured = [peer for peer in NAMES if any(peer in cases[case] for case in chosen)]
    for case in sorted(chosen, key=lambda case: (jobs.index(case.job), dtypes.index(case.dtype), case.d, case.rows)):
        ours = cases[case]["addnorm"]
        line = {
            "rows x d": f"{case.rows} x {case.d}", "dtype": case.dtype, "job": JOBS[case.job].title,
            "share of the copy": f"{ours['share_of_copy']:.0%}",
        }  # fmt: skip
        for part, key in (("device", "median_us"), ("call", "call_us")):
            line[f"{part}, us"] = digits(ours[key])
            for peer in measured:
                number = ratio("addnorm", peer, key)(cases[case])
                line[f"{part} / {NAMES[peer]}"] = f"**{number:.2f}**" if number else ""
        yield line
