"""Findings about a model: sentences computed from an inspection, a recording and ablations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

from addnorm._util.blocks import VERDICTS, Finding
from addnorm._util.numbers import format_count, format_number, format_percent
from addnorm.stream.ablate import Ablation
from addnorm.stream.find.sites import Site
from addnorm.stream.inspection import Inspection
from addnorm.stream.program.result import Program
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import RecordedSite

# Function of a role and a statistic that returns the finite numbers of a stream, by depth.
Finite = Callable[[str, str], list[tuple[RecordedSite, float]]]
SMALL_WRITE = 1e-3  # norm of a small write, relative to the stream's norm
OPPOSING = -0.1  # cosine of a write that opposes the stream
SIMILAR = 0.9  # cosine of two tokens that are nearly equal
UNEVEN = 10.0  # ratio of gradients
_value = itemgetter(1)  # of a site and its number


def _site_name(site: Site | RecordedSite, several: bool = False) -> str:
    """Return a site in words: "the attention of layer 3"."""
    if site.kind in ("start", "final"):
        return "x_0" if site.kind == "start" else "the final norm"
    suffix = f" of the {site.stream}" if several else ""
    kind = site.id if site.kind == "other" else f"the {site.kind}"
    return kind if site.layer is None else f"{kind} of layer {site.layer + 1}{suffix}"


def _place_name(site: RecordedSite) -> str:
    """Return in words at which point a value of the stream is taken: "after the attention of layer 3"."""
    return "at x_0" if site.kind == "start" else f"after {_site_name(site)}"


def inspection_findings(inspection: Inspection) -> Iterator[Finding]:
    """Yield findings about an inspection: what it proves, and what it does not prove."""
    for program in (part for part in inspection.parts if isinstance(part, Program)):
        sites = format_count(len(program.sites), "sublayer")
        yield _equations(f"{sites}, with their matrices", program.closure, program.closes)
    if not inspection.parts:
        yield Finding(f"{inspection.model} has no residual stream.", "refuted")
    failed = [site for site in inspection.sites if not site.closes]
    closed = [site for site in inspection.sites if site.closes]
    if closed:
        sites = f"{len(closed)} of {len(inspection.sites)} sublayers"
        yield _equations(sites, max(site.closure for site in closed), True)
    if failed:
        worst_site = max(failed, key=lambda site: site.closure if math.isfinite(site.closure) else math.inf)
        yield Finding(
            f"The equations of {len(failed)} of {len(inspection.sites)} sublayers do not close: {worst_site.equation} has a "
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
        places = format_count(len(inspection.unknown), "place")
        yield Finding(f"Not understood: {places} in the model. The reasons are below.")


def _equations(sites: str, error: float, closes: bool) -> Finding:
    """Return the finding on how closely the equations of some sublayers reproduce the model's values."""
    return Finding(
        f"The equations of {sites}, computed again in float64, differ from the model's values by at most "
        f"{format_number(error, 2)}, relative.",
        VERDICTS[closes],
    )


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
        sizes = f"{format_number(start, 3)} {_place_name(first)} and {format_number(end, 3)} at its end"
        yield f"The root mean square of the stream is {sizes}: it changes by a factor of {format_number(end / start, 2)}."


def _largest_writes(finite: Finite) -> Iterator[str]:
    ratios = finite("write", "ratio")
    if ratios:
        (most, high), (least, low) = max(ratios, key=_value), min(ratios, key=_value)
        yield (
            f"The largest write, relative to the stream's norm, is that of {_site_name(most)}, {format_percent(high)}; "
            f"the smallest is that of {_site_name(least)}, {format_percent(low)}."
        )
    small = [site for site, value in ratios if value < SMALL_WRITE]
    if small:
        names = ", ".join(map(_site_name, small[:3])) + ", ..." * (len(small) > 3)
        share = f"less than {format_percent(SMALL_WRITE)} of the stream's norm"
        yield f"In {len(small)} of {len(ratios)} sublayers the write has {share}: {names}."


def _opposing_writes(finite: Finite) -> Iterator[str]:
    cosines = finite("write", "cosine")
    opposing = [pair for pair in cosines if pair[1] < OPPOSING]
    if opposing:
        most, cosine = min(opposing, key=_value)
        count = f"{len(opposing)} of {len(cosines)} sublayers"
        how = f"most strongly in {_site_name(most)}: cosine {format_number(cosine, 2)}"
        yield f"In {count} the write opposes the stream, {how}."


def _similarity(finite: Finite) -> Iterator[str]:
    values = finite("out", "similarity")
    if len(values) > 1:
        (first, start), (_, end) = values[0], values[-1]
        verdict = ": the tokens are nearly equal (rank collapse)" if end > SIMILAR else ""
        cosines = f"{format_number(start, 2)} {_place_name(first)} and {format_number(end, 2)} at the end"
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
        times = format_number(start / end, 2)
        yield f"The norm of the stream's gradient {_place_name(first)} is {times} times that at its end."
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


def ablation_findings(ablations: Sequence[Ablation]) -> Iterator[Finding]:
    """Yield findings that name the sublayers that change the output and the loss most."""
    known = [(ablation.site, ablation.output_change) for ablation in ablations if math.isfinite(ablation.output_change)]
    several = len({site.stream for site, _ in known}) > 1
    if len(known) > 1:
        (most, high), (least, low) = max(known, key=_value), min(known, key=_value)
        yield Finding(
            f"The output changes most without {_site_name(most, several)}, by {format_percent(high)} of its norm, and "
            f"least without {_site_name(least, several)}, by {format_percent(low)}."
        )
    better = [ablation for ablation in ablations if ablation.loss_change is not None and ablation.loss_change < 0]
    if better:
        best = min(better, key=lambda ablation: ablation.loss_change or 0.0)
        yield Finding(
            "The loss on these inputs is lower without "
            f"{len(better)} of {len(ablations)} sublayers, removed one at a time, and lowest without "
            f"{_site_name(best.site, several)}: {format_number(best.loss_change, 3)}."
        )
