"""What a recording proves of a stream, as badges: the wiring, the equations, the sum, the components; each in words.

A badge is {"name", "state", "text", "more"}: `state` is "proved" where numbers show it, "open" where something does not close
or is not understood, and "none" where nothing was recorded of it. A file may have been written by anybody, or by an older
version: what is not there is said not to be, and nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import Balance

__all__ = ["badges", "closes"]

Badge = dict[str, str]
PROVED, OPEN, NONE = "proved", "open", "none"
ROOM, ROUNDING = (
    10.0,
    1e-9,
)  # what the amounts may differ by, from the closure of the whole tensor: tokens differ in length
SHOWN = 3  # sublayers that are named
AGAIN = "This file does not say: record the model again."


def badges(rec: Recording, stream: str) -> list[Badge]:
    """The badges of one stream."""
    known = _object(_object(rec.metadata.get("streams")).get(stream))
    unknown = rec.metadata.get("unknown")
    return [
        _wiring(known, rec),
        _equations(known, rec),
        _sum(known),
        _components(rec, stream),
        *([_understood(unknown)] if isinstance(unknown, list) else []),
    ]


def closes(sheet: Balance) -> bool:
    """Whether the amounts make the length of the stream, as nearly as its components make the stream."""
    return sheet.error <= ROOM * sheet.closure + ROUNDING


def _wiring(known: Mapping[str, Any], rec: Recording) -> Badge:
    if not known:
        name = rec.metadata.get("wiring")
        return _badge("wiring", NONE, _titled(name) if isinstance(name, str) else "not recorded", AGAIN)
    equation = _text(known.get("equation")).replace("\n", "; ")
    said = [equation, *(f"{title}: {words}" for title, words in (
        ("norms", _text(known.get("norms"))), ("embedding norm", _text(known.get("embedding_norm"))),
        ("final norm", _text(known.get("final_norm"))),
    ) if words)]  # fmt: skip
    remarks = known.get("remarks")
    said += [_text(remark) for remark in remarks] if isinstance(remarks, list) else []
    name = known.get("wiring")
    if not isinstance(name, str):
        return _badge("wiring", OPEN, "none of the known wirings", "; ".join(said))
    return _badge("wiring", PROVED, _titled(name), "; ".join(said))


def _equations(known: Mapping[str, Any], rec: Recording) -> Badge:
    sites = {str(name): _object(site) for name, site in _object(known.get("sites")).items()}
    if not sites:
        error = rec.metadata.get("closure")
        text = f"largest relative error {error:.1e}" if isinstance(error, float) else "not recorded"
        return _badge("equations", NONE, text, AGAIN)
    wrong = [name for name, site in sites.items() if site.get("closes") is not True]
    errors = [_number(site.get("closure")) for site in sites.values()]
    largest = math.nan if any(map(math.isnan, errors)) else max(errors)
    many = f"{len(sites)} sublayer{'s' * (len(sites) > 1)}"
    if wrong:
        names = f"{', '.join(wrong[:SHOWN])}{f' and {len(wrong) - SHOWN} more' if len(wrong) > SHOWN else ''}"
        return _badge(
            "equations", OPEN, f"{len(wrong)} of {many} do not close", f"{names}: the largest error is {largest:.1e}"
        )
    text = (
        "Each one was computed again in float64 from what the sublayer returned, and compared with what the model has."
    )
    return _badge("equations", PROVED, f"{many} closed, error at most {largest:.1e}", text)


def _sum(known: Mapping[str, Any]) -> Badge:
    name = "x_L = x_0 + all writes"
    if not known:
        return _badge(name, NONE, "not recorded", AGAIN)
    error = known.get("closure")
    if error is None:
        text = "Something besides the adds stands on this stream, such as a norm: each write is carried through what follows it."
        return _badge(name, NONE, "no plain sum", text)
    number = _number(error)
    closes = known.get("closes") is True
    more = "The writes, added to the opening, make the stream." if closes else "The writes do not make the stream."
    return _badge(name, PROVED if closes else OPEN, f"relative error {number:.1e}", more)


def _components(rec: Recording, stream: str) -> Badge:
    sheet = rec.balances.get(stream)
    if sheet is None:
        return _badge("balance", NONE, "not recorded", AGAIN)
    if sheet.reason:
        return _badge("balance", OPEN, "does not add up", f"{sheet.reason}.")
    if not closes(sheet):
        more = "The amounts do not make the length of the stream: they are not what the recorder wrote."
        return _badge("balance", OPEN, f"does not add up, error {sheet.error:.1e}", more)
    more = f"At every depth the components make the recorded stream, over {sheet.tokens} tokens of the last step."
    return _badge("balance", PROVED, f"adds up, error {sheet.closure:.1e}", more)


def _understood(unknown: list[Any]) -> Badge:
    if not unknown:
        return _badge("understood", PROVED, "all of it", "Nothing of the model's streams was left over.")
    said = [f"{_text(one.get('path')) or 'the model'}: {_text(one.get('reason'))}" for one in map(_object, unknown)]
    more = f"; and {len(said) - SHOWN} more" if len(said) > SHOWN else ""
    return _badge(
        "understood", OPEN, f"{len(said)} place{'s' * (len(said) > 1)} not understood", "; ".join(said[:SHOWN]) + more
    )


def _badge(name: str, state: str, text: str, more: str) -> Badge:
    return {"name": name, "state": state, "text": text, "more": more}


def _titled(name: str) -> str:
    """A wiring's name as the papers write it."""
    return name[:80].replace("_", "-").replace("-ln", "-LN")


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value[:400] if isinstance(value, str) else ""


def _number(value: Any) -> float:
    """A closure; that which is infinite is a word in a file."""
    if value == "Infinity":
        return math.inf
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
