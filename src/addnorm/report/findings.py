"""What stands out in a model, in sentences that are computed from its numbers: nothing is said that was not measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from addnorm._util.numbers import format_number, format_percent
from addnorm.report.blocks import Finding
from addnorm.stream.ablate import Ablation
from addnorm.stream.find.inspection import Inspection, Site
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import RecordedSite

__all__ = ["called", "of_ablations", "of_inspection", "of_recording", "out_of"]

DEAD = 1e-3  # a write so small beside the stream
AGAINST = -0.1  # a cosine of what writes against the stream
ALIKE = 0.9
UNEVEN = 10.0


def called(site: Site | RecordedSite, several: bool = False) -> str:
    """A sublayer in words: the attention of layer 3."""
    if site.kind in ("start", "final"):
        return "x₀" if site.kind == "start" else "the final norm"
    of = f" of the {site.stream}" if several else ""
    kind = site.id if site.kind == "other" else f"the {site.kind}"
    return kind if site.layer is None else f"{kind} of layer {site.layer + 1}{of}"


def out_of(count: int, of: int, what: str) -> str:
    """A number of things: "2 of 12 sublayers", "all 12 sublayers", "the only sublayer"."""
    if count == of == 1:
        return f"the only {what.removesuffix('s')}"
    return f"all {of} {what}" if count == of else f"{count} of {of} {what}"


def of_inspection(found: Inspection) -> list[Finding]:
    """What is proved, and what is not."""
    return [*_proof(found)]


def _proof(found: Inspection) -> Iterator[Finding]:
    if not found.sites:
        yield Finding(f"{found.model} has no residual stream that was found.", "refuted")
    open_ = [site for site in found.sites if not site.closes]
    closed = [site for site in found.sites if site.closes]
    if closed:
        worst = max(site.closure for site in closed)
        them = (
            "is computed again in float64 from its equation"
            if len(found.sites) == 1
            else "computed again in float64 from their equations"
        )
        yield Finding(
            f"{_capital(out_of(len(closed), len(found.sites), 'sublayers'))} {them}: what the "
            f"model itself made differs by {format_number(worst, 2)} at most, relative.",
            "proved",
        )
    if open_:
        worst_site = max(open_, key=lambda site: site.closure if math.isfinite(site.closure) else math.inf)
        do = "does" if len(found.sites) == 1 else "do"
        yield Finding(
            f"{_capital(out_of(len(open_), len(found.sites), 'sublayers'))} {do} not close: {worst_site.equation} is off by "
            f"{format_number(worst_site.closure, 2)}, relative, at {worst_site.id}.",
            "refuted",
        )
    for stream in found.streams:
        name = "The stream" if len(found.streams) == 1 else f"The stream of the {stream.name}"
        if stream.closure is not None:
            holds = "is" if stream.closes else "is not"
            yield Finding(
                f"{name} at its end {holds} x₀ and the sum of all writes: relative error {format_number(stream.closure, 2)}.",
                "proved" if stream.closes else "refuted",
            )
    if found.unknown:
        count = len(found.unknown)
        places = f"{count} places in the model are" if count > 1 else "A place in the model is"
        yield Finding(f"{places} not understood; the reasons are below.")


def of_recording(rec: Recording) -> list[Finding]:
    """What is remarkable in what was measured."""
    names = rec.streams if len(rec.streams) > 1 else (None,)
    return [*_bad_numbers(rec), *(one for name in names for one in _of_stream(rec, name))]


def _of_stream(rec: Recording, name: str | None) -> Iterator[Finding]:
    for rule in (_growth, _largest_writes, _against, _alike, _massive, _backward, _absorbed, _made_of):
        for text in rule(rec, name):
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


def _finite(rec: Recording, role: str, statistic: str, stream: str | None) -> list[tuple[RecordedSite, float]]:
    return [(site, value) for site, value in rec.series(role, statistic, None, stream) if math.isfinite(value)]


def _growth(rec: Recording, stream: str | None) -> Iterator[str]:
    values = [(s, v) for s, v in _finite(rec, "out", "rms", stream) if s.kind != "final"]
    if len(values) > 1 and values[0][1] > 0:
        (first, start), (_, end) = values[0], values[-1]
        times = end / start
        how = "keeps its size"
        if not 0.9 <= times <= 1.1:
            how = f"grows {format_number(times, 2)} times" if times > 1 else f"shrinks to {format_percent(times)}"
        sizes = f"{format_number(start, 3)}, then {format_number(end, 3)}"
        yield f"The stream {how} from {called(first)} to its end: root mean square {sizes}."


def _largest_writes(rec: Recording, stream: str | None) -> Iterator[str]:
    ratios = _finite(rec, "write", "ratio", stream)
    if len(ratios) == 1:
        ((only, ratio),) = ratios
        yield f"Beside its stream {called(only)} writes {format_percent(ratio)} of its length."
    elif ratios:
        (most, high), (least, low) = max(ratios, key=_value), min(ratios, key=_value)
        yield (
            f"Beside its stream {called(most)} writes most, {format_percent(high)} of its length, and {called(least)} least, "
            f"{format_percent(low)}."
        )
    dead = [site for site, value in ratios if value < DEAD]
    if dead:
        names = ", ".join(map(called, dead[:3])) + ", ..." * (len(dead) > 3)
        them = _capital(out_of(len(dead), len(ratios), "sublayers"))
        yield f"{them} write less than {format_percent(DEAD)} of the stream's length: {names}."


def _against(rec: Recording, stream: str | None) -> Iterator[str]:
    cosines = _finite(rec, "write", "cosine", stream)
    against = [one for one in cosines if one[1] < AGAINST]
    if against:
        most, cosine = min(against, key=_value)
        if len(against) == 1:
            yield f"{_capital(called(most))} writes against the stream and takes from it: cosine {format_number(cosine, 2)}."
            return
        them = _capital(out_of(len(against), len(cosines), "sublayers"))
        how = f"most of all {called(most)}: cosine {format_number(cosine, 2)}"
        yield f"{them} write against the stream and take from it, {how}."


def _alike(rec: Recording, stream: str | None) -> Iterator[str]:
    values = _finite(rec, "out", "similarity", stream)
    if len(values) > 1:
        (first, start), (_, end) = values[0], values[-1]
        verdict = ": nearly one vector for all, a collapse of rank" if end > ALIKE else ""
        begin = "at x₀" if first.kind == "start" else f"after {called(first)}"
        cosines = f"{format_number(start, 2)} {begin} and {format_number(end, 2)} at the end"
        yield f"The mean cosine of two tokens is {cosines}{verdict}."


def _massive(rec: Recording, stream: str | None) -> Iterator[str]:
    counts = _finite(rec, "out", "massive", stream)
    tops = _finite(rec, "out", "top", stream)
    found = [(site, value) for site, value in counts if value > 0]
    if found:
        (first, _), (most, count) = found[0], max(found, key=_value)
        yield f"There are massive activations from {called(first)} on: at most {round(count)}, after {called(most)}."
    elif tops:
        site, top = max(tops, key=_value)
        yield f"There are no massive activations; the largest magnitude is {format_number(top, 2)} medians, after {called(site)}."


def _backward(rec: Recording, stream: str | None) -> Iterator[str]:
    values = _finite(rec, "grad", "l2", stream)
    if len(values) > 1 and values[-1][1] > 0:
        (first, start), (_, end) = values[0], values[-1]
        times = start / end
        how = "as large as" if 0.9 < times < 1.1 else f"{format_number(times, 2)} times"
        begin = "at x₀" if first.kind == "start" else f"at the stream after {called(first)}"
        yield f"The gradient {begin} is {how} that at the stream's end."
    weights = [one for one in _finite(rec, "params", "grad_l2", stream) if one[1] > 0]
    if len(weights) > 1:
        (most, high), (least, low) = max(weights, key=_value), min(weights, key=_value)
        if high > UNEVEN * low:
            uneven = f"{format_number(high / low, 2)} times that of {called(least)}"
            yield f"The gradients of the parameters are uneven: that of {called(most)} is {uneven}."


def _absorbed(rec: Recording, stream: str | None) -> Iterator[str]:
    values = _finite(rec, "write", "unchanged", stream)
    if values:
        site, share = max(values, key=_value)
        if share > 0.01:
            lost = f"{format_percent(share)} of the stream's elements stay as they are"
            yield f"Up to {lost} when {called(site)} adds its write: it is rounded away."


def _made_of(rec: Recording, stream: str | None) -> Iterator[str]:
    for name, (sources, shares) in rec.memory_maps.items():
        if stream not in (None, name) or not shares:
            continue
        end = dict(zip(sources, shares[-1], strict=True))
        if "x_0" in end and math.isfinite(end["x_0"]):
            sites = {site.id: site for site in rec.sites}
            writers = {source: share for source, share in end.items() if source in sites and source != "x_0"}
            most = max(writers, key=writers.__getitem__, default=None)
            largest = (
                f"; the largest part is from {called(sites[most])}, {format_percent(writers[most])}" if most else ""
            )
            yield f"At its end {format_percent(end['x_0'])} of the stream is x₀{largest}."


def of_ablations(done: Sequence[Ablation]) -> list[Finding]:
    """Which sublayers matter most and least."""
    known = [(one.site, one.output_change) for one in done if math.isfinite(one.output_change)]
    several = len({site.stream for site, _ in known}) > 1
    found = []
    if len(known) > 1:
        (most, high), (least, low) = max(known, key=_value), min(known, key=_value)
        found.append(
            Finding(
                f"Without {called(most, several)} the output changes most, by {format_percent(high)} of its length; "
                f"without {called(least, several)} least, by {format_percent(low)}."
            )
        )
    better = [one for one in done if one.loss_change is not None and one.loss_change < 0]
    if better:
        best = min(better, key=lambda one: one.loss_change or 0.0)
        found.append(
            Finding(
                f"Left out one at a time, {out_of(len(better), len(done), 'sublayers')} would lower the loss on these inputs, "
                f"most of all {called(best.site, several)}: {format_number(best.loss_change, 3)}."
            )
        )
    return found


def _value(one: tuple[object, float]) -> float:
    return one[1]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
