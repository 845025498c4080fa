"""Findings about a model: sentences computed from an inspection, a recording and ablations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from addnorm._util.blocks import Finding
from addnorm._util.numbers import format_count, format_number, format_percent
from addnorm.stream.ablate import Ablation
from addnorm.stream.find.sites import Site
from addnorm.stream.inspection import Inspection
from addnorm.stream.program.result import Program
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import RecordedSite

# Function of a role and a statistic that returns the finite numbers of a stream, by depth.
Finite = Callable[[str, str], list[tuple[RecordedSite, float]]]
SMALL_WRITE = 1e-3  # of the stream's norm
OPPOSING = -0.1  # cosine of a write that opposes the stream
SIMILAR = 0.9  # cosine of two tokens that are nearly equal
UNEVEN = 10.0  # ratio of gradients


def _site_name(site: Site | RecordedSite, several: bool = False) -> str:
    """Return a site in words: "the attention of layer 3"."""
    if site.kind in ("start", "final"):
        return "x_0" if site.kind == "start" else "the final norm"
    suffix = f" of the {site.stream}" if several else ""
    kind = site.id if site.kind == "other" else f"the {site.kind}"
    return kind if site.layer is None else f"{kind} of layer {site.layer + 1}{suffix}"


def _share_of(count: int, total: int, what: str) -> str:
    """Return a count in words: "2 of 12 sublayers", "all 12 sublayers", "the only sublayer"."""
    if count == total == 1:
        return f"the only {what.removesuffix('s')}"
    return f"all {total} {what}" if count == total else f"{count} of {total} {what}"


def inspection_findings(inspection: Inspection) -> Iterator[Finding]:
    """Yield findings about an inspection: what it proves, and what it does not prove."""
    for program in (part for part in inspection.parts if isinstance(part, Program)):
        sites = format_count(len(program.sites), "sublayer")
        yield Finding(
            f"The equations of {sites}, computed again in float64 with their matrices, differ from the model's values by at most "
            f"{format_number(program.closure, 2)}, relative.",
            "proved" if program.closes else "refuted",
        )
    if not inspection.parts:
        yield Finding(f"{inspection.model} has no residual stream.", "refuted")
    failed = [site for site in inspection.sites if not site.closes]
    closed = [site for site in inspection.sites if site.closes]
    if closed:
        worst = max(site.closure for site in closed)
        verb = (
            "is recomputed in float64 from its equation"
            if len(inspection.sites) == 1
            else "are recomputed in float64 from their equations"
        )
        yield Finding(
            f"{_capital(_share_of(len(closed), len(inspection.sites), 'sublayers'))} {verb}: the "
            f"model's values differ by at most {format_number(worst, 2)}, relative.",
            "proved",
        )
    if failed:
        worst_site = max(failed, key=lambda site: site.closure if math.isfinite(site.closure) else math.inf)
        do = "does" if len(failed) == 1 else "do"
        yield Finding(
            f"{_capital(_share_of(len(failed), len(inspection.sites), 'sublayers'))} {do} not close: {worst_site.equation} has a "
            f"relative error of {format_number(worst_site.closure, 2)} at {worst_site.id}.",
            "refuted",
        )
    for stream in inspection.streams:
        name = "The stream" if len(inspection.streams) == 1 else f"The stream of the {stream.name}"
        if stream.closure is not None:
            holds = "is" if stream.sum_closes else "is not"
            yield Finding(
                f"{name} at its end {holds} the sum of x_0 and all writes: relative error {format_number(stream.closure, 2)}.",
                "proved" if stream.sum_closes else "refuted",
            )
    if inspection.unknown:
        count = len(inspection.unknown)
        places = f"{count} places in the model are" if count > 1 else "A place in the model is"
        yield Finding(f"{places} not understood. The reasons are below.")


def recording_findings(rec: Recording) -> list[Finding]:
    """Return the findings about a recording."""
    names = rec.streams if len(rec.streams) > 1 else (None,)
    return [*_bad_numbers(rec), *(text for name in names for text in _of_stream(rec, name))]


def _of_stream(rec: Recording, name: str | None) -> Iterator[Finding]:
    def finite(role: str, statistic: str) -> list[tuple[RecordedSite, float]]:
        return [(site, value) for site, value in rec.series(role, statistic, None, name) if math.isfinite(value)]

    rules = (_growth, _largest_writes, _opposing_writes, _similarity, _massive, _backward, _absorbed)
    for texts in (*(rule(finite) for rule in rules), _memory(rec, name)):
        for text in texts:
            yield Finding(text if name is None else f"In the {name}: {text[0].lower()}{text[1:]}")


def _bad_numbers(rec: Recording) -> Iterator[Finding]:
    bad = [entry for entry in rec.table() if not math.isfinite(entry.value)]
    if bad:
        first = bad[0]
        yield Finding(
            f"{len(bad)} of the recorded numbers are NaN or infinite; the first in depth is {first.statistic} of {first.role} "
            f"at {first.site}.",
            "refuted",
        )


def _growth(finite: Finite) -> Iterator[str]:
    values = [(s, v) for s, v in finite("out", "rms") if s.kind != "final"]
    if len(values) > 1 and values[0][1] > 0:
        (first, start), (_, end) = values[0], values[-1]
        times = end / start
        how = "keeps its norm"
        if not 0.9 <= times <= 1.1:
            how = (
                f"grows by a factor of {format_number(times, 2)}"
                if times > 1
                else f"shrinks to {format_percent(times)}"
            )
        sizes = f"{format_number(start, 3)}, then {format_number(end, 3)}"
        yield f"The stream {how} from {_site_name(first)} to its end: root mean square {sizes}."


def _largest_writes(finite: Finite) -> Iterator[str]:
    ratios = finite("write", "ratio")
    if len(ratios) == 1:
        ((only, ratio),) = ratios
        yield f"The write of {_site_name(only)} has {format_percent(ratio)} of the stream's norm."
    elif ratios:
        (most, high), (least, low) = max(ratios, key=_value), min(ratios, key=_value)
        yield (
            f"The largest write, relative to the stream's norm, is that of {_site_name(most)}, {format_percent(high)}; "
            f"the smallest is that of {_site_name(least)}, {format_percent(low)}."
        )
    small = [site for site, value in ratios if value < SMALL_WRITE]
    if small:
        names = ", ".join(map(_site_name, small[:3])) + ", ..." * (len(small) > 3)
        count = _capital(_share_of(len(small), len(ratios), "sublayers"))
        yield f"{count} write less than {format_percent(SMALL_WRITE)} of the stream's norm: {names}."


def _opposing_writes(finite: Finite) -> Iterator[str]:
    cosines = finite("write", "cosine")
    opposing = [pair for pair in cosines if pair[1] < OPPOSING]
    if opposing:
        most, cosine = min(opposing, key=_value)
        if len(opposing) == 1:
            yield f"{_capital(_site_name(most))} writes against the stream: cosine {format_number(cosine, 2)}."
            return
        count = _capital(_share_of(len(opposing), len(cosines), "sublayers"))
        how = f"most strongly {_site_name(most)}: cosine {format_number(cosine, 2)}"
        yield f"{count} write against the stream, {how}."


def _similarity(finite: Finite) -> Iterator[str]:
    values = finite("out", "similarity")
    if len(values) > 1:
        (first, start), (_, end) = values[0], values[-1]
        verdict = ": the tokens are nearly equal (rank collapse)" if end > SIMILAR else ""
        begin = "at x_0" if first.kind == "start" else f"after {_site_name(first)}"
        cosines = f"{format_number(start, 2)} {begin} and {format_number(end, 2)} at the end"
        yield f"The mean cosine of two tokens is {cosines}{verdict}."


def _massive(finite: Finite) -> Iterator[str]:
    counts = finite("out", "massive")
    tops = finite("out", "top")
    positive = [(site, value) for site, value in counts if value > 0]
    if positive:
        (first, _), (most, count) = positive[0], max(positive, key=_value)
        yield f"Massive activations occur from {_site_name(first)} on: at most {round(count)}, after {_site_name(most)}."
    elif tops:
        site, top = max(tops, key=_value)
        times = format_number(top, 2)
        yield f"There are no massive activations; the largest magnitude is {times} times the median, after {_site_name(site)}."


def _backward(finite: Finite) -> Iterator[str]:
    values = finite("grad", "l2")
    if len(values) > 1 and values[-1][1] > 0:
        (first, start), (_, end) = values[0], values[-1]
        times = start / end
        how = "as large as" if 0.9 < times < 1.1 else f"{format_number(times, 2)} times"
        begin = "at x_0" if first.kind == "start" else f"at the stream after {_site_name(first)}"
        yield f"The norm of the gradient {begin} is {how} that at the stream's end."
    weights = [pair for pair in finite("params", "grad_l2") if pair[1] > 0]
    if len(weights) > 1:
        (most, high), (least, low) = max(weights, key=_value), min(weights, key=_value)
        if high > UNEVEN * low:
            uneven = f"{format_number(high / low, 2)} times that of {_site_name(least)}"
            yield f"The gradients of the parameters differ: that of {_site_name(most)} is {uneven}."


def _absorbed(finite: Finite) -> Iterator[str]:
    values = finite("write", "unchanged")
    if values:
        site, share = max(values, key=_value)
        if share > 0.01:
            lost = f"{format_percent(share)} of the stream's elements do not change"
            yield f"Up to {lost} when {_site_name(site)} adds its write: round-off absorbs it."


def _memory(rec: Recording, stream: str | None) -> Iterator[str]:
    for name, (sources, shares) in rec.memory_maps.items():
        if stream not in (None, name) or not shares:
            continue
        end = dict(zip(sources, shares[-1], strict=True))
        if "x_0" in end and math.isfinite(end["x_0"]):
            sites = {site.id: site for site in rec.sites}
            writers = {source: share for source, share in end.items() if source in sites and source != "x_0"}
            most = max(writers, key=writers.__getitem__, default=None)
            largest = (
                f"; the largest other share is from {_site_name(sites[most])}, {format_percent(writers[most])}"
                if most
                else ""
            )
            yield f"{format_percent(end['x_0'])} of the final stream is from x_0{largest}."


def ablation_findings(ablations: Sequence[Ablation]) -> list[Finding]:
    """Return findings that name the sublayers that change the output and the loss most."""
    known = [(ablation.site, ablation.output_change) for ablation in ablations if math.isfinite(ablation.output_change)]
    several = len({site.stream for site, _ in known}) > 1
    findings = []
    if len(known) > 1:
        (most, high), (least, low) = max(known, key=_value), min(known, key=_value)
        findings.append(
            Finding(
                f"The output changes most without {_site_name(most, several)}, by {format_percent(high)} of its norm, and "
                f"least without {_site_name(least, several)}, by {format_percent(low)}."
            )
        )
    better = [ablation for ablation in ablations if ablation.loss_change is not None and ablation.loss_change < 0]
    if better:
        best = min(better, key=lambda ablation: ablation.loss_change or 0.0)
        findings.append(
            Finding(
                "The loss on these inputs is lower without "
                f"{_share_of(len(better), len(ablations), 'sublayers')}, removed one at a time, and lowest without "
                f"{_site_name(best.site, several)}: {format_number(best.loss_change, 3)}."
            )
        )
    return findings


def _value(pair: tuple[object, float]) -> float:
    return pair[1]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
