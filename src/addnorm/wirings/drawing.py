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
from addnorm.wirings.equation import End, Part, find_end, find_parts
from addnorm.wirings.matrices import find_place
from addnorm.wirings.stage_text import GAP, FactorText, Product, StageText, format_entries, join_terms

WIDTH = 78
AND_SO_ON = " ··· "
NEWEST = "newest"
HEIGHT = 3  # lines from a wire to the one below it, if there are boxes between them
SUMS = {"Σ_i X_i": "Σ", "Σ_i X_i / n": "mean"}


def draw(wiring: Any) -> str:
    """Return a wiring as a drawing in text."""
    drawings = [(part.label, [_draw_part(part)]) for part in find_parts(wiring)]
    last = drawings[-1][1]
    last += _draw_end(find_end(wiring), last[0])
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
    stage = text.stage
    if len(part.texts) > 1:
        return _draw_parallel(part.texts)
    if text.is_single:
        return _draw_wires(text) if text.streams[0].kept else _draw_ablation(text)
    if text.is_counted:
        return _draw_counted(text)
    if _has_names(text) and stage.coefficients is None and max(stage.n, stage.n_out) == 2 and stage.reads == 1:
        if _fits_two_wires(text):
            return _draw_wires(text)
        if _is_injection(text):
            return _draw_injection(text)
    return _draw_thick_wire(text)


def _draw_end(end: End, last: Canvas) -> list[Canvas]:
    """Draw the output beside the last stage, unless it is the stream itself."""
    if not end.equation:
        return []
    head, norm = end.head, ["N"] * end.has_norm
    if head is None or end.equation == "y = N(x_L)":  # the norm may be that of the read
        return [_draw_boxes("x_L", ["N"], "y")]
    names, terms = head.names, head.read() if _has_names(head) else []
    if len(last.streams) == len(terms) == head.stage.n == 2:
        return [_draw_sum_of_two(head, norm, last.streams[1])]
    if join_terms(terms) == names[0]:
        return [_draw_boxes(names[0] + "_L" * (head.stage.n == 1), norm, "y")]
    return [_draw_boxes(_bundle(head, head.names, "_L"), [*_read_labels(head), *norm], "y", thick=True)]


def _draw_boxes(name: str, labels: list[str], result: str, *, thick: bool = False) -> Canvas:
    """Return a drawing of one wire: the name of its input, the boxes on it, and the name of its result."""
    canvas = Canvas()
    wire = canvas.begin(name, thick=thick)
    wire.draw_boxes(labels)
    wire.end(result)
    return canvas


def _draw_sum_of_two(head: StageText, norm: list[str], low: int) -> Canvas:
    """Draw the sum of two streams, each with its norm and factor, and the norm of the sum."""
    canvas = Canvas()
    canvas.streams = (0, low)
    upper, lower = (canvas.begin(name, y) for name, y in zip(head.names, canvas.streams, strict=True))
    for wire, labels in zip((upper, lower), _read_boxes(head).values(), strict=True):
        wire.draw_boxes(labels)
    lower.join(upper)
    upper.draw_boxes(norm)
    upper.end("y")
    return canvas


def _scale(factor: FactorText | None) -> list[str]:
    """Return the texts of the boxes that draw a factor; an empty list for a factor of 1."""
    if factor is None or not (factor.boxes or factor.text):
        return []
    return [*factor.boxes] or [f"{'⊙' if factor.is_vector else '×'}{factor.text}"]


def _norms(text: StageText) -> list[str]:
    """Return the texts of the boxes of the sublayer, with its norms and the factor c of its input."""
    return [*["N"] * text.stage.norm_in, *_scale(text.factors.get("c")), "f", *["N"] * text.stage.norm_branch]


def _labels_after(text: StageText) -> list[str]:
    """Return the names of the streams after the sublayer. A name has a prime if the stream has changed."""
    return [stream.plain if stream.becomes("w") == stream.plain else stream.name for stream in text.streams]


# One stream, or two.


def _draw_ablation(text: StageText) -> Canvas:
    """Draw a sublayer without a residual connection."""
    (stream,) = text.streams
    return _draw_boxes("x", [*_norms(text), *_scale(stream.factor), *["N"] * stream.norm], stream.name)


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


