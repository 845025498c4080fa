"""The data of the recording view: files of `addnorm record`, which are read once at the start, and what they prove, as badges.

A request names a recording by its number, never by a path. A response has the values of one step and one stream, and one
statistic at one site over at most `MAX_STEPS` steps.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from addnorm._util.numbers import format_count
from addnorm.explorer.params import shorten
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import BY_NAME, ENDS, Balance, RecordedSite, suggest
from addnorm.stream.shares import BIASES

__all__ = ["Query", "Recordings"]

MAX_CELLS = 120  # of a map in each direction: a browser takes minutes to draw a million cells
MAX_STEPS = 2000  # of a list or a curve: more than a page has pixels
SHARES_TOLERANCE = 1e-4  # of the sum of shares that were computed in float32
BALANCE_FACTOR, BALANCE_ROUNDOFF = (
    10.0,
    1e-9,
)  # tolerance of a balance, from the closure of the tensor: tokens differ in norm
NAMED = 3  # sublayers that a badge names
MAX_TEXT = 400  # characters of a text in a file, which anybody may have written
METADATA = ("model", "name", "source", "inputs", "mode", "dtype", "torch", "loss", "note", "interrupted")
# The statistics that the page draws, by role.
SERIES = {
    "out": ("rms", "l2", "max", "similarity", "massive", "top"),
    "write": ("ratio", "cosine", "unchanged", "rms", "l2"),
    "grad": ("l2", "rms"),
    "params": ("grad_l2", "l2"),
    "norm_in": ("sigma",), "norm_branch": ("sigma",), "norm_out": ("sigma",), "norm_final": ("sigma",),
}  # fmt: skip
NAMES = tuple(f"{role}.{statistic}" for role, statistics in SERIES.items() for statistic in statistics)
PARAMS = ("step", "stream", "what", "depth")


class Query(NamedTuple):
    """Checked request for a recording."""

    number: int  # of the recording
    stream: str
    step: int
    what: str | None  # a statistic whose values over the steps are requested too
    depth: int | None  # the place of that statistic among the stream's sites


class Recordings:
    """The recordings of the command line, in their order.

    Args:
        paths: files that `Recording.save` wrote.

    Raises:
        ValueError: a file is not a recording, is empty or cannot be read.
    """

    def __init__(self, paths: Iterable[str | Path] = ()) -> None:
        self.paths = [str(path) for path in paths]
        self.loaded = [_load(path) for path in self.paths]

    def __len__(self) -> int:
        return len(self.loaded)

    def describe(self) -> list[dict[str, Any]]:
        """Return the name, model, streams and steps of each recording."""
        names = [Path(path).name for path in self.paths]
        return [
            {
                "name": name if names.count(name) == 1 else path, "path": path,
                "model": _text(rec.metadata.get("model")), "streams": [*rec.streams], "steps": _thin_out(rec.steps),
                "count": len(rec.steps),
            }
            for name, path, rec in zip(names, self.paths, self.loaded, strict=True)
        ]  # fmt: skip

    def parse(self, number: int | str, params: Mapping[str, str]) -> Query:
        """Return the checked request of GET /api/recording/{number}?step=3&stream=encoder&what=write.ratio&depth=2.

        Args:
            number: number of the recording, from 0.
            params: `step`, `stream`, `what` (role.statistic) and `depth` (a place among the stream's sites), each optional.

        Raises:
            LookupError: there is no such recording.
            ValueError: a parameter is wrong.
        """
        number = _whole("recording", str(number))
        if not 0 <= number < len(self.loaded):
            last = len(self.loaded) - 1
            expected = (
                f"a number from 0 to {last}" if self.loaded else "none: start addnorm explore with --recording FILE"
            )
            raise LookupError(f"recording is {number}, expected {expected}.")
        rec = self.loaded[number]
        for name in params:
            if name not in PARAMS:
                raise ValueError(f"the request has {shorten(name)}, which is unknown, expected {', '.join(PARAMS)}.")
        stream, what = params.get("stream", rec.streams[0]), params.get("what")
        if stream not in rec.streams:
            raise ValueError(f"stream is {shorten(stream)}, expected {suggest(stream, rec.streams)}.")
        if what is not None and what not in NAMES:
            raise ValueError(f"what is {shorten(what)}, expected {suggest(what, NAMES)}.")
        steps = rec.steps
        step = _whole("step", params["step"]) if "step" in params else steps[-1]
        if step not in steps:
            expected = f"from {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"{steps[0]}, the only one"
            raise ValueError(f"step is {step}, expected a recorded step, {expected}.")
        return Query(number, stream, step, what, _whole("depth", params["depth"]) if "depth" in params else None)

    def compute(self, query: Query) -> dict[str, Any]:
        """Return one step of one stream: metadata, sites, series by depth, badges, memory map, balance; `what` over the steps."""
        rec, stream, step = self.loaded[query.number], query.stream, query.step
        sites = [site for site in rec.sites if site.stream == stream]
        return {
            "number": query.number, "path": self.paths[query.number], "stream": stream, "step": step,
            "last": step == rec.steps[-1],
            "metadata": {name: text for name in METADATA if (text := _text(rec.metadata.get(name)))},
            "sites": [asdict(site) | {"label": label} for site, label in zip(sites, _labels(sites), strict=True)],
            "series": _series(rec, sites, step, stream),
            "badges": _badges(rec, stream),
            "map": _map(rec, stream, sites),
            "balance": _balance(rec, stream, sites),
            "time": None if query.what is None else _over_time(rec, sites, query.what, query.depth),
        }  # fmt: skip


def _labels(sites: Sequence[RecordedSite]) -> list[str]:
    """Return the sites' labels: "x_0", "attention 1", ..., "final norm", with the id where two would be equal."""
    names = [ENDS.get(site.kind) or f"{site.kind} {1 + (site.layer or 0)}" for site in sites]
    counts = Counter(names)
    return [name if counts[name] == 1 else f"{name}, {site.id}" for name, site in zip(names, sites, strict=True)]


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
        raise ValueError(f"{path} is an empty recording, expected one step or more: record it again.")
    return rec


def _thin_out(steps: Sequence[int]) -> list[int]:
    """Return at most `MAX_STEPS` of the steps, evenly spaced, with the first and the last."""
    if len(steps) <= MAX_STEPS:
        return [*steps]
    return [steps[round(k * (len(steps) - 1) / (MAX_STEPS - 1))] for k in range(MAX_STEPS)]


def _series(rec: Recording, sites: Sequence[RecordedSite], step: int, stream: str) -> dict[str, list[float | None]]:
    """Return the values at the sites by role.statistic, None where a site has no value."""
    series = {}
    for name in NAMES:
        role, statistic = name.split(".")
        values = {site.id: value for site, value in rec.series(role, statistic, step=step, stream=stream)}
        if values:
            series[name] = [values.get(site.id) for site in sites]
    return series


def _map(rec: Recording, stream: str, sites: Sequence[RecordedSite]) -> dict[str, Any] | None:
    """Return the shares of the sources at each depth. Depths are named after sublayers where each sublayer has one add.

    Of more than `MAX_CELLS` depths that many are returned, evenly spaced, with their `places`. Neighbouring sources are then
    added up; `starts` has the first of each group.
    """
    sources, shares = rec.memory_maps.get(stream, ([], []))
    if not shares:
        return None
    named = _named(sites)
    depths = [name for site, name in zip(sites, _labels(sites), strict=True) if site.kind != "final"]
    if len(depths) != len(shares):
        depths = ["x_0", *(f"after add {k}" for k in range(1, len(shares)))]
    names = [named.get(source, source) for source in sources]
    places, starts = [*range(len(shares))], [*range(len(sources))]
    if max(len(shares), len(sources)) > MAX_CELLS:
        places = _spread(len(shares))
        bounds = [0, *(k + 1 for k in _spread(len(sources)))]
        groups = list(itertools.pairwise(bounds))
        starts = bounds[:-1]
        names = [names[a] if b == a + 1 else f"{names[a]} to {names[b - 1]}" for a, b in groups]
        shares = [[math.fsum(shares[place][a:b]) for a, b in groups] for place in places]
    return {
        "sources": names, "starts": starts, "depths": [depths[place] for place in places], "places": places,
        "shares": shares,
    }  # fmt: skip


def _spread(count: int) -> list[int]:
    """Return at most `MAX_CELLS` numbers below `count`, evenly spaced, with the first and the last."""
    if count <= MAX_CELLS:
        return [*range(count)]
    return [round(k * (count - 1) / (MAX_CELLS - 1)) for k in range(MAX_CELLS)]


def _source(site: RecordedSite) -> str:
    """Return the site's name as a source: the start of each stream is x_0."""
    return "x_0" if site.kind == "start" else site.id


def _named(sites: Sequence[RecordedSite]) -> dict[str, str]:
    """Return the labels of the sources, by their names."""
    return {_source(site): name for site, name in zip(sites, _labels(sites), strict=True)}


def _balance(rec: Recording, stream: str, sites: Sequence[RecordedSite]) -> dict[str, Any]:
    """Return what each source wrote and what is left of it at the end, as an amount, and its share as in the memory map.

    `refused` says why there is none. Older files have no amounts.
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
        share = dict(zip(mapped, shares[-1], strict=True)) if shares else {}
        parts = [share.get(source, math.nan) for source in sheet.sources]
        sources: Sequence[str] = sheet.sources
        facts = {name: getattr(sheet, name) for name in ("tokens", "total_tokens", "closure", "error")}
        facts |= {"length": sheet.stream_norm}
        facts["closes"] = _balances(sheet)
    else:
        sources, parts, amounts = mapped, shares[-1], [None] * len(mapped)
        error = abs(1 - math.fsum(parts))
        facts = {
            "length": None,
            "tokens": None,
            "total_tokens": None,
            "closure": None,
            "error": error,
            "closes": error <= SHARES_TOLERANCE,
        }
    rows = [
        {
            "source": source, "label": named.get(source, source), "kind": kinds.get(source, "other"),
            "depth": len(sources) if source == BIASES else k, "written": written.get(source), "amount": amount, "part": part,
        }
        for k, (source, amount, part) in enumerate(zip(sources, amounts, parts, strict=True))
    ]  # fmt: skip
    return {"refused": "", "step": last, "rows": rows, **facts}


def _over_time(rec: Recording, sites: Sequence[RecordedSite], what: str, depth: int | None) -> dict[str, Any] | None:
    """Return a statistic over the steps: at the site, or at the last site that has it, or None."""
    role, statistic = what.split(".")
    places = range(len(sites))
    requested = [depth] if depth is not None and depth in places else []
    curves = ((k, dict(rec.over_time(sites[k], role, statistic))) for k in (*requested, *reversed(places)))
    at, values = next(((k, curve) for k, curve in curves if curve), (-1, {}))
    if not values:
        return None
    steps = _thin_out([*values])
    meaning = BY_NAME[role, statistic].meaning
    return {
        "depth": at, "what": what, "meaning": meaning, "steps": steps, "values": [values[step] for step in steps],
        "count": len(values),
    }  # fmt: skip


def _whole(name: str, text: str) -> int:
    if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > 18:
        raise ValueError(f"{name} is {shorten(text)}, expected a whole number.")
    return int(text)


def _text(value: Any) -> str:
    """Return an entry of a file's metadata as text."""
    return "" if value is None else str(value)[:MAX_TEXT]


# Badges: {"name", "state", "text", "more"}. The state is "proved" where numbers show it, "open" where something does not close
# or is not understood, and "none" where nothing was recorded. An older file may lack entries: they are reported as missing.

Badge = dict[str, str]
PROVED, OPEN, NONE = "proved", "open", "none"
AGAIN = "This file does not say. Record the model again."


def _badges(rec: Recording, stream: str) -> list[Badge]:
    """Return the badges of one stream."""
    known = _as_dict(_as_dict(rec.metadata.get("streams")).get(stream))
    unknown = rec.metadata.get("unknown")
    return [
        _wiring(known, rec),
        _equations(known, rec),
        _sum(known),
        _components(rec, stream),
        *([_understood(unknown)] if isinstance(unknown, list) else []),
    ]


def _balances(sheet: Balance) -> bool:
    """Return whether the amounts add up to the stream's norm, within the closure of the components."""
    return sheet.error <= BALANCE_FACTOR * sheet.closure + BALANCE_ROUNDOFF


def _wiring(known: Mapping[str, Any], rec: Recording) -> Badge:
    if not known:
        name = rec.metadata.get("wiring")
        return _badge("wiring", NONE, _title(name) if isinstance(name, str) else "not recorded", AGAIN)
    equation = _text(known.get("equation")).replace("\n", "; ")
    details = [equation, *(f"{title}: {text}" for title, text in (
        ("norms", _text(known.get("norms"))), ("embedding norm", _text(known.get("embedding_norm"))),
        ("final norm", _text(known.get("final_norm"))),
    ) if text)]  # fmt: skip
    remarks = known.get("remarks")
    details += [_text(remark) for remark in remarks] if isinstance(remarks, list) else []
    name = known.get("wiring")
    if not isinstance(name, str):
        return _badge("wiring", OPEN, "not a known wiring", "; ".join(details))
    sites = map(_as_dict, _as_dict(known.get("sites")).values())
    if any(site.get("closes") is not True for site in sites):
        return _badge("wiring", OPEN, f"{_title(name)}, not proved", "; ".join(details))
    return _badge("wiring", PROVED, _title(name), "; ".join(details))


def _equations(known: Mapping[str, Any], rec: Recording) -> Badge:
    sites = {str(name): _as_dict(site) for name, site in _as_dict(known.get("sites")).items()}
    if not sites:
        error = rec.metadata.get("closure")
        text = f"largest relative error {error:.1e}" if isinstance(error, float) else "not recorded"
        return _badge("equations", NONE, text, AGAIN)
    wrong = [name for name, site in sites.items() if site.get("closes") is not True]
    errors = [_number(site.get("closure")) for site in sites.values()]
    largest = math.nan if any(map(math.isnan, errors)) else max(errors)
    many = format_count(len(sites), "sublayer")
    if wrong:
        names = f"{', '.join(wrong[:NAMED])}{f' and {len(wrong) - NAMED} more' if len(wrong) > NAMED else ''}"
        text = f"{len(wrong)} of {many} {'does' if len(wrong) == 1 else 'do'} not close"
        return _badge("equations", OPEN, text, f"{names}: the largest error is {largest:.1e}")
    text = (
        "Each equation was computed again in float64 from the sublayer's output and compared with the model's stream."
    )
    return _badge("equations", PROVED, f"{many} closed, relative error at most {largest:.1e}", text)


def _sum(known: Mapping[str, Any]) -> Badge:
    name = "x_L = x_0 + all writes"
    if not known:
        return _badge(name, NONE, "not recorded", AGAIN)
    error = known.get("closure")
    if error is None:
        text = "The stream passes through norms or factors between the adds, so the writes alone do not add up to it."
        return _badge(name, NONE, "not a plain sum", text)
    number = _number(error)
    closes = known.get("closes") is True
    more = "x_0 and the writes add up to the stream." if closes else "x_0 and the writes do not add up to the stream."
    return _badge(name, PROVED if closes else OPEN, f"relative error {number:.1e}", more)


def _components(rec: Recording, stream: str) -> Badge:
    sheet = rec.balances.get(stream)
    if sheet is None:
        return _badge("balance", NONE, "not recorded", AGAIN)
    if sheet.reason:
        return _badge("balance", OPEN, "does not add up", f"{sheet.reason}.")
    if not _balances(sheet):
        more = "The amounts do not add up to the stream's norm: the file was changed after recording."
        return _badge("balance", OPEN, f"does not add up, error {sheet.error:.1e}", more)
    more = f"At every depth the components add up to the recorded stream, over {sheet.tokens} tokens of the last step."
    return _badge("balance", PROVED, f"adds up, error {sheet.closure:.1e}", more)


def _understood(unknown: list[Any]) -> Badge:
    if not unknown:
        return _badge("understood", PROVED, "everything", "Every operation on the model's streams was understood.")
    places = [
        f"{_text(part.get('path')) or 'the model'}: {_text(part.get('reason'))}" for part in map(_as_dict, unknown)
    ]
    more = f"; and {len(places) - NAMED} more" if len(places) > NAMED else ""
    count = format_count(len(places), "place")
    return _badge("understood", OPEN, f"{count} not understood", "; ".join(places[:NAMED]) + more)


def _badge(name: str, state: str, text: str, more: str) -> Badge:
    return {"name": name, "state": state, "text": text, "more": more}


def _title(name: str) -> str:
    """Return a wiring's name as papers write it."""
    return name[:80].replace("_", "-").replace("-ln", "-LN")


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float:
    """Return a closure; infinity is a word in a file."""
    if value == "Infinity":
        return math.inf
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
