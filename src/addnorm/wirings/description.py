"""A wiring in words, made from its rows: what a sublayer reads and adds, what becomes of the stream, how factors start."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from addnorm.wirings.equation import FACTORS, ONE_A_LAYER, Line, Part, Shown, by_sublayer, number, parts, shown_depth

if TYPE_CHECKING:  # wiring.py stands on this file
    from addnorm.wirings.spec import Learned, Wiring

__all__ = ["describe"]

SHALLOW, DEEP = 12, 100  # layers of the examples

READS = {False: "the stream", True: "the norm of the stream"}
WRITES = {False: "what it returns", True: "the norm of what it returns"}
Pieces = list[tuple[str, tuple[Line, ...]]]
SUM = "a plain sum: x_0 and every write"


def describe(wiring: Wiring) -> str:
    """What `Wiring.describe` does."""
    found = parts(wiring)
    return " ".join([*FLOWS[wiring.flow](wiring, found), *_factors(wiring, found)])


def _rows(wiring: Wiring, found: list[Part]) -> list[str]:
    pieces = [piece for part in found for piece in by_sublayer(wiring, part)]
    return [*(_sublayer(label, lines[0]) for label, lines in pieces), *_is_sum(pieces), *_ends(wiring)]


def _sublayer(label: str, line: Line) -> str:
    row = line.row
    subject = f"In {label} each sublayer" if label else "Each sublayer"
    read, write = f"{READS[row.norm_in]}{_times(line.c)}", _write(line)
    if row.a == 0.0:
        fate = "is normalized and takes" if row.norm_out else "takes"
        return f"{subject} reads {read}; {write} {fate} the place of the stream: there is no residual connection."
    stream = f"{line.a.text} times the stream" if line.a.text else "the stream"
    fate = ", and the sum is normalized" if row.norm_out else ", which is passed on as it is" if row.is_sum else ""
    return f"{subject} reads {read}; {write} is added to {stream}{fate}."


def _write(line: Line) -> str:
    times = _times(line.b)
    return WRITES[line.row.norm_branch] + f"{times}," * bool(times)


def _times(factor: Shown) -> str:
    return f", times {factor.text}" if factor.text else ""


def _is_sum(pieces: Pieces) -> list[str]:
    """Whether the stream is a plain sum of writes."""
    rows = [line.row for _, lines in pieces for line in lines]
    plain = [label for label, lines in pieces if all(line.row.is_sum for line in lines)]
    if len(plain) == len(pieces):
        return [f"So the stream is {SUM}."]
    if plain:
        return [f"The stream is a plain sum of writes in {' and '.join(plain)} alone."]
    if all(row.a == 0.0 for row in rows):
        return []
    by = "norm" if any(row.norm_out for row in rows) else "factor"
    return [f"So the stream is no plain sum of writes: each {by} rescales all that came before it."]


def _ends(wiring: Wiring) -> list[str]:
    """The norms that no sublayer has."""
    depth = shown_depth(wiring)
    rows = wiring.rows(depth)
    embedding = ["The embedding is normalized before the first sublayer."] * wiring.embedding_norm
    if wiring.ends_in_norm(depth):
        return [*embedding, "A final norm follows the last sublayer."]
    if rows[-1].norm_out:
        return [*embedding, "There is no final norm: the last sublayer ends in one."]
    normless = not any(row.norm_in or row.norm_branch or row.norm_out for row in rows)
    return [*embedding, "There is no other norm." if embedding else "There is no norm."] if normless else embedding


def _parallel(wiring: Wiring, found: list[Part]) -> list[str]:
    lines = found[0].lines
    norms = sum(line.row.norm_in for line in lines)
    read = "the stream" if not norms else "the same norm of the stream" if norms == 1 else "its own norm of the stream"
    return [
        f"The sublayers of a layer stand side by side: each reads {read}, and none reads what another of its layer writes.",
        f"{_write(lines[0]).capitalize().replace('it returns', 'they return')} is added to the stream.",
        *_is_sum([("", lines)]),
        *_ends(wiring),
    ]


def _two_streams(wiring: Wiring, found: list[Part]) -> list[str]:
    line = found[0].lines[0]
    second = "u is normalized after every add; v never is, and" if line.row.norm_out else "v"
    read = READS[line.row.norm_in].replace("the stream", "u")
    return [
        f"Two streams, u and v, begin as x_0: each sublayer reads {read}; {_write(line)} is added to both.",
        f"{second} stays {SUM}.",
        f"The output is the sum of u and {READS[wiring.ends_in_norm(shown_depth(wiring))].replace('the stream', 'v')}.",
    ]


def _bottom_to_top(wiring: Wiring, found: list[Part]) -> list[str]:
    first, last = found[0].lines[0], found[0].lines[-1]
    return [
        _sublayer("", first),
        "What entered the layer is added once more before the layer's last norm, the only one on that way."
        if last.row.norm_out
        else "What entered the layer is added once more at its end.",
        "So the stream is no plain sum of writes.",
        *_ends(wiring),
    ]


FLOWS = {"rows": _rows, "parallel": _parallel, "two_streams": _two_streams, "bottom_to_top": _bottom_to_top}


def _factors(wiring: Wiring, found: list[Part]) -> list[str]:
    """A sentence for each letter: where its value comes from."""
    sentences = {}
    for name in FACTORS:
        for part in found:
            for line in part.lines:
                factor, shown = getattr(line.row, name), getattr(line, name)
                if not isinstance(factor, float):
                    sentences[shown.text] = _learned(name, factor, shown)
                elif shown.text and shown.text != number(factor):
                    at = [_at(wiring, name, depth) for depth in (SHALLOW, DEEP)]
                    is_ = f"{shown.where}:" if shown.where else f"{shown.text} is"
                    sentences[shown.text] = f"{is_} {at[0]} in {SHALLOW} layers, {at[1]} in {DEEP}."
    return [*sentences.values()]


def _learned(name: str, factor: Learned, shown: Shown) -> str:
    kind = "vector" if factor.per_feature else "number"
    every = "for all the sublayers of a layer" if factor.shared else "for each sublayer"
    start = shown.where.removeprefix(f"{shown.text} ").removesuffix(ONE_A_LAYER)
    start = start.replace("as measured", "as one forward pass on data measures it")
    nothing = ", so that nothing is added before training" * (name == "b" and start == "starts at 0")
    return f"{shown.text} is learned, a {kind} {every}, and {start}{nothing}."


def _at(wiring: Wiring, name: str, depth: int) -> str:
    """The numbers of a factor at a depth."""
    texts = (getattr(line, name).text for part in parts(wiring, depth) for line in part.lines)
    text = next((text.strip("()") for text in texts if text), "1")
    return re.sub(r"^(\S+) (?:\.\.\.|to) ", r"from \1 to ", text)