def _has_names(text: StageText) -> bool:
    return not text.is_matrix and not text.is_counted and text.read_notation is None


def _read_boxes(text: StageText) -> dict[int, list[str]]:
    """Return the texts of the boxes between each stream that is read and the branch, by the stream's number."""
    flags = text.stage.norm_streams
    return {term.stream: ["N"] * flags[term.stream] + _scale(term.factor) for term in text.read()}


def _fits_two_wires(text: StageText) -> bool:
    """Return whether two wires can show the stage: no stream is mixed into another stream that continues beside it."""
    names, read = text.names, [*_read_boxes(text).values()]
    if len(read) == 2 and read[0]:
        return False  # of two streams that are read, the first has no room for boxes
    scales = [_scale(stream.factor) for stream in text.streams if stream.factor is not None]
    if len(scales) == 2 and scales[0] != scales[1] and all(scales):
        return False  # on the way of a write to one stream there is no room for the factor of the other
    kept = [names[0], names[-1]] if text.stage.n_out == 2 else [" + ".join(names)]
    return [join_terms(stream.kept) for stream in text.streams] == kept


def _draw_wires(text: StageText) -> Canvas:
    """Draw the first stream above, the second one below, and the branch below the first."""
    stage, canvas, read = text.stage, Canvas(), _read_boxes(text)
    kept = _scale(text.streams[0].kept[0].factor) if text.is_single else []
    high = HEIGHT if kept else 2
    low = high + (HEIGHT if read.get(1) and 0 not in read else 2)
    wires = [canvas.begin(name, y) for name, y in zip(text.names, (0, low), strict=False)]
    fork = max(wire.x for wire in wires) + STEP
    for wire in wires:
        wire.extend(fork)
    if stage.n < stage.n_out:  # the copy begins at the fork
        wires.append(wires[0].fork(low))
    branch = wires[max(read)].fork(high)
    branch.draw_boxes(read[max(read)])
    if len(read) == 2:
        wires[0].join(branch)
    wires[0].draw_boxes(kept)
    return _draw_branch(text, branch, wires)


def _draw_branch(text: StageText, branch: Wire, wires: list[Wire]) -> Canvas:
    """Draw the sublayer, join it to the streams that it writes (those without a factor first), and end all wires."""
    branch.draw_boxes(_norms(text))
    targets: dict[tuple[str, ...], list[Wire]] = {}
    for wire, stream in zip(wires, text.streams, strict=False):
        if stream.factor is not None:
            targets.setdefault(tuple(_scale(stream.factor)), []).append(wire)
    for labels in sorted(targets, key=len):
        branch.draw_boxes(labels)
        branch.join(*targets[labels])
    for wire in wires:
        wire.extend(branch.x)
    if text.stage.n_out < text.stage.n:  # the second stream ends in the first
        wires.pop().join(wires[0])
    for wire, stream in zip(wires, text.streams, strict=True):
        wire.draw_boxes(["N"] * stream.norm)
    end = max(wire.x for wire in wires)
    for wire, label in zip(wires, _labels_after(text), strict=True):
        wire.extend(end)
        wire.end(label)
    branch.canvas.streams = tuple(wire.y for wire in wires)
    return branch.canvas


def _is_injection(text: StageText) -> bool:
    """Return whether the second of two streams is mixed into the first, which is then read and written."""
    if text.stage.n_out != text.stage.n:
        return False
    first, second = text.streams
    is_read = len(first.kept) == 2 and join_terms(first.kept) == join_terms(text.read())
    return is_read and second.is_sum and second.factor is None


def _draw_injection(text: StageText) -> Canvas:
    """Draw the first stream above, with the second one added before the branch."""
    canvas = Canvas()
    upper, lower = (canvas.begin(name, y) for name, y in zip(text.names, (0, 2 * HEIGHT + 1), strict=True))
    lower.extend(max(upper.x, lower.x) + STEP)
    upper.extend(lower.x - 1)
    added = lower.fork(HEIGHT + 1)
    for wire, term in zip((upper, added), text.streams[0].kept, strict=True):
        wire.draw_boxes(_scale(term.factor))
    added.join(upper)
    upper.extend(upper.x + STEP)
    return _draw_branch(text, upper.fork(2), [upper, lower])


