"""A wiring in words, made from its rows: what a sublayer reads and adds, what happens to the stream, how factors start."""

from __future__ import annotations

import re

from addnorm.wirings.equation import LayerGroup, WiringRows, group_layers, shown_depth
from addnorm.wirings.row import FACTORS, PER_LAYER, FactorText, Learned, RowText, format_factor

__all__ = ["describe"]

SHALLOW, DEEP = 12, 100  # layers of the examples

READS = {False: "the stream", True: "the norm of the stream"}
WRITES = {False: "what it returns", True: "the norm of what it returns"}
Pieces = list[tuple[str, tuple[RowText, ...]]]
SUM = "a plain sum: x_0 and every write"


def describe(wiring: WiringRows) -> str:
    """Return a wiring in words."""
    groups = group_layers(wiring)
    return " ".join([*FLOWS[wiring.flow](wiring, groups), *_factors(wiring, groups)])


def _rows(wiring: WiringRows, groups: list[LayerGroup]) -> list[str]:
    pieces = [piece for group in groups for piece in group.by_sublayer(wiring.flow)]
    return [*(_sublayer(label, lines[0]) for label, lines in pieces), *_is_sum(pieces), *_ends(wiring)]


def _sublayer(label: str, line: RowText) -> str:
    row = line.row
    subject = f"In {label} each sublayer" if label else "Each sublayer"
    read, write = f"{READS[row.norm_in]}{_times(line.c)}", _write(line)
    if row.a == 0.0:
        fate = "is normalized and takes" if row.norm_out else "takes"
        return f"{subject} reads {read}; {write} {fate} the place of the stream: there is no residual connection."
    stream = f"{line.a.text} times the stream" if line.a.text else "the stream"
    fate = ", and the sum is normalized" if row.norm_out else ", which is passed on as it is" if row.is_sum else ""
    return f"{subject} reads {read}; {write} is added to {stream}{fate}."


def _write(line: RowText) -> str:
    times = _times(line.b)
    return WRITES[line.row.norm_branch] + f"{times}," * bool(times)


def _times(factor: FactorText) -> str:
    return f", times {factor.text}" if factor.text else ""


def _is_sum(pieces: Pieces) -> list[str]:
    """State whether the stream is a plain sum of writes."""
    rows = [line.row for _, lines in pieces for line in lines]
    plain = [label for label, lines in pieces if all(line.row.is_sum for line in lines)]
    if len(plain) == len(pieces):
        return [f"So the stream is {SUM}."]
    if plain:
        return [f"The stream is a plain sum of writes in {' and '.join(plain)} alone."]
    if all(row.a == 0.0 for row in rows):
        return []
    cause = "norm" if any(row.norm_out for row in rows) else "factor"
    return [f"So the stream is no plain sum of writes: each {cause} rescales all that came before it."]


def _ends(wiring: WiringRows) -> list[str]:
    """Describe the norms before the first and after the last sublayer."""
    depth = shown_depth(wiring)
    rows = wiring.rows(depth)
    embedding = ["The embedding is normalized before the first sublayer."] * wiring.embedding_norm
    if wiring.ends_in_norm(depth):
        return [*embedding, "A final norm follows the last sublayer."]
    if rows[-1].norm_out:
        return [*embedding, "There is no final norm: the last sublayer ends in one."]
    normless = not any(row.norm_in or row.norm_branch or row.norm_out for row in rows)
    return [*embedding, "There is no other norm." if embedding else "There is no norm."] if normless else embedding


def _parallel(wiring: WiringRows, groups: list[LayerGroup]) -> list[str]:
    lines = groups[0].rows
    norms = sum(line.row.norm_in for line in lines)
    read = "the stream" if not norms else "the same norm of the stream" if norms == 1 else "its own norm of the stream"
    return [
        f"The sublayers of a layer run in parallel: each reads {read}, and none reads what another of its layer writes.",
        f"{_write(lines[0]).capitalize().replace('it returns', 'they return')} is added to the stream.",
        *_is_sum([("", lines)]),
        *_ends(wiring),
    ]


def _two_streams(wiring: WiringRows, groups: list[LayerGroup]) -> list[str]:
    line = groups[0].rows[0]
    second = "u is normalized after every add; v never is, and" if line.row.norm_out else "v"
    read = READS[line.row.norm_in].replace("the stream", "u")
    return [
        f"Two streams, u and v, begin as x_0: each sublayer reads {read}; {_write(line)} is added to both.",
        f"{second} stays {SUM}.",
        f"The output is the sum of u and {READS[wiring.ends_in_norm(shown_depth(wiring))].replace('the stream', 'v')}.",
    ]


def _bottom_to_top(wiring: WiringRows, groups: list[LayerGroup]) -> list[str]:
    first, last = groups[0].rows[0], groups[0].rows[-1]
    return [
        _sublayer("", first),
        "What entered the layer is added once more before the layer's last norm, the only one on that path."
        if last.row.norm_out
        else "What entered the layer is added once more at its end.",
        "So the stream is no plain sum of writes.",
        *_ends(wiring),
    ]


FLOWS = {"rows": _rows, "parallel": _parallel, "two_streams": _two_streams, "bottom_to_top": _bottom_to_top}


def _factors(wiring: WiringRows, groups: list[LayerGroup]) -> list[str]:
    """Return one sentence for each letter that states its value."""
    sentences = {}
    for name in FACTORS:
        for group in groups:
            for row in group.rows:
                factor, text = getattr(row.row, name), getattr(row, name)
                if isinstance(factor, Learned):
                    sentences[text.text] = _learned(name, factor, text)
                elif text.text and text.text != format_factor(factor):
                    examples = [_format_at_depth(wiring, name, depth) for depth in (SHALLOW, DEEP)]
                    definition = f"{text.definition}:" if text.definition else f"{text.text} is"
                    sentences[text.text] = f"{definition} {examples[0]} in {SHALLOW} layers, {examples[1]} in {DEEP}."
    return [*sentences.values()]


def _learned(name: str, factor: Learned, text: FactorText) -> str:
    kind = "vector" if factor.per_feature else "number"
    scope = "for all the sublayers of a layer" if factor.shared else "for each sublayer"
    start = text.definition.removeprefix(f"{text.text} ").removesuffix(PER_LAYER)
    start = start.replace("as measured", "as one forward pass on data measures it")
    effect = ", so that nothing is added before training" * (name == "b" and start == "starts at 0")
    return f"{text.text} is learned, a {kind} {scope}, and {start}{effect}."


def _format_at_depth(wiring: WiringRows, name: str, depth: int) -> str:
    """Return the numbers of a factor in a stack of `depth` layers."""
    texts = (getattr(row, name).text for group in group_layers(wiring, depth) for row in group.rows)
    text = next((text.strip("()") for text in texts if text), "1")
    return re.sub(r"^(\S+) (?:\.\.\.|to) ", r"from \1 to ", text)
