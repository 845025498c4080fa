"""A grid of wires, boxes and texts, from which drawings of wirings are made. Several streams are one thick wire."""

from __future__ import annotations

from collections.abc import Iterable

ADD, ARROW = "⊕", "►"
STEP = 3  # columns from the end of a wire to the next box, fork or sum

# The character of a cell by the directions of its wires: left, right, up, down. Capitals: thick wires that meet thin ones.
WIRES = {
    "lr": "─", "ud": "│", "rd": "┌", "ld": "┐", "ru": "└", "lu": "┘", "rud": "├", "lud": "┤", "lrd": "┬", "lru": "┴",
    "lrud": "┼", "l": "─", "r": "─", "u": "│", "d": "│", "Lud": "╡", "Rud": "╞", "LRd": "╤", "LRu": "╧", "LRud": "╪",
}  # fmt: skip
THICK = str.maketrans("─│┌┐└┘├┤┬┴┼", "═║╔╗╚╝╠╣╦╩╬")  # where all wires are thick


class Canvas:
    """Grid of wires and texts. Wires that meet are joined. Where two overlap, the wire is thick if one of them is."""

    def __init__(self) -> None:
        self.wires: dict[tuple[int, int], set[str]] = {}
        self.texts: dict[tuple[int, int], str] = {}
        self.streams: tuple[int, ...] = (0,)  # the rows of the wires that lead to the next sublayer

    @property
    def width(self) -> int:
        """The width of the drawing so far."""
        return 1 + max((x for x, _ in (*self.wires, *self.texts)), default=-1)

    def write(self, x: int, y: int, text: str) -> None:
        """Write a text over existing cells."""
        self.texts |= {(x + k, y): character for k, character in enumerate(text)}

    def begin(self, name: str, y: int = 0, *, thick: bool = False) -> Wire:
        """Write a name and return the wire that begins behind it."""
        self.write(0, y, f"{name} ")
        return Wire(self, len(name), y, thick=thick)

    def draw_line(self, x: int, y: int, end_x: int, end_y: int, *, thick: bool = False) -> None:
        """Draw a line to the right or down, both ends included."""
        ahead, back = (side.upper() if thick else side for side in ("rl" if y == end_y else "du"))
        cells = [(column, row) for column in range(x, end_x + 1) for row in range(y, end_y + 1)]
        for k, cell in enumerate(cells, 1):
            self.wires.setdefault(cell, set()).update(ahead * (k < len(cells)) + back * (k > 1))

    def add(self, other: Canvas, x: int) -> None:
        """Add another drawing at x, with its stream at the same height."""
        self.wires |= {(x + position, y): set(wires) for (position, y), wires in other.wires.items()}
        self.texts |= {(x + position, y): text for (position, y), text in other.texts.items()}

    def __str__(self) -> str:
        cells = {at: _character(wires) for at, wires in self.wires.items()} | self.texts
        rows = [y for _, y in cells]
        lines = (
            "".join(cells.get((x, y), " ") for x in range(self.width)).rstrip() for y in range(min(rows), max(rows) + 1)
        )
        return "\n".join(lines)


class Wire:
    """The end of a wire, which is drawn from left to right.

    Args:
        canvas: the drawing.
        x, y: where the wire begins.
        thick: whether the wire stands for several streams.
    """

    def __init__(self, canvas: Canvas, x: int, y: int, *, thick: bool = False) -> None:
        self.canvas, self.x, self.y, self.thick = canvas, x, y, thick

    def extend(self, x: int) -> None:
        """Draw the wire up to column x."""
        self.canvas.draw_line(self.x, self.y, x, self.y, thick=self.thick)
        self.x = max(x, self.x)

    def draw_boxes(self, labels: Iterable[str]) -> None:
        """Draw boxes with these labels on the wire. The wire is thin behind the first box."""
        for label in labels:
            self.extend(self.x + STEP)
            left, right = self.x, self.x + len(label) + 3
            for y in (self.y - 1, self.y + 1):
                self.canvas.draw_line(left, y, right, y)
            for x in (left, right):
                self.canvas.draw_line(x, self.y - 1, x, self.y + 1)
            self.canvas.write(left + 1, self.y, f" {label} ")
            self.x, self.thick = right, False

    def fork(self, y: int) -> Wire:
        """Return a wire that begins at the end of this one, at another height."""
        self.canvas.draw_line(self.x, min(self.y, y), self.x, max(self.y, y), thick=self.thick)
        return Wire(self.canvas, self.x, y, thick=self.thick)

    def join(self, *others: Wire, sign: bool = True) -> None:
        """Draw a vertical line from this wire to `others`, to which it is added. With `sign` each sum has a plus."""
        wires = (self, *others)
        x, rows = max(wire.x for wire in wires) + STEP, [wire.y for wire in wires]
        for wire in wires:
            wire.extend(x)
        self.canvas.draw_line(x, min(rows), x, max(rows), thick=self.thick)
        for wire in others:
            self.canvas.write(x, wire.y, ADD * sign)

    def end(self, label: str) -> None:
        """Draw an arrow and the text it points to."""
        self.extend(self.x + STEP - 1)
        self.canvas.write(self.x + 1, self.y, f"{ARROW} {label}")


def _character(wires: set[str]) -> str:
    """Return the character of a cell. Where thick wires meet thin ones, two opposite sides have the same thickness."""
    thick = {side for side in wires if side.isupper()}
    sides = "".join(sorted(thick | {side for side in wires if side.upper() not in thick}, key="LlRrUuDd".index))
    return WIRES[sides.lower()].translate(THICK) if sides.isupper() else WIRES[sides]