# One thick wire.


def _bundle(text: StageText, names: Sequence[str], end: str = "") -> str:
    """Return one name for all streams together: "X", "(u, v)" or "x_0..x_n"."""
    if text.is_counted:
        return f"{text.base}_0..{names[0]}"
    if text.is_matrix or (text.stage.n > 2 and not text.stage.names):  # without names of their own
        return f"X{end}"
    return f"({', '.join(names)})" if len(names) > 1 else names[0]


def _read_labels(text: StageText) -> list[str]:
    """Return the labels of the boxes that compute the sublayer's input from all streams."""
    terms, norms = text.read(), ["N"] * any(text.stage.norm_streams)
    if text.is_counted:
        return norms + _state_labels(terms)
    if text.read_notation is not None:
        return [*norms, terms[0].factor.text]
    total = join_terms(terms)
    return [SUMS.get(total, total)]


def _state_labels(terms: Sequence[Product]) -> list[str]:
    """Return the labels of the boxes that select the newest numbered state, or sum all of them."""
    factor = terms[0].factor
    return [factor.text] if factor.is_sum else [NEWEST, *_scale(factor)]


def _draw_thick_wire(text: StageText) -> Canvas:
    stage, canvas, streams = text.stage, Canvas(), text.streams
    stays_thick = stage.n_out > 1
    wire = canvas.begin(_bundle(text, text.names), thick=stage.n > 1)
    wire.extend(wire.x + STEP)
    is_mixed = stage.n_out != stage.n or not all(stream.is_same for stream in streams)
    branch = wire.fork(HEIGHT if is_mixed else 2)
    branch.draw_boxes([*_read_labels(text), *_norms(text), text.notation.inject if stage.inject is None else "b"])
    wire.draw_boxes([text.notation.mix if "mix" in stage.computes else "A"] * is_mixed)
    wire.thick = branch.thick = stays_thick
    branch.join(wire)
    normed = [stream.plain for stream in streams if stream.norm]
    label = "N" if len(normed) == len(streams) else f"N of {', '.join(normed)}"
    wire.draw_boxes([label] * bool(normed))
    wire.thick = stays_thick
    wire.end(_bundle(text, _labels_after(text), "'"))
    given = [] if stage.mix is None or not is_mixed else [f"A = {_format(text, 'mix', stage.mix)}"]
    given += [] if stage.inject is None else [f"b = {_format(text, 'inject', (stage.inject,))}"]
    canvas.write(2, branch.y + 3, GAP.join(given))
    return canvas


def _format(text: StageText, matrix: str, rows: Sequence[Sequence[Any]]) -> str:
    """Return the text of the matrix A ("mix"), or of the vector b ("inject"), which is the only row."""
    if text.is_matrix:
        return format_entries(rows if matrix == "mix" else rows[0])
    factors = [[text.factors.get(find_place(matrix, k, j)) for j in range(len(row))] for k, row in enumerate(rows)]
    texts = [f"({', '.join('0' if factor is None else factor.text or '1' for factor in some)})" for some in factors]
    return f"({', '.join(texts)})" if matrix == "mix" else texts[0]


# States that are counted: a wire that joins the thick one is a new state.


def _draw_counted(text: StageText) -> Canvas:
    canvas, (stream,), appends = Canvas(), text.streams, text.stage.n_out > text.stage.n
    wire = canvas.begin(_bundle(text, text.names), thick=True)
    wire.extend(wire.x + STEP)
    branch = wire.fork(2)
    branch.draw_boxes([*_read_labels(text), *_norms(text), *_scale(stream.factor)])
    if appends and stream.kept:
        other = wire.fork(branch.y + HEIGHT)
        other.draw_boxes(_state_labels(stream.kept))
        other.join(branch)
    branch.draw_boxes(["N"] * stream.norm)
    branch.join(wire, sign=not appends)
    wire.end(_bundle(text, _labels_after(text)))
    return canvas
