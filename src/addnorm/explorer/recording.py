"""The data of the recording view: files of `addnorm record`, which are read once at the start, and what they prove, as badges.

A request names a recording by its number, never by a path. A response has the values of one step and one stream, and one
statistic at one site over at most `MAX_STEPS` steps.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from addnorm._util.jsonio import float_of
from addnorm._util.numbers import format_count, format_number
from addnorm.explorer.params import Choice, Field, Number, read_params
from addnorm.lab.theory import largest
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import ENDS, Balance, RecordedSite, find_statistic
from addnorm.stream.shares import BIASES

MAX_CELLS = 120  # of a map in each direction: a browser takes minutes to draw a million cells
MAX_STEPS = 2000  # of a list or a curve: more than a page has pixels
BALANCE_FACTOR, BALANCE_ROUNDOFF = 10.0, 1e-9  # tolerance of a balance: 10 times the closure, since tokens differ
DRAWN_STREAMS = 8  # number of streams that are drawn, as in panels.js
NAMED = 3  # sublayers that a badge names
MAX_TEXT = 400  # characters of a text in a file, which anybody may have written
METADATA = ("model", "name", "source", "inputs", "mode", "dtype", "torch", "loss", "note", "interrupted")
# The statistics that the page draws, by role.
SERIES = {
    "out": ("rms", "l2", "max", "similarity", "massive", "top", *(f"rms_{k}" for k in range(DRAWN_STREAMS))),
    "write": ("ratio", "cosine", "unchanged", "share", "rms", "l2"),
    "grad": ("l2", "rms"),
    "params": ("grad_l2", "l2"),
    "matrices": ("forward", "backward", "concentration", "spread_C", "spread_B"),
    "norm_in": ("sigma",), "norm_branch": ("sigma",), "norm_out": ("sigma",), "norm_final": ("sigma",),
}  # fmt: skip
NAMES = tuple(f"{role}.{statistic}" for role, statistics in SERIES.items() for statistic in statistics)


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

    def describe(self) -> list[dict[str, Any]]:
        """Return the name, model, streams and steps of each recording."""
        names = [Path(path).name for path in self.paths]
        return [
            {
                "name": name if names.count(name) == 1 else path, "path": path,
                "model": _text(rec.metadata.get("model")), "streams": [*rec.streams],
                "steps": spread(rec.steps, MAX_STEPS), "count": len(rec.steps),
            }
            for name, path, rec in zip(names, self.paths, self.loaded, strict=True)
        ]  # fmt: skip

    def parse(self, params: Any) -> dict[str, Any]:
        """Return the checked parameters of a request, as in {"recording": 0, "step": 3, "what": "write.ratio", "depth": 2}.

        Args:
            params: `recording` (its number, from 0), `step`, `stream`, `what` (role.statistic) and `depth` (a place among the
                stream's sites), each optional.

        Raises:
            ValueError: a parameter is wrong, or there is no recording.
        """
        if not self.loaded:
            raise ValueError("the explorer has no recording, expected one or more: start addnorm explore with a FILE.")
        numbers = Number(0, 0, len(self.loaded) - 1, step=1)
        number = numbers.check("recording", params.get("recording", 0) if isinstance(params, dict) else 0)
        rec = self.loaded[int(number)]
        fields: dict[str, Field] = {
            "recording": numbers, "step": Number(rec.steps[-1], rec.steps[0], rec.steps[-1], step=1),
            "stream": Choice(rec.streams[0], tuple(rec.streams)), "what": Choice("", NAMES),
            "depth": Number(-1, -(10**9), 10**9, step=1),
        }  # fmt: skip
        values = read_params(fields, params)
        if values["step"] not in rec.steps:
            raise ValueError(f"step is {values['step']}, expected a recorded step.")
        return values

    def compute(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return one step of one stream: metadata, sites, series by depth, badges, memory map, balance; `what` over the steps.

        Args:
            request: the parameters that `parse` returned. With `what`, the values of that statistic over the steps are
                returned too: at the site at `depth`, or at the last site that has the statistic if that site has none.
        """
        number, step, stream, what, depth = request.values()  # in the order of the fields
        rec = self.loaded[number]
        sources, shares = rec.memory_maps.get(stream, ([], []))
        sites = [site for site in rec.sites if site.stream == stream]
        labels = _label(sites)
        named = {_source(site): label for site, label in zip(sites, labels, strict=True)}
        return {
            "number": number, "path": self.paths[number], "stream": stream, "step": step,
            "last": step == rec.steps[-1],
            "metadata": {name: text for name in METADATA if (text := _text(rec.metadata.get(name)))},
            "sites": [asdict(site) | {"label": label} for site, label in zip(sites, labels, strict=True)],
            "series": _series(rec, sites, step, stream),
            "badges": _badges(rec, stream),
            "map": _map(sources, shares, named, sites),
            "balance": _balance(rec, stream, named, sites),
            "time": _over_time(rec, sites, what, depth) if what else None,
        }  # fmt: skip


def _load(path: str) -> Recording:
    try:
        rec = Recording.load(path)
    except OSError as error:
        reason = f"({error.strerror}): addnorm record MODEL --out FILE writes one"
        raise ValueError(f"{path} cannot be read {reason}.") from None
    except ImportError as error:
        raise ValueError(f"{path} cannot be read: {str(error).rstrip('.')}.") from None
    if not rec.sites or not rec.steps:
        raise ValueError(f"{path} is an empty recording, expected one step or more: record it again.")
    return rec


def _label(sites: Sequence[RecordedSite]) -> list[str]:
    """Return the sites' labels: "x_0", "attention 1", ..., "final norm", with the id where two would be equal."""
    names = [ENDS.get(site.kind) or f"{site.kind} {1 + (site.layer or 0)}" for site in sites]
    return [name if names.count(name) == 1 else f"{name}, {site.id}" for name, site in zip(names, sites, strict=True)]


def _source(site: RecordedSite) -> str:
    """Return the site's name as a source: the start of each stream is x_0."""
    return "x_0" if site.kind == "start" else site.id


def spread(values: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the values, evenly spaced, with the first and the last."""
    if len(values) <= most:
        return [*values]
    return [values[round(k * (len(values) - 1) / (most - 1))] for k in range(most)]


def _series(rec: Recording, sites: Sequence[RecordedSite], step: int, stream: str) -> dict[str, list[float | None]]:
    """Return the values at the sites by role.statistic, None where a site has no value."""
    recorded = {
        f"{role}.{statistic}": {site.id: value for site, value in rec.series(role, statistic, step, stream)}
        for role, statistics in SERIES.items() for statistic in statistics
    }  # fmt: skip
    return {name: [values.get(site.id) for site in sites] for name, values in recorded.items() if values}


def _map(
    sources: Sequence[str], shares: Sequence[Sequence[float]], named: Mapping[str, str], sites: Sequence[RecordedSite]
) -> dict[str, Any] | None:
    """Return each source's share of the stream at each depth. Depths have the names of sublayers if each has one add.

    If there are more than `MAX_CELLS` depths, so many of them are returned, evenly spaced; `places` has their indices. If there
    are more than `MAX_CELLS` sources, neighbouring sources are added up; `starts` has the first of each group.
    """
    if not shares:
        return None
    depths = [named[_source(site)] for site in sites if site.kind != "final"]
    if len(depths) != len(shares):
        depths = ["x_0", *(f"after add {k}" for k in range(1, len(shares)))]
    names = [named.get(source, source) for source in sources]
    places = spread(range(len(shares)), MAX_CELLS)
    ends = [k + 1 for k in spread(range(len(sources)), MAX_CELLS)]
    groups = [*itertools.pairwise([0, *ends])]
    return {
        "sources": [names[a] if b == a + 1 else f"{names[a]} to {names[b - 1]}" for a, b in groups],
        "starts": [a for a, _ in groups], "depths": [depths[place] for place in places], "places": places,
        "shares": [[math.fsum(shares[place][a:b]) for a, b in groups] for place in places],
    }  # fmt: skip


def _balance(rec: Recording, stream: str, named: Mapping[str, str], sites: Sequence[RecordedSite]) -> dict[str, Any]:
    """Return how much each source wrote, how much of it is left at the end, and its share as in the memory map.

    If there is no balance sheet, `refused` states why.
    """
    sheet, last = rec.balances.get(stream), rec.steps[-1]
    if sheet is None:
        return {"refused": "Not recorded: this file has no amounts. Record the model again."}
    if sheet.reason:
        return {"refused": f"The components of the stream do not add up: {sheet.reason}."}
    opening = [(site, value) for site, value in rec.series("out", "l2", last, stream) if site.kind == "start"]
    written = {_source(site): value for site, value in (*opening, *rec.series("write", "l2", last, stream))}
    kinds = {_source(site): site.kind for site in sites} | {BIASES: "norms"}
    sources, shares = rec.memory_maps.get(stream, ([], []))
    parts = dict(zip(sources, shares[-1], strict=True)) if shares else {}
    rows = [
        {
            "source": source, "label": named.get(source, source), "kind": kinds.get(source, "other"),
            "depth": len(sheet.sources) if source == BIASES else k, "written": written.get(source),
            "amount": amount, "part": parts.get(source, math.nan),
        }
        for k, (source, amount) in enumerate(zip(sheet.sources, sheet.amounts, strict=True))
    ]  # fmt: skip
    facts = {name: getattr(sheet, name) for name in ("tokens", "total_tokens", "closure", "error")}
    return {
        "refused": "",
        "step": last,
        "rows": rows,
        **facts,
        "length": sheet.stream_norm,
        "closes": _closes(sheet),
    }


def _over_time(rec: Recording, sites: Sequence[RecordedSite], what: str, depth: int) -> dict[str, Any] | None:
    """Return a statistic over the steps at place `depth`, or at the last site that has it; None if no site has it."""
    role, statistic = what.split(".")
    places = range(len(sites))
    requested = [depth] if depth in places else []
    for place in (*requested, *reversed(places)):
        values, entry = dict(rec.over_time(sites[place], role, statistic)), find_statistic(role, statistic)
        if values and entry is not None:
            steps = spread([*values], MAX_STEPS)
            return {
                "depth": place, "what": what, "meaning": entry.meaning, "steps": steps,
                "values": [values[step] for step in steps], "count": len(values),
            }  # fmt: skip
    return None


def _text(value: Any) -> str:
    """Return an entry of a file's metadata as text."""
    return "" if value is None else str(value)[:MAX_TEXT]


# Proofs, as badges of the page. The state is "proved" where numbers show it, "open" where something does not close or is not
# understood, and "none" where nothing was recorded.

PROVED, OPEN, NONE = "proved", "open", "none"
Badge = tuple[str, str, str]  # a state, a claim and its explanation
NOT_RECORDED: Badge = NONE, "not recorded", "This file does not say. Record the model again."


def _badges(rec: Recording, stream: str) -> list[dict[str, str]]:
    """Return what a recording proves about one stream: name, state, text, and an explanation."""
    known = _as_dict(_as_dict(rec.metadata.get("streams")).get(stream))
    sites = {str(name): _as_dict(site) for name, site in _as_dict(known.get("sites")).items()}
    wrong = [name for name, site in sites.items() if site.get("closes") is not True]
    unknown = rec.metadata.get("unknown")
    badges = {
        "wiring": _wiring(known, not wrong), "equations": _equations(sites, wrong),
        "x_L = x_0 + all writes": _sum(known), "balance": _components(rec.balances.get(stream)),
    }  # fmt: skip
    if isinstance(unknown, list):
        badges["understood"] = _understood(unknown)
    return [dict(zip(("name", "state", "text", "more"), (name, *badge), strict=True)) for name, badge in badges.items()]


def _closes(sheet: Balance) -> bool:
    """Return whether the amounts add up to the stream's norm, with a tolerance from the closure of the components."""
    return sheet.error <= BALANCE_FACTOR * sheet.closure + BALANCE_ROUNDOFF


def _wiring(known: Mapping[str, Any], is_proved: bool) -> Badge:
    if not known:
        return NOT_RECORDED
    norms = {name: _text(known.get(name)) for name in ("norms", "embedding_norm", "final_norm")}
    remarks = known.get("remarks")
    details = "; ".join([
        _text(known.get("equation")).replace("\n", "; "),
        *(f"{name.replace('_', ' ')}: {text}" for name, text in norms.items() if text),
        *(map(_text, remarks) if isinstance(remarks, list) else []),
    ])  # fmt: skip
    name = known.get("wiring")
    if not isinstance(name, str):
        return OPEN, "not a known wiring", details
    return (PROVED, _title(name), details) if is_proved else (OPEN, f"{_title(name)}, not proved", details)


def _equations(sites: Mapping[str, Mapping[str, Any]], wrong: Sequence[str]) -> Badge:
    if not sites:
        return NOT_RECORDED
    error = format_number(largest([_number(site.get("closure")) for site in sites.values()]), 2)
    many = format_count(len(sites), "sublayer")
    if wrong:
        more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        return (
            OPEN,
            f"{len(wrong)} of {many} not closed",
            f"{', '.join(wrong[:NAMED])}{more}: the largest error is {error}",
        )
    how = "Each equation was computed again in float64 from the sublayer's output and compared with the model's stream."
    return PROVED, f"{many} closed, relative error at most {error}", how


def _sum(known: Mapping[str, Any]) -> Badge:
    if not known:
        return NOT_RECORDED
    error, closes = known.get("closure"), known.get("closes") is True
    if error is None:
        text = "The stream passes through norms or factors between the adds, so the writes alone do not add up to it."
        return NONE, "not a plain sum", text
    how = f"By the equations, x_0 and the writes {'add' if closes else 'do not add'} up to the stream."
    return PROVED if closes else OPEN, f"relative error {format_number(_number(error), 2)}", how


def _components(sheet: Balance | None) -> Badge:
    if sheet is None:
        return NOT_RECORDED
    if sheet.reason:
        return OPEN, "does not add up", f"{sheet.reason}."
    if not _closes(sheet):
        how = "The amounts do not add up to the stream's norm: the file was changed after recording."
        return OPEN, f"does not add up, error {format_number(sheet.error, 2)}", how
    how = f"At every depth the components add up to the recorded stream, over {sheet.tokens} tokens of the last step."
    return PROVED, f"adds up, error {format_number(sheet.closure, 2)}", how


def _understood(unknown: list[Any]) -> Badge:
    if not unknown:
        return PROVED, "everything", "Every operation on the model's streams was understood."
    places = [
        f"{_text(part.get('path')) or 'the model'}: {_text(part.get('reason'))}" for part in map(_as_dict, unknown)
    ]
    more = f"; and {len(places) - NAMED} more" if len(places) > NAMED else ""
    return OPEN, f"{format_count(len(places), 'place')} not understood", "; ".join(places[:NAMED]) + more


def _title(name: str) -> str:
    """Return a wiring's name as papers write it."""
    return name[:80].replace("_", "-").replace("-ln", "-LN")


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float:
    """Return a stored relative error, which may be a word such as "Infinity", as a float: NaN if it is no number."""
    with suppress(ValueError):
        return float_of(value)
    return math.nan
