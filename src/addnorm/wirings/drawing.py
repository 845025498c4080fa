"""A wiring as a drawing in text, made from its rows and stages: the stream from left to right, the branch below it.

x ──┬────────────────⊕──► x'
    │  ┌───┐  ┌───┐  │
    └──┤ N ├──┤ f ├──┘
       └───┘  └───┘
"""

from __future__ import annotations

from dataclasses import replace

from addnorm.wirings.canvas import ADD, STEP, Canvas
from addnorm.wirings.equation import End, Part, WiringData, end_of, find_parts
from addnorm.wirings.row import FactorText, RowText
from addnorm.wirings.stage_drawing import draw_head, draw_stage

__all__ = ["WIDTH", "draw"]

WIDTH = 78
AND_SO_ON = " ··· "


def draw(wiring: WiringData) -> str:
    """Return a wiring as a drawing in text."""
    drawings = [(part.label, _part(part)) for part in find_parts(wiring)]
    (first, canvas), *following = drawings
    texts = [
        (first, [*[_begin()] * wiring.embedding_norm, canvas]),
        *((label, [canvas]) for label, canvas in following),
    ]
    end = _end(end_of(wiring), drawings[-1][1])
    if end is not None:
        texts[-1][1].append(end)
    return "\n\n".join(f"{label}:\n\n{_beside(pieces)}" if label else _beside(pieces) for label, pieces in texts)


def _beside(pieces: list[Canvas]) -> str:
    """Return the drawings side by side, or one below the other if that is too wide."""
    joined = Canvas()
    for piece in pieces:
        if joined.texts:
            end = joined.width
            for y in piece.streams:
                joined.write(end, y, AND_SO_ON)
        joined.add(piece, joined.width if joined.texts else 0)
    return str(joined) if joined.width <= WIDTH else "\n\n".join(map(str, pieces))


def _begin() -> Canvas:
    """Draw the norm of the embedding."""
    canvas = Canvas()
    canvas.draw_arrow(canvas.draw_boxes(canvas.write(0, 0, "x ") - 1, 0, ["N"]), 0, "x_0")
    return canvas


def _end(end: End, last: Canvas) -> Canvas | None:
    """Draw the output, if it is not the stream itself."""
    if not end.equation:
        return None
    if end.head is not None and end.equation != "y = N(x_L)":
        return draw_head(end, last)
    canvas = Canvas()
    canvas.draw_arrow(canvas.draw_boxes(canvas.write(0, 0, "x_L ") - 1, 0, ["N"]), 0, "y")
    return canvas


def _part(part: Part) -> Canvas:
    if part.rows:
        return _row(part.rows[0]) if len(part.rows) == 1 else _parallel(part.rows)
    assert part.stage is not None
    return draw_stage(part.stage)


def _row(line: RowText) -> Canvas:
    canvas = Canvas()
    x = canvas.write(0, 0, "x ")
    if line.row.a == 0.0:
        right = canvas.draw_boxes(x - 1, 0, [*_branch(line), *_norm_out(line)])
    else:
        right = canvas.draw_boxes(_sublayer(canvas, x + STEP, line), 0, _norm_out(line))
        canvas.draw_wire(x, x + STEP, 0)
    canvas.draw_arrow(right, 0, "x'")
    return canvas


def _sublayer(canvas: Canvas, fork: int, line: RowText) -> int:
    """Draw the stream from a fork to the add with the branch below; return the position of the add."""
    scaled = _factor(line.a)
    low = 3 if scaled else 2
    canvas.draw_vertical_wire(fork, 0, low)
    right = canvas.draw_boxes(fork, low, _branch(line))
    width = sum(len(label) + 4 for label in scaled) + STEP * max(0, len(scaled) - 1)
    join = max(right, fork + width + STEP) + STEP + 1
    canvas.draw_wire(right, join, low)
    canvas.draw_vertical_wire(join, 0, low)
    x = fork
    if scaled:
        x = canvas.draw_boxes(fork + (join - fork - width) // 2 - STEP, 0, scaled)
        canvas.draw_wire(fork, x - width + 1, 0)
    canvas.draw_wire(x, join, 0)
    canvas.write(join, 0, ADD)
    return join


def _branch(line: RowText, f: str = "f") -> list[str]:
    norms = (["N"] * has_norm for has_norm in (line.row.norm_in, line.row.norm_branch))
    return [*next(norms), *_factor(line.c), f, *next(norms), *_factor(line.b)]


def _norm_out(line: RowText) -> list[str]:
    return ["N"] * line.row.norm_out


def _factor(factor: FactorText) -> list[str]:
    if factor.boxes:
        return list(factor.boxes)
    return [f"{'⊙' if factor.is_vector else '×'}{factor.text}"] if factor.text else []


def _parallel(lines: tuple[RowText, ...]) -> Canvas:
    several = sum(line.row.norm_in for line in lines) > 1
    canvas = Canvas()
    x = canvas.write(0, 0, "x ")
    fork = canvas.draw_wire(x, x + STEP, 0)
    ends, shared = [], (fork, 0)  # the input of the sublayer before
    for k, line in enumerate(lines):
        y = 2 + 3 * k
        is_shared = line.row.shares == "read"
        start, height = shared if is_shared else (fork, 0)
        canvas.draw_vertical_wire(start, height, y)
        labels = _branch(line._replace(row=replace(line.row, norm_in=False)), f"f_{k + 1}")
        if line.row.norm_in:
            start = canvas.draw_boxes(start, y, [f"N_{k + 1}" if several else "N"])
        follows = k + 1 < len(lines) and lines[k + 1].row.shares == "read"
        if follows and not is_shared:
            if line.c.text:
                start = canvas.draw_boxes(start, y, [labels.pop(0)])
            start = canvas.draw_wire(start, start + STEP, y) if start != fork else start
            shared = start, y
        ends.append((canvas.draw_boxes(start, y, labels), y))
    join = max(right for right, _ in ends) + STEP + 1
    for right, y in ends:
        canvas.draw_wire(right, join, y)
    canvas.draw_vertical_wire(join, 0, ends[-1][1])
    canvas.draw_wire(fork, join, 0)
    canvas.write(join, 0, ADD)
    canvas.draw_arrow(join, 0, "x'")
    return canvas
