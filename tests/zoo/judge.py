"""Verdict on an inspection, by the answer that was read in the model's code."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import addnorm
from addnorm.stream.find import inspection
from addnorm.stream.find.inspection import Inspection
from support.inspection_checks import rows_match
from zoo.answer import KINDS, Model, Stream

RIGHT, PARTLY, REFUSED, WRONG = "right", "partly", "refused", "wrong"
UNNAMED = "every row is right, but it has no name"


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison.

    Args:
        word: "right"; "partly": nothing false is stated as proven, but a part is missing, or a sublayer's kind is another one;
            "refused": no wiring is named and the inspection says that something is not understood; "wrong".
        detail: the differences, or the reasons that the inspection gives.
    """

    word: str
    detail: str = ""


def judge(result: Inspection, model: Model) -> Verdict:
    """Compare an inspection with the answer of a model."""
    silent = result.closes and not result.unknown  # it claims to be complete and proven
    named = [stream for stream in result.streams if stream.wiring is not None]
    parts = (*result.unknown, *result.outside)
    reasons = "; ".join(dict.fromkeys(str(getattr(item, "reason", item)) for item in parts))
    if model.refuse:
        if named:
            return Verdict(WRONG, f"named {result.wiring}, though {model.refuse}")
        if silent:
            return Verdict(WRONG, f"closes with nothing in unknown, though {model.refuse}")
        return Verdict(RIGHT, reasons)
    differences = min(
        (_compare(result, streams) for streams in (model.streams, model.also) if streams),
        key=lambda d: (len(d[0]), len(d[1])),
    )
    false, kinds = differences
    if not false:
        if result.unknown or not result.closes:
            return Verdict(PARTLY, f"everything is right, but not closed: {reasons}")
        return Verdict(PARTLY, "; ".join(kinds)) if kinds else Verdict(RIGHT)
    if all(text.startswith(UNNAMED) for text in false):
        return Verdict(PARTLY, "; ".join([*false, *kinds]))
    if silent and not result.outside:
        return Verdict(WRONG, "; ".join(false))
    wrong_names = [s for s in named if not any(_names_fit(s, e) for e in (*model.streams, *model.also))]
    if wrong_names:
        return Verdict(WRONG, "; ".join(false))
    if named:
        return Verdict(PARTLY, "; ".join(false) + (f"; it says: {reasons}" if reasons else ""))
    return Verdict(REFUSED, reasons or "no stream is found, without a reason")


def _names_fit(stream: inspection.Stream, expected: Stream) -> bool:
    return stream.wiring is not None and stream.wiring.name in expected.names


def _compare(result: Inspection, expected: tuple[Stream, ...]) -> tuple[list[str], list[str]]:
    """Return what is false and which kinds of sublayers differ, for the order of streams that fits best."""
    if len(result.streams) != len(expected):
        names = [stream.wiring.name if stream.wiring else "no name" for stream in result.streams]
        count = f"{len(names)} streams ({', '.join(names)}), expected {len(expected)}"
        return [count, *(f"not met: {e.wiring} {e.letters}" for e in expected)], []
    orders = permutations(expected) if len(expected) < 5 else [expected]
    return min((_compare_all(result.streams, order) for order in orders), key=lambda d: (len(d[0]), len(d[1])))


def _compare_all(streams: tuple[inspection.Stream, ...], expected: tuple[Stream, ...]) -> tuple[list[str], list[str]]:
    false: list[str] = []
    kinds: list[str] = []
    for stream, reference in zip(streams, expected, strict=True):
        more, other = _compare_stream(stream, reference)
        false += more
        kinds += other
    return false, kinds


def _rows_fit(sites: list[inspection.Site], reference: Stream) -> bool:
    """Return whether rows are those of the first expected name; False for a wiring with constants of its own."""
    try:
        wiring = addnorm.wirings.get(str(reference.names[0]))
    except TypeError:
        return False
    row = wiring.row(0, 0, 2)
    return len({str(site.row) for site in sites}) == 1 and all(rows_match(site.row, row) for site in sites)


def _compare_stream(stream: inspection.Stream, reference: Stream) -> tuple[list[str], list[str]]:
    sites = [site for site in stream.sites if site.role != "skip"]
    name = stream.wiring.name if stream.wiring else None
    false: list[str] = []
    if len(sites) != len(reference.letters):
        text = f"{len(sites)} sublayers, expected {len(reference.letters)}"
        return [text if name in reference.names else f"{name or 'no name'}, expected {reference.wiring}; {text}"], []
    if name is None and None not in reference.names and _rows_fit(sites, reference):
        false.append(f"{UNNAMED}, expected {reference.wiring}")
    elif name not in reference.names:
        false.append(f"{name or 'no name'}, expected {reference.wiring}")
    if reference.norm is not None and stream.norm not in reference.norm.split("|"):
        false.append(f"norm {stream.norm}, expected {reference.norm}")
    for fact in ("final_norm", "embedding_norm"):
        wanted = getattr(reference, fact)
        if wanted is not None and (getattr(stream, fact) is not None) != wanted:
            false.append(
                f"{'a' if wanted is False else 'no'} {fact.replace('_', ' ')}, expected {'none' if wanted is False else 'one'}"
            )
    if name is None or not reference.wiring:
        for k, (site, row) in enumerate(zip(sites, reference.expected_rows(), strict=False)):
            if not rows_match(site.row, row):
                false.append(f"sublayer {k}: {site.row}, expected {row}")
                break
    kinds = [
        f"sublayer {k} is called {site.kind}, expected {KINDS[letter]}"
        for k, (site, letter) in enumerate(zip(sites, reference.letters, strict=True))
        if letter != "?" and site.kind != KINDS[letter]
    ]
    return false, kinds[:1]
