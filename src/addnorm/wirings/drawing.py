"""A wiring as a drawing in text, made from its rows: the stream from left to right, the branch below it.

x ──┬────────────────⊕──► x'
    │  ┌───┐  ┌───┐  │
    └──┤ N ├──┤ f ├──┘
       └───┘  └───┘
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from addnorm.wirings.equation import WiringRows, group_layers, shown_depth
from addnorm.wirings.row import FactorText, RowText

__all__ = ["WIDTH", "draw"]

WIDTH = 78
ADD, ARROW, AND_SO_ON = "⊕", "►", " ··· "
STEP = 2  # columns of wire before a box

# The character of a cell by the directions of its wires: left, right, up, down.
WIRES = {
    "lr": "─", "ud": "│", "rd": "┌", "ld": "┐", "ru": "└", "lu": "┘", "rud": "├", "lud": "┤", "lrd": "┬", "lru": "┴",
    "lrud": "┼", "l": "─", "r": "─", "u": "│", "d": "│",
}  # fmt: skip


class Canvas:
    """A grid of wires and texts; wires that meet are joined."""

    def __init__(self) -> None:
        self.wires: dict[tuple[int, int], set[str]] = {}
        self.texts: dict[tuple[int, int], str] = {}
        self.streams: tuple[int, ...] = (0,)  # the rows of the wires that lead to the next sublayer

    @property
    def width(self) -> int:
        """The width of the drawing so far."""
        return 1 + max(x for x, _ in (*self.wires, *self.texts))

    def write(self, x: int, y: int, text: str) -> int:
        """Write a text over existing cells and return its end."""
        self.texts |= {(x + k, y): character for k, character in enumerate(text)}
        return x + len(text)

    def draw_wire(self, x: int, end: int, y: int) -> int:
        """Draw a wire from left to right, both ends included, and return its end."""
        for column in range(x, end + 1):
            self.wires.setdefault((column, y), set()).update("r" * (column < end) + "l" * (column > x))
        return end

    def draw_arrow(self, x: int, y: int, label: str) -> int:
        """Draw an arrow and the text it points to; return the end of the text."""
        return self.write(self.draw_wire(x, x + STEP, y) + 1, y, f"{ARROW} {label}")

    def draw_vertical_wire(self, x: int, y: int, end: int) -> None:
        """Draw a wire from top to bottom, both ends included."""
        for line in range(y, end + 1):
            self.wires.setdefault((x, line), set()).update("d" * (line < end) + "u" * (line > y))

    def draw_box(self, x: int, y: int, label: str) -> int:
        """Draw a box with its wires at height y; return its right edge."""
        right = x + len(label) + 3
        for position in (y - 1, y + 1):
            self.draw_wire(x, right, position)
        for position in (x, right):
            self.draw_vertical_wire(position, y - 1, y + 1)
        self.write(x + 1, y, f" {label} ")
        return right

    def draw_boxes(self, x: int, y: int, labels: Iterable[str]) -> int:
        """Draw boxes on a wire from x; return the right edge of the last, or x without boxes."""
        for label in labels:
            begin = self.draw_wire(x, x + STEP + 1, y)
            x = self.draw_box(begin, y, label)
        return x

    def add(self, other: Canvas, x: int) -> None:
        """Add another drawing at x, with its stream at the same height."""
        self.wires |= {(x + position, y): set(wires) for (position, y), wires in other.wires.items()}
        self.texts |= {(x + position, y): text for (position, y), text in other.texts.items()}

    def __str__(self) -> str:
        cells = {at: WIRES["".join(sorted(wires, key="lrud".index))] for at, wires in self.wires.items()} | self.texts
        rows = [y for _, y in cells]
        lines = (
            "".join(cells.get((x, y), " ") for x in range(self.width)).rstrip() for y in range(min(rows), max(rows) + 1)
        )
        return "\n".join(lines)


def draw(wiring: WiringRows) -> str:
    """Return a wiring as a drawing in text."""
    drawings = [
        (label, FLOWS[wiring.flow](rows))
        for group in group_layers(wiring)
        for label, rows in group.by_sublayer(wiring.flow)
    ]
    (first, canvas), *following = drawings
    texts = [
        (first, [*[_begin()] * wiring.embedding_norm, canvas]),
        *((label, [canvas]) for label, canvas in following),
    ]
    if wiring.ends_in_norm(shown_depth(wiring)):
        texts[-1][1].append(END.get(wiring.flow, _end)(drawings[-1][1]))
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


def _end(_: Canvas) -> Canvas:
    """Draw the final norm."""
    canvas = Canvas()
    canvas.draw_arrow(canvas.draw_boxes(canvas.write(0, 0, "x_L ") - 1, 0, ["N"]), 0, "y")
    return canvas


def _end_of_two(layer: Canvas) -> Canvas:
    """Draw the sum of the first stream and the norm of the second."""
    canvas = Canvas()
    low = layer.streams[1]
    canvas.streams = layer.streams
    right = canvas.draw_boxes(canvas.write(0, low, "v ") - 1, low, ["N"])
    join = canvas.draw_wire(right, right + 1 + STEP, low)
    canvas.draw_wire(canvas.write(0, 0, "u "), join, 0)
    canvas.draw_vertical_wire(join, 0, low)
    canvas.write(join, 0, ADD)
    canvas.draw_arrow(join, 0, "y")
    return canvas


def _row(lines: tuple[RowText, ...]) -> Canvas:
    line = lines[0]
    canvas = Canvas()
    x = canvas.write(0, 0, "x ")
    if line.row.a == 0.0:
        right = canvas.draw_boxes(x - 1, 0, [*_branch(line), *_norm_out(line)])
    else:
        right = canvas.draw_boxes(_sublayer(canvas, x + STEP, line)[0], 0, _norm_out(line))
        canvas.draw_wire(x, x + STEP, 0)
    canvas.draw_arrow(right, 0, "x'")
    return canvas


def _sublayer(canvas: Canvas, fork: int, line: RowText, f: str = "f") -> tuple[int, int]:
    """Draw the stream from a fork to the add with the branch below; return the positions of the add and of the branch."""
    scaled = _factor(line.a)
    low = 3 if scaled else 2
    canvas.draw_vertical_wire(fork, 0, low)
    right = canvas.draw_boxes(fork, low, _branch(line, f))
    width = sum(len(label) + 4 for label in scaled)
    join = max(right, fork + width + STEP) + STEP + 1
    canvas.draw_wire(right, join, low)
    canvas.draw_vertical_wire(join, 0, low)
    x = fork
    if scaled:
        x = canvas.draw_boxes(fork + (join - fork - width) // 2 - STEP, 0, scaled)
        canvas.draw_wire(fork, x - width + 1, 0)
    canvas.draw_wire(x, join, 0)
    canvas.write(join, 0, ADD)
    return join, low


def _branch(line: RowText, f: str = "f") -> list[str]:
    norms = (["N"] * has_norm for has_norm in (line.row.norm_in, line.row.norm_branch))
    return [*next(norms), *_factor(line.c), f, *next(norms), *_factor(line.b)]


def _norm_out(line: RowText) -> list[str]:
    return ["N"] * line.row.norm_out


def _factor(factor: FactorText) -> list[str]:
    return [f"{'⊙' if factor.is_vector else '×'}{factor.text}"] if factor.text else []


def _parallel(lines: tuple[RowText, ...]) -> Canvas:
    several = sum(line.row.norm_in for line in lines) > 1
    canvas = Canvas()
    x = canvas.write(0, 0, "x ")
    fork = canvas.draw_wire(x, x + STEP, 0)
    ends, shared = [], (fork, 0)  # the first read, which the others may share
    for k, line in enumerate(lines):
        y = 2 + 3 * k
        start, height = (fork, 0) if line.row.norm_in else shared
        canvas.draw_vertical_wire(start, height, y)
        if line.row.norm_in:
            start = canvas.draw_boxes(start, y, [f"N_{k + 1}" if several else "N"])
        if k == 0 and not several:
            start = canvas.draw_wire(start, start + STEP, y)
            shared = start, y
        labels = _branch(line._replace(row=replace(line.row, norm_in=False)), f"f_{k + 1}")
        ends.append((canvas.draw_boxes(start, y, labels), y))
    join = max(right for right, _ in ends) + STEP + 1
    for right, y in ends:
        canvas.draw_wire(right, join, y)
    canvas.draw_vertical_wire(join, 0, ends[-1][1])
    canvas.draw_wire(fork, join, 0)
    canvas.write(join, 0, ADD)
    canvas.draw_arrow(canvas.draw_boxes(join, 0, _norm_out(lines[0])), 0, "x'")
    return canvas


def _two_streams(lines: tuple[RowText, ...]) -> Canvas:
    line = lines[0]
    canvas = Canvas()
    x = canvas.write(0, 0, "u ")
    fork = canvas.draw_wire(x, x + STEP, 0)
    join, low = _sublayer(canvas, fork, line)
    second = low + 2
    canvas.write(0, second, "v ")
    canvas.draw_wire(x, join, second)
    canvas.draw_vertical_wire(join, low, second)
    canvas.write(join, second, ADD)
    right = canvas.draw_boxes(join, 0, _norm_out(line))
    canvas.draw_wire(join, right, second)
    canvas.draw_arrow(right, 0, "u'")
    canvas.draw_arrow(right, second, "v'")
    canvas.streams = (0, second)
    return canvas


def _bottom_to_top(lines: tuple[RowText, ...]) -> Canvas:
    first, last = lines[0], lines[-1]
    canvas = Canvas()
    x = canvas.write(0, 0, "x ")
    fork = canvas.draw_wire(x, x + STEP, 0)
    join, low = _sublayer(canvas, fork, first, "f_1")
    right = canvas.draw_arrow(canvas.draw_boxes(join, 0, _norm_out(first)), 0, "h ")
    again = canvas.draw_wire(right, right + STEP, 0)
    join, _ = _sublayer(canvas, again, last, "f_2")
    last_join = canvas.draw_wire(join, join + STEP + 1, 0)
    canvas.draw_vertical_wire(fork, low, low + 2)
    canvas.draw_wire(fork, last_join, low + 2)
    canvas.draw_vertical_wire(last_join, 0, low + 2)
    canvas.write(last_join, 0, ADD)
    canvas.draw_arrow(canvas.draw_boxes(last_join, 0, _norm_out(last)), 0, "x'")
    return canvas


FLOWS = {"rows": _row, "parallel": _parallel, "two_streams": _two_streams, "bottom_to_top": _bottom_to_top}
END = {"two_streams": _end_of_two}
