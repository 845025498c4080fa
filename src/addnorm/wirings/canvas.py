"""A grid of wires, boxes and texts, from which drawings of wirings are made. Several streams are one thick wire."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["ADD", "STEP", "Canvas"]

ADD, ARROW = "⊕", "►"
STEP = 2  # columns of wire before a box

# The character of a cell by the directions of its wires: left, right, up, down; capitals for thick ones.
WIRES = {
    "lr": "─", "ud": "│", "rd": "┌", "ld": "┐", "ru": "└", "lu": "┘", "rud": "├", "lud": "┤", "lrd": "┬", "lru": "┴",
    "lrud": "┼", "l": "─", "r": "─", "u": "│", "d": "│",
    "LR": "═", "UD": "║", "RD": "╔", "LD": "╗", "RU": "╚", "LU": "╝", "RUD": "╠", "LUD": "╣", "LRD": "╦", "LRU": "╩",
    "LRUD": "╬", "L": "═", "R": "═", "U": "║", "D": "║",
    "Lud": "╡", "Rud": "╞", "LRd": "╤", "LRu": "╧", "LRud": "╪",
}  # fmt: skip


class Canvas:
    """A grid of wires and texts; wires that meet are joined, and thick where one of them is."""

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

    def draw_wire(self, x: int, end: int, y: int, *, thick: bool = False) -> int:
        """Draw a wire from left to right, both ends included, and return its end."""
        right, left = "RL" if thick else "rl"
        for column in range(x, end + 1):
            self.wires.setdefault((column, y), set()).update(right * (column < end) + left * (column > x))
        return end

    def draw_arrow(self, x: int, y: int, label: str, *, thick: bool = False) -> int:
        """Draw an arrow and the text it points to; return the end of the text."""
        return self.write(self.draw_wire(x, x + STEP, y, thick=thick) + 1, y, f"{ARROW} {label}")

    def draw_vertical_wire(self, x: int, y: int, end: int, *, thick: bool = False) -> None:
        """Draw a wire from top to bottom, both ends included."""
        down, up = "DU" if thick else "du"
        for line in range(y, end + 1):
            self.wires.setdefault((x, line), set()).update(down * (line < end) + up * (line > y))

    def draw_box(self, x: int, y: int, label: str) -> int:
        """Draw a box with its wires at height y; return its right edge."""
        right = x + len(label) + 3
        for position in (y - 1, y + 1):
            self.draw_wire(x, right, position)
        for position in (x, right):
            self.draw_vertical_wire(position, y - 1, y + 1)
        self.write(x + 1, y, f" {label} ")
        return right

    def draw_boxes(self, x: int, y: int, labels: Iterable[str], *, thick: bool = False) -> int:
        """Draw boxes on a wire from x; return the right edge of the last, or x without boxes.

        Args:
            x, y: where the wire begins.
            labels: the texts in the boxes.
            thick: whether the wire before the first box is thick.
        """
        for label in labels:
            begin = self.draw_wire(x, x + STEP + 1, y, thick=thick)
            x, thick = self.draw_box(begin, y, label), False
        return x

    def draw_bypass(
        self, x: int, y: int, labels: Iterable[str], *, height: int = 2, least: int = 0, thick: bool = False,
        thick_end: bool = False,
    ) -> int:  # fmt: skip
        """Draw a branch that leaves a wire at x, passes boxes below it and returns; return where, from `least` on."""
        low = y + height
        self.draw_vertical_wire(x, y, low, thick=thick)
        right = self.draw_boxes(x, low, labels, thick=thick)
        join = self.draw_wire(right, max(right, least) + STEP + 1, low, thick=thick_end)
        self.draw_vertical_wire(join, y, low, thick=thick_end)
        return join

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


def _character(wires: set[str]) -> str:
    """Return the character of a cell; where thick wires meet thin ones, each pair of opposite sides has one thickness."""
    thick = {side for side in wires if side.isupper()}
    names = thick | {side for side in wires if side.upper() not in thick}
    return WIRES["".join(sorted(names, key="LlRrUuDd".index))]
