"""A wiring as a drawing in text, made from its stages: the streams from left to right, the branch below or between them.

x ──┬────────────────⊕──► x'          X ══╦══╡ A ╞═════════════════════════════⊕══► X'
    │  ┌───┐  ┌───┐  │                    ║  └───┘                             ║
    └──┤ N ├──┤ f ├──┘                    ║  ┌───┐  ┌───┐  ┌───┐  ┌───┐        ║
       └───┘  └───┘                       ╚══╡ c ├──┤ N ├──┤ f ├──┤ b ╞════════╝
                                             └───┘  └───┘  └───┘  └───┘
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from addnorm.wirings.canvas import STEP, Canvas, Wire
from addnorm.wirings.equation import End, Part, end_of, find_parts
from addnorm.wirings.matrices import find_place
from addnorm.wirings.stage_form import names_of
from addnorm.wirings.stage_text import GAP, ONE, FactorText, StageText, format_entries, join_terms

WIDTH = 78
AND_SO_ON = " ··· "
NEWEST = "newest"
HEIGHT = 3  # lines from a wire to the one below it, if there are boxes between them
SUMS = {"Σ_i X_i": "Σ", "Σ_i X_i / n": "mean"}


def draw(wiring: Any) -> str:
    """Return a wiring as a drawing in text."""
    drawings = [(part.label, [_draw_part(part)]) for part in find_parts(wiring)]
    last = drawings[-1][1]
    last += _draw_end(end_of(wiring), last[0])
    if wiring.embedding_norm:
        drawings[0][1].insert(0, _draw_boxes("x", ["N"], "x_0"))
    return "\n\n".join(f"{label}:\n\n{_beside(pieces)}" if label else _beside(pieces) for label, pieces in drawings)


def _beside(pieces: list[Canvas]) -> str:
    """Return the drawings side by side, or one below the other if that is too wide."""
    joined = Canvas()
    for piece in pieces:
        end = joined.width
        for y in piece.streams if end else ():
            joined.write(end, y, AND_SO_ON)
        joined.add(piece, joined.width)
    return str(joined) if joined.width <= WIDTH else "\n\n".join(map(str, pieces))


def _draw_part(part: Part) -> Canvas:
    text = part.texts[0]
    if len(part.texts) > 1:
        return _draw_parallel(part.texts)
    if text.is_single:
        return _draw_single(text)
    if _is_simple(text):
        return _draw_two_wires(text)
    if _is_injection(text):
        return _draw_injection(text)
    return _draw_counted(text) if text.is_counted else _draw_thick_wire(text)


def _draw_end(end: End, last: Canvas) -> list[Canvas]:
    """Draw the output beside the last stage, unless it is the stream itself."""
    if not end.equation:
        return []
    head, norm = end.head, ["N"] * end.equation.startswith("y = N(")
    if head is None or end.equation == "y = N(x_L)":
        return [_draw_boxes("x_L", norm, "y")]
    names, terms = names_of(head.stage), head.read() if _has_names(head) else []
    if len(last.streams) == len(terms) == head.stage.n == 2:
        return [_draw_sum_of_two(head, norm, last.streams[1])]
    if join_terms(terms) == names[0]:
        return [_draw_boxes(names[0] + "_L" * (head.stage.n == 1), norm, "y")]
    return [_draw_boxes(_bundle(head, "_L"), [*_read_labels(head), *norm], "y", thick=True)]


def _draw_boxes(name: str, labels: list[str], result: str, *, thick: bool = False) -> Canvas:
    """Draw boxes between a name and what they return."""
    canvas = Canvas()
    wire = canvas.begin(name, thick=thick)
    wire.draw_boxes(labels)
    wire.end(result)
    return canvas


def _scale(factor: FactorText | None) -> list[str]:
    """Return the texts of the boxes that draw a factor; none for a factor of 1."""
    if factor is None or not (factor.boxes or factor.text):
        return []
    return [*factor.boxes] or [f"{'⊙' if factor.is_vector else '×'}{factor.text}"]


def _norms(text: StageText) -> list[str]:
    """Return the boxes of the sublayer with its norms."""
    return [*["N"] * text.stage.norm_in, *_scale(text.factors.get("c")), "f", *["N"] * text.stage.norm_branch]


# One stream.


def _draw_single(text: StageText) -> Canvas:
    canvas, (stream,) = Canvas(), text.streams
    wire, labels = canvas.begin(text.names[0]), [*_norms(text), *_scale(stream.factor)]
    if stream.kept:
        scaled = _scale(stream.kept[0].factor)
        wire.extend(wire.x + STEP)
        branch = wire.fork(HEIGHT if scaled else 2)
        branch.draw_boxes(labels)
        if scaled:  # in the middle above the branch
            width = sum(len(label) + STEP + 3 for label in scaled)
            branch.extend(max(branch.x, wire.x + width))
            wire.extend(wire.x + (branch.x - wire.x - width + 1) // 2)
        wire.draw_boxes(scaled)
        branch.join(wire)
    else:
        wire.draw_boxes(labels)
    wire.draw_boxes(["N"] * stream.norm)
    wire.end(stream.name)
    return canvas


def _draw_parallel(texts: Sequence[StageText]) -> Canvas:
    several = sum(text.stage.norm_in for text in texts) > 1
    canvas = Canvas()
    wire = canvas.begin("x")
    wire.extend(wire.x + STEP)
    shared, branches = wire, []
    for k, text in enumerate(texts, 1):
        is_shared = text.stage.shares == "read"
        branch = (shared if is_shared else wire).fork(HEIGHT * k - 1)
        branch.draw_boxes([f"N_{k}" if several else "N"] * text.stage.norm_in + _scale(text.factors.get("c")))
        if k < len(texts) and texts[k].stage.shares == "read" and not is_shared:
            branch.extend(branch.x + (STEP - 1) * (branch.x > wire.x))
            shared = branch.fork(branch.y)
        branch.draw_boxes([f"f_{k}", *["N"] * text.stage.norm_branch, *_scale(text.factors.get("inject_0"))])
        branches.append(branch)
    branch.extend(max(branch.x for branch in branches))
    branch.join(wire)
    for other in branches:
        other.extend(branch.x)
    wire.end("x'")
    return canvas


# One thick wire.


def _bundle(text: StageText, end: str = "") -> str:
    """Return the name of all streams together."""
    if text.is_counted:
        return f"{text.base}_0..{text.base}_n"
    return f"X{end}" if _is_unnamed(text) else f"({', '.join(text.names)})"


def _is_unnamed(text: StageText) -> bool:
    """Return whether the streams have no names of their own."""
    return text.is_matrix or (text.stage.n > 2 and not text.stage.names)


def _bundle_after(text: StageText) -> str:
    if text.is_counted:
        return f"{text.base}_0..{text.names_after[0]}"
    if _is_unnamed(text):
        return "X'"
    labels = _labels_after(text)
    return f"({', '.join(labels)})" if len(labels) > 1 else labels[0]


def _labels_after(text: StageText) -> list[str]:
    """Return the names of the streams after the sublayer, with a prime only where they changed."""
    return [stream.plain if stream.becomes("w") == stream.plain else stream.name for stream in text.streams]


def _read_labels(text: StageText) -> list[str]:
    """Return the boxes from all streams to the sum that is read."""
    terms = text.read()
    read, factor = join_terms(terms), terms[0].factor
    if text.read_notation is None and not text.is_counted:
        return [SUMS.get(read, read)]
    norms = ["N"] * any(text.stage.norm_streams)
    is_newest = text.read_notation is None and not factor.is_sum
    return [*norms, *([NEWEST, *_scale(factor)] if is_newest else [factor.text])]


def _draw_thick_wire(text: StageText) -> Canvas:
    stage, canvas, streams = text.stage, Canvas(), text.streams
    stays_thick = stage.n_out > 1
    wire = canvas.begin(_bundle(text), thick=stage.n > 1)
    wire.extend(wire.x + STEP)
    is_mixed = stage.n_out != stage.n or not all(stream.is_same for stream in streams)
    branch = wire.fork(HEIGHT if is_mixed else 2)
    branch.draw_boxes([*_read_labels(text), *_norms(text), text.notation.inject if stage.inject is None else "b"])
    wire.draw_boxes([text.notation.mix if "mix" in stage.computes else "A"] * is_mixed)
    wire.thick = branch.thick = stays_thick
    branch.join(wire)
    normed = [stream.plain for stream, flag in zip(streams, stage.norms_out, strict=False) if flag]
    label = "N" if all(stage.norms_out) else f"N of {', '.join(normed)}"
    wire.draw_boxes([label] * any(stage.norms_out))
    wire.thick = stays_thick
    wire.end(_bundle_after(text))
    given = [] if stage.mix is None or not is_mixed else [f"A = {_format(text, 'mix', stage.mix)}"]
    given += [] if stage.inject is None else [f"b = {_format(text, 'inject', (stage.inject,))}"]
    canvas.write(2, branch.y + 3, GAP.join(given))
    return canvas


def _format(text: StageText, matrix: str, rows: Sequence[Sequence[Any]]) -> str:
    """Return a matrix, or a vector that is its only row."""
    if text.is_matrix:
        return format_entries(rows if matrix == "mix" else rows[0])
    factors = [[text.factors.get(find_place(matrix, k, j)) for j in range(len(row))] for k, row in enumerate(rows)]
    texts = [f"({', '.join('0' if factor is None else factor.text or '1' for factor in some)})" for some in factors]
    return f"({', '.join(texts)})" if matrix == "mix" else texts[0]


# States that are counted: a wire that joins the thick one is a new state.


def _draw_counted(text: StageText) -> Canvas:
    stage, canvas, (stream,) = text.stage, Canvas(), text.streams
    wire = canvas.begin(_bundle(text), thick=True)
    wire.extend(wire.x + STEP)
    branch, appends = wire.fork(2), stage.n_out > stage.n
    labels = [*_read_labels(text), *_norms(text)]
    adds = appends and stream.kept
    if adds and stage.reads == 1 and not any(stage.norm_streams) and join_terms(stream.kept) == join_terms(text.read()):
        branch.draw_boxes(labels[:1])
        branch.extend(branch.x + STEP)
        inner = branch.fork(branch.y + HEIGHT)
        inner.draw_boxes(labels[1:])
        inner.join(branch)
    else:
        branch.draw_boxes([*labels, *_scale(stream.factor)])
        if adds:
            factor = stream.kept[0].factor
            other = wire.fork(branch.y + HEIGHT)
            other.draw_boxes([factor.text if factor.is_sum else NEWEST])
            other.join(branch)
    branch.draw_boxes(["N"] * stream.norm)
    branch.join(wire, sign=not appends)
    wire.end(_bundle_after(text))
    return canvas


# Two wires.


def _has_names(text: StageText) -> bool:
    return not text.is_matrix and not text.is_counted and text.read_notation is None


def _is_simple(text: StageText) -> bool:
    """Return whether two wires show the stage: no stream is mixed into another one that goes on beside it."""
    stage, streams, names = text.stage, text.streams, text.names
    if not _has_names(text) or stage.coefficients is not None or max(stage.n, stage.n_out) != 2 or stage.reads > 1:
        return False
    terms, kept = text.read(), [join_terms(stream.kept) for stream in streams]
    if len(terms) == 2 and (terms[0].factor != ONE or stage.norm_streams[0]):
        return False  # of two streams that are read, the first has no room for boxes
    scales = [_scale(stream.factor) for stream in streams if stream.factor is not None]
    if len(scales) == 2 and scales[0] != scales[1] and all(scales):
        return False  # on the way of a write to one stream there is no room for the factor of the other
    if stage.n == stage.n_out:
        return kept == [*names] == [stream.plain for stream in streams]
    if stage.n == 1:  # a copy of the stream goes on
        return kept == [names[0]] * 2 and streams[1].factor is None and not streams[1].norm
    return kept == [f"{names[0]} + {names[1]}"] and terms[-1].stream == 0


def _draw_two_wires(text: StageText) -> Canvas:
    """Draw the first stream above, the second below, and the branch between them."""
    stage, canvas, streams = text.stage, Canvas(), text.streams
    own = {term.stream: ["N"] * stage.norm_streams[term.stream] + _scale(term.factor) for term in text.read()}
    high = HEIGHT if own.get(0) and 1 in own else 2
    low = high + (HEIGHT if own.get(1) and 0 not in own else 2)
    wires = [canvas.begin(name, y) for name, y in zip(text.names, (0, low), strict=False)]
    fork = max(wire.x for wire in wires) + STEP
    for wire in wires:
        wire.extend(fork)
    if stage.n == 1:  # the copy begins at the fork
        wires.append(wires[0].fork(low))
    branch = wires[max(own)].fork(high)
    branch.draw_boxes(own[max(own)])
    if len(own) == 2:
        wires[0].join(branch)
    branch.draw_boxes(_norms(text))
    _draw_writes(text, branch, wires)
    if stage.n_out == 1:  # the second stream ends in the first
        wires[1].join(wires[0])
        wires = wires[:1]
    canvas.streams = (0, low)[: stage.n_out]
    for wire, stream in zip(wires, streams, strict=True):
        wire.draw_boxes(["N"] * stream.norm)
    _end_together(wires, _labels_after(text))
    return canvas


def _draw_writes(text: StageText, branch: Wire, wires: list[Wire]) -> None:
    """Join the branch to the streams that are written; a stream without a factor comes first."""
    targets: dict[tuple[str, ...], list[Wire]] = {}
    for wire, stream in zip(wires, text.streams, strict=False):
        if stream.factor is not None:
            targets.setdefault(tuple(_scale(stream.factor)), []).append(wire)
    for labels in sorted(targets, key=len):
        branch.draw_boxes(labels)
        branch.join(*targets[labels])
    for wire in wires:
        wire.extend(branch.x)


def _end_together(wires: Sequence[Wire], labels: Sequence[str]) -> None:
    """Draw arrows that end in the same column."""
    end = max(wire.x for wire in wires)
    for wire, label in zip(wires, labels, strict=True):
        wire.extend(end)
        wire.end(label)


def _is_injection(text: StageText) -> bool:
    """Return whether the second of two streams is mixed into the first, which is then read and written."""
    stage = text.stage
    if not _has_names(text) or stage.coefficients is not None or not stage.n == stage.n_out == 2 or stage.reads > 1:
        return False
    first, second = text.streams
    is_read = len(first.kept) == 2 and join_terms(first.kept) == join_terms(text.read())
    return is_read and second.is_sum and second.factor is None


def _draw_injection(text: StageText) -> Canvas:
    """Draw the first stream above, with the second one added before the branch."""
    canvas, (stream, _) = Canvas(), text.streams
    low = 2 * HEIGHT + 1
    upper, lower = (canvas.begin(name, y) for name, y in zip(text.names, (0, low), strict=True))
    lower.extend(max(upper.x, lower.x) + STEP)
    upper.extend(lower.x - 1)
    added = lower.fork(HEIGHT + 1)
    for wire, term in zip((upper, added), stream.kept, strict=True):
        wire.draw_boxes(_scale(term.factor))
    added.join(upper)
    upper.extend(upper.x + STEP)
    branch = upper.fork(2)
    branch.draw_boxes([*_norms(text), *_scale(stream.factor)])
    branch.join(upper)
    upper.draw_boxes(["N"] * stream.norm)
    _end_together((upper, lower), _labels_after(text))
    canvas.streams = (0, low)
    return canvas


def _draw_sum_of_two(head: StageText, norm: list[str], low: int) -> Canvas:
    """Draw the sum of two streams, each with its norm and factor, and the norm of the sum."""
    canvas = Canvas()
    canvas.streams = (0, low)
    upper, lower = (canvas.begin(name, y) for name, y in zip(head.names, canvas.streams, strict=True))
    for wire, term, is_normed in zip((upper, lower), head.read(), head.stage.norm_streams, strict=True):
        wire.draw_boxes(["N"] * is_normed + _scale(term.factor))
    lower.join(upper)
    upper.draw_boxes(norm)
    upper.end("y")
    return canvas
