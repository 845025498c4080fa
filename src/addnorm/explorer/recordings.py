"""The recordings that the page can look at: the files of the command line, read once when it starts.

A request names one by its number, never by a path. What is answered is bounded by the recording's sublayers: the values of one
step and one stream, and one statistic at one site over at most `MOST` steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from addnorm.explorer.badges import badges, closes
from addnorm.explorer.params import shown
from addnorm.stream.decompose import BIASES
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import BY_NAME, RecordedSite, suggest

__all__ = ["MOST", "SERIES", "Asked", "Recordings", "labels"]

MOST = 2000  # steps of a list or of a curve: more than a page has pixels
SHARES = 1e-4  # what shares, which were made in float32, may differ by from one
FACTS = ("model", "name", "source", "inputs", "mode", "dtype", "torch", "loss", "note", "interrupted")
SERIES = {
    "out": ("rms", "l2", "max", "similarity", "massive", "top"),
    "write": ("ratio", "cosine", "unchanged", "rms", "l2"),
    "grad": ("l2", "rms"),
    "params": ("grad_l2", "l2"),
    "norm_in": ("sigma",), "norm_branch": ("sigma",), "norm_out": ("sigma",), "norm_final": ("sigma",),
}  # fmt: skip
"""By role, the statistics that the page draws."""
NAMES = tuple(f"{role}.{statistic}" for role, statistics in SERIES.items() for statistic in statistics)


class Asked(NamedTuple):
    """What a request asks for, each thing checked."""

    number: int  # of the recording
    stream: str
    step: int
    what: str | None  # a statistic that is wanted over the steps as well
    depth: int | None  # and where


class Recordings:
    """The files, in the order in which they were named.

    Args:
        paths: of files that `Recording.save` wrote.

    Raises:
        ValueError: one is no recording, has nothing in it, or cannot be read: in one sentence with its name.
    """

    def __init__(self, paths: Iterable[str | Path] = ()) -> None:
        self.paths = [str(path) for path in paths]
        self.loaded = [_load(path) for path in self.paths]

    def __len__(self) -> int:
        return len(self.loaded)

    def listed(self) -> list[dict[str, Any]]:
        """What there is to choose from: of each file its name, model, streams and steps."""
        names = [Path(path).name for path in self.paths]
        return [
            {
                "name": name if names.count(name) == 1 else path, "path": path, "model": _text(rec.metadata.get("model")),
                "streams": [*rec.streams], "steps": _thinned(rec.steps), "count": len(rec.steps),
            }
            for name, path, rec in zip(names, self.paths, self.loaded, strict=True)
        ]  # fmt: skip

    def asked(self, number: int | str, query: Mapping[str, str]) -> Asked:
        """What GET /api/recording/{number}?step=3&stream=encoder&what=write.ratio&depth=2 asks for.

        Args:
            number: of the recording, from 0.
            query: `step`, `stream`, `what` (role.statistic) and `depth` (a place among the stream's sites), each optional.

        Raises:
            LookupError: there is no such recording.
            ValueError: there is no such thing in it: one sentence with what there is.
        """
        number = _whole("recording", str(number))
        if not 0 <= number < len(self.loaded):
            there = (
                f"a number from 0 to {len(self.loaded) - 1}"
                if self.loaded
                else "none: addnorm explore --recording FILE"
            )
            raise LookupError(f"recording is {number}, expected {there}.")
        rec = self.loaded[number]
        for name in query:
            if name not in ("step", "stream", "what", "depth"):
                raise ValueError(
                    f"the request has {shown(name)}, which is unknown, expected step, stream, what, depth."
                )
        stream, what = query.get("stream", rec.streams[0]), query.get("what")
        if stream not in rec.streams:
            raise ValueError(f"stream is {shown(stream)}, expected {suggest(stream, rec.streams)}.")
        if what is not None and what not in NAMES:
            raise ValueError(f"what is {shown(what)}, expected {suggest(what, NAMES)}.")
        steps = rec.steps
        step = _whole("step", query["step"]) if "step" in query else steps[-1]
        if step not in steps:
            raise ValueError(f"step is {step}, expected one that was recorded, from {steps[0]} to {steps[-1]}.")
        return Asked(number, stream, step, what, _whole("depth", query["depth"]) if "depth" in query else None)

    def answer(self, asked: Asked) -> dict[str, Any]:
        """One step of one stream: facts, sites, series by depth, badges, map, balance sheet; and `what` over the steps."""
        rec, stream, step = self.loaded[asked.number], asked.stream, asked.step
        sites = [site for site in rec.sites if site.stream == stream]
        return {
            "number": asked.number, "path": self.paths[asked.number], "stream": stream, "step": step,
            "last": step == rec.steps[-1],
            "facts": {name: said for name in FACTS if (said := _text(rec.metadata.get(name)))},
            "sites": [asdict(one) | {"label": label} for one, label in zip(sites, labels(sites), strict=True)],
            "series": _series(rec, sites, step, stream),
            "badges": badges(rec, stream),
            "map": _map(rec, stream, sites),
            "balance": _balance(rec, stream, sites),
            "time": None if asked.what is None else _time(rec, sites, asked.what, asked.depth),
        }  # fmt: skip


def labels(sites: Sequence[RecordedSite]) -> list[str]:
    """What each is called on an axis: "x_0", "attention 1", ..., "final norm"; with its id where two would be called the same."""
    ends = {"start": "x_0", "final": "final norm"}
    found = [ends.get(site.kind) or f"{site.kind} {1 + (site.layer or 0)}" for site in sites]
    counts = Counter(found)
    return [name if counts[name] == 1 else f"{name}, {site.id}" for name, site in zip(found, sites, strict=True)]


def _load(path: str) -> Recording:
    try:
        rec = Recording.load(path)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): addnorm record MODEL --out FILE writes one."
        ) from None
    except ImportError as error:
        raise ValueError(f"{path} cannot be read: {str(error).rstrip('.')}.") from None
    if not rec.sites or not rec.steps:
        raise ValueError(f"{path} is a recording without a number, expected one of a step or more: record it again.")
    return rec


def _thinned(steps: Sequence[int]) -> list[int]:
    """At most `MOST` of them, evenly; the first and the last are there."""
    if len(steps) <= MOST:
        return [*steps]
    return [steps[round(k * (len(steps) - 1) / (MOST - 1))] for k in range(MOST)]


def _series(rec: Recording, sites: Sequence[RecordedSite], step: int, stream: str) -> dict[str, list[float | None]]:
    """By role.statistic the values at the sites, None where there is none; what no site has is left out."""
    found = {}
    for name in NAMES:
        role, statistic = name.split(".")
        values = {site.id: value for site, value in rec.series(role, statistic, step=step, stream=stream)}
        if values:
            found[name] = [values.get(site.id) for site in sites]
    return found


def _map(rec: Recording, stream: str, sites: Sequence[RecordedSite]) -> dict[str, Any] | None:
    """Sources and, at each depth, their shares; the depths have the names of the sublayers where each has an add of its own."""
    sources, shares = rec.memory_maps.get(stream, ([], []))
    if not shares:
        return None
    named = _named(sites)
    depths = [name for site, name in zip(sites, labels(sites), strict=True) if site.kind != "final"]
    if len(depths) != len(shares):
        depths = ["x_0", *(f"after add {k}" for k in range(1, len(shares)))]
    return {"sources": [named.get(one, one) for one in sources], "depths": depths[: len(shares)], "shares": shares}


def _source(site: RecordedSite) -> str:
    """Its name as a source: in each stream what that begins with is x_0."""
    return "x_0" if site.kind == "start" else site.id


def _named(sites: Sequence[RecordedSite]) -> dict[str, str]:
    """The label of a source, by its name."""
    return {_source(site): name for site, name in zip(sites, labels(sites), strict=True)}


def _balance(rec: Recording, stream: str, sites: Sequence[RecordedSite]) -> dict[str, Any]:
    """The sheet: of each source what was written and what is left of it in the end, as an amount and as a part of the whole.

    `refused` says why there is none. Of an older file, without amounts, the parts are those of the map: means of tokens' shares.
    """
    sheet, (mapped, shares), last = rec.balances.get(stream), rec.memory_maps.get(stream, ([], [])), rec.steps[-1]
    if sheet is not None and sheet.reason:
        return {"refused": f"The components of the stream do not add up: {sheet.reason}."}
    if sheet is None and not shares:
        return {"refused": "Not recorded: this file has neither amounts nor shares. Record the model again."}
    opening = [(site, value) for site, value in rec.series("out", "l2", last, stream) if site.kind == "start"]
    written = {_source(site): value for site, value in (*opening, *rec.series("write", "l2", last, stream))}
    named, kinds = _named(sites), {_source(site): site.kind for site in sites} | {BIASES: "norms"}
    if sheet is not None:
        amounts: list[float | None] = [*sheet.amounts]
        parts = [amount / sheet.stream_norm if sheet.stream_norm else math.nan for amount in sheet.amounts]
        sources: Sequence[str] = sheet.sources
        facts = {name: getattr(sheet, name) for name in ("tokens", "closure", "error")} | {"length": sheet.stream_norm}
        facts["closes"] = closes(sheet)
    else:
        sources, parts, amounts = mapped, shares[-1], [None] * len(mapped)
        error = abs(1 - math.fsum(parts))
        facts = {"length": None, "tokens": None, "closure": None, "error": error, "closes": error <= SHARES}
    rows = [
        {
            "source": source, "label": named.get(source, source), "kind": kinds.get(source, "other"),
            "depth": len(sources) if source == BIASES else k, "written": written.get(source), "amount": amount, "part": part,
        }
        for k, (source, amount, part) in enumerate(zip(sources, amounts, parts, strict=True))
    ]  # fmt: skip
    return {"refused": "", "step": last, "rows": rows, **facts}


def _time(rec: Recording, sites: Sequence[RecordedSite], what: str, depth: int | None) -> dict[str, Any] | None:
    """One statistic over the steps: at that site, or at the last one that has it; None where none has."""
    role, statistic = what.split(".")
    places = range(len(sites))
    wanted = [depth] if depth is not None and depth in places else []
    curves = ((k, dict(rec.over_time(sites[k], role, statistic))) for k in (*wanted, *reversed(places)))
    at, values = next(((k, curve) for k, curve in curves if curve), (-1, {}))
    if not values:
        return None
    steps = _thinned([*values])
    meaning = BY_NAME[role, statistic].meaning
    return {
        "depth": at, "what": what, "meaning": meaning, "steps": steps, "values": [values[step] for step in steps],
        "count": len(values),
    }  # fmt: skip


def _whole(name: str, text: str) -> int:
    if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > 18:
        raise ValueError(f"{name} is {shown(text)}, expected a whole number.")
    return int(text)


def _text(value: Any) -> str:
    """A fact of a file that anybody may have written, in a few hundred characters."""
    return "" if value is None else str(value)[:400]
