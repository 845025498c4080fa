"""A wiring in symbols, made from its rows and nothing else.

    x' = N(α x + f(x)),   α = (2L)^(1/4)

N is a norm, f the sublayer, L the number of layers, l a layer's number from 1, S the number of sublayers. A factor of 1 is not
written. What is the same in every layer is written once; where the rows change their form with depth, each form has its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # wiring.py stands on this file
    from addnorm.wirings.spec import Factor, Row, Wiring

__all__ = ["Line", "Part", "Shown", "equation", "equation_of", "in_lines", "number", "one_line", "parts"]

FACTORS = ("a", "b", "c")
ONE_A_LAYER = ", one a layer"
DEPTHS = (12, 24, 48, 96, 192)  # looked at where the number of layers is left open
GAP = ",   "


class Shown(NamedTuple):
    """A factor as it is written."""

    text: str = ""  # a letter, a number, or "(1 ... 0.2887)"; empty for 1
    where: str = ""  # the letter and its formula
    vector: bool = False

    def times(self, what: str) -> str:
        """The factor, and what it multiplies."""
        if self.text in ("", "-1"):
            return self.text.removesuffix("1") + what
        return f"{self.text} {'⊙ ' if self.vector else ''}{what}"


class Line(NamedTuple):
    """One sublayer's row, with its factors as they are written."""

    row: Row
    a: Shown
    b: Shown
    c: Shown

    def branch(self, read: str, f: str = "f") -> str:
        """What is added, where the sublayer reads the stream (or its norm) of that name."""
        returned = f"{f}({self.c.times(read)})"
        return self.b.times(f"N({returned})" if self.row.norm_branch else returned)

    def read(self, stream: str, norm: str = "N") -> str:
        """What the sublayer reads, before c."""
        return f"{norm}({stream})" if self.row.norm_in else stream

    def out(self, stream: str, *added: str) -> str:
        """The stream after the add."""
        total = plus(*([] if self.row.a == 0.0 else [self.a.times(stream)]), *added)
        return f"N({total})" if self.row.norm_out else total

    @property
    def wheres(self) -> list[str]:
        """Where the letters come from."""
        return [shown.where for shown in (self.a, self.b, self.c) if shown.where]


class Part(NamedTuple):
    """Layers whose rows have one form."""

    label: str  # "layers 1 to 3"; empty for the whole stack
    lines: tuple[Line, ...]  # one for each sublayer of a layer


def equation(row: Row, symbols: Mapping[str, tuple[str, str]] | None = None) -> str:
    """A row in symbols.

    Args:
        row: the row.
        symbols: `{"a": ("α", "(2L)^(1/4)")}`, the letter of a factor and its formula; without one it is a number, or, if it is
            learned, a, b or c.

    Example:
        >>> from addnorm.wirings.equation import equation
        >>> print(equation(addnorm.Row(norm_in=True, b=addnorm.Learned(0.1, per_feature=True))))
        x' = x + b ⊙ f(N(x)),   b starts at 0.1
        >>> print(equation(addnorm.Row(norm_out=True, a=3.0), {"a": ("α", "√S")}))
        x' = N(α x + f(x)),   α = √S
    """
    line = _line([row], [row], dict(symbols or {}), exact=False, measured=False)
    return GAP.join([_row((line,))[0], *line.wheres])


def equation_of(wiring: Wiring, num_layers: int | None = None) -> str:
    """What `Wiring.equation` does: one line, or one for each form that the rows have."""
    lines = _lines(wiring, num_layers)
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label + ':':{width + 3}}{text}" if label else text for label, text in lines)


def one_line(wiring: Wiring, num_layers: int | None = None) -> str:
    """The same, always in one line."""
    return ";  ".join(f"{label}: {text}" if label else text for label, text in _lines(wiring, num_layers))


def in_lines(wiring: Wiring, width: int) -> list[str]:
    """The same, broken between its parts where a line would be wider."""
    lines: list[str] = []
    for label, text in _lines(wiring, None):
        found = f"{label}: {text}" if label else text
        line = ""
        for piece in found.split(GAP):
            if line and len(f"{line}, {piece}") > width:
                lines.append(f"{line},")
                line = ""
            line += f", {piece}" if line else piece
        lines.append(line)
    return lines


def _lines(wiring: Wiring, num_layers: int | None) -> list[tuple[str, str]]:
    """The equations, each with the layers it is for."""
    found: list[tuple[str, list[str]]] = []
    for part in parts(wiring, num_layers):
        for label, lines in by_sublayer(wiring, part):
            wheres = dict.fromkeys(where for line in lines for where in line.wheres)
            found.append((label, [*FORMS[wiring.flow](lines), *wheres]))
    start = ["x_0 = N(x)"] if wiring.embedding_norm else []
    end = [END[wiring.flow]] if wiring.ends_in_norm(shown_depth(wiring, num_layers)) else []
    if len(found) == 1:
        return [("", GAP.join(start + found[0][1] + end))]
    around = [("at the start", start)] * bool(start), [("at the end", end)] * bool(end)
    return [(label, GAP.join(texts)) for label, texts in (*around[0], *found, *around[1])]


def by_sublayer(wiring: Wiring, part: Part) -> list[tuple[str, tuple[Line, ...]]]:
    """The lines of a part that are looked at together: all of a layer, where they are alike or only together are one equation."""
    alike = len({(_form(line.row), line.a, line.b, line.c) for line in part.lines}) == 1
    if wiring.flow != "rows" or alike:
        return [(part.label, part.lines)]
    return [(f"{part.label}, sublayer {k}".removeprefix(", "), (line,)) for k, line in enumerate(part.lines, 1)]


def parts(wiring: Wiring, num_layers: int | None = None) -> list[Part]:
    """The forms of a wiring's rows, in the order of their first layers.

    Args:
        wiring: the wiring.
        num_layers: with it the constants are numbers; without it they are symbols where they depend on depth.
    """
    depth = shown_depth(wiring, num_layers)
    stack, deeper = _stack(wiring, depth), _stack(wiring, depth if num_layers else 2 * depth)
    found: list[Part] = []
    symbols, how = dict(wiring.symbols), {"exact": num_layers is not None, "measured": wiring.profile is not None}
    forms = _forms(stack)
    for form, layers in forms.items():
        lines = []
        for k in range(len(form)):
            rows = [stack[layer][k] for layer in layers]
            others = [layer[k] for layer in deeper if _form(layer[k]) == form[k]]
            lines.append(_line(rows, others, symbols, **how))
        of = "" if num_layers or found else f" of {depth}"
        found.append(Part(f"{layers_text(layers)}{of}" if len(forms) > 1 else "", tuple(lines)))
    return found


def shown_depth(wiring: Wiring, num_layers: int | None = None) -> int:
    """The number of layers that are looked at: where it is open, the first that shows every form."""
    return num_layers or max(DEPTHS, key=lambda depth: len(_forms(_stack(wiring, depth))))


Layers = list[tuple["Row", ...]]


def _stack(wiring: Wiring, depth: int) -> Layers:
    rows = wiring.rows(depth)
    return [*zip(rows[::2], rows[1::2], strict=True)]


def _forms(stack: Layers) -> dict[tuple[object, ...], list[int]]:
    """The layers of each form."""
    found: dict[tuple[object, ...], list[int]] = {}
    for layer, rows in enumerate(stack):
        found.setdefault(tuple(map(_form, rows)), []).append(layer)
    return found


def _form(row: Row) -> tuple[object, ...]:
    """What a row is apart from its numbers."""
    factors = [getattr(row, name) for name in FACTORS]
    kinds = [None if isinstance(factor, float) else (factor.per_feature, factor.shared) for factor in factors]
    return (row.norm_in, row.norm_branch, row.norm_out, row.a == 0.0, *kinds)


def _line(
    rows: Sequence[Row], others: Sequence[Row], symbols: Mapping[str, tuple[str, str]], *, exact: bool, measured: bool
) -> Line:
    factors = []
    for name in FACTORS:
        values = [getattr(row, name) for row in rows]
        elsewhere = [getattr(row, name) for row in others]
        factors.append(_shown(name, values, elsewhere, symbols.get(name), exact=exact, measured=measured))
    return Line(rows[0], *factors)


def _shown(
    name: str,
    values: Sequence[Factor],
    elsewhere: Sequence[Factor],
    symbol: tuple[str, str] | None,
    *,
    exact: bool,
    measured: bool,
) -> Shown:
    """A factor as it is written, from its values over the layers, and those in a stack of another depth."""
    letter, formula = symbol or (name, "")
    constant = len({*values, *elsewhere}) == 1
    first = values[0]
    if not isinstance(first, float):
        numbers = [value.init for value in values if not isinstance(value, float)]
        start = interval(numbers) if exact or constant else "a value that depends on depth"
        start = "as measured" if measured else f"at {start if exact else formula or start}"
        return Shown(letter, f"{letter} starts {start}{ONE_A_LAYER * first.shared}", first.per_feature)
    numbers = [value for value in values if isinstance(value, float)]
    if constant and first == 1.0:
        return Shown()
    if exact:
        return Shown(text if " " not in (text := interval(numbers)) else f"({text})")
    if formula:
        return Shown(letter, f"{letter} = {formula}")
    if constant:
        return Shown(number(first))
    return Shown(f"{letter}_{'l' if len({*values}) > 1 else 'L'}")


def _row(lines: tuple[Line, ...]) -> list[str]:
    line = lines[0]
    return [f"x' = {line.out('x', line.branch(line.read('x')))}"]


def _parallel(lines: tuple[Line, ...]) -> list[str]:
    added = [line.branch(read, f"f_{k}") for k, (line, read) in enumerate(zip(lines, reads(lines), strict=True), 1)]
    return [f"x' = {lines[0].out('x', *added)}"]


def reads(lines: tuple[Line, ...]) -> list[str]:
    """What parallel sublayers read: each its own norm, or what the first reads."""
    several = sum(line.row.norm_in for line in lines) > 1
    names = [line.read("x", f"N_{k}" if several else "N") for k, line in enumerate(lines, 1)]
    return [name if line.row.norm_in else names[0] for name, line in zip(names, lines, strict=True)]


def _two_streams(lines: tuple[Line, ...]) -> list[str]:
    line = lines[0]
    added = line.branch(line.read("u"))
    return [f"u' = {line.out('u', added)}", f"v' = {plus('v', added)}"]


def _bottom_to_top(lines: tuple[Line, ...]) -> list[str]:
    first, last = lines[0], lines[-1]
    return [
        f"h = {first.out('x', first.branch(first.read('x'), 'f_1'))}",
        f"x' = {last.out('h', last.branch(last.read('h'), 'f_2'), 'x')}",
    ]


FORMS = {"rows": _row, "parallel": _parallel, "two_streams": _two_streams, "bottom_to_top": _bottom_to_top}
END = {"rows": "y = N(x_L)", "parallel": "y = N(x_L)", "two_streams": "y = u + N(v)", "bottom_to_top": "y = N(x_L)"}


def plus(*terms: str) -> str:
    """The sum; a term may begin with a minus."""
    return " + ".join(terms).replace("+ -", "- ")


def number(value: float) -> str:
    """Four significant digits.

    Example:
        >>> from addnorm.wirings.equation import number
        >>> number(200**0.25), number(1e-5), number(2.0)
        ('3.761', '1e-5', '2')
    """
    if 0 < abs(value) < 1e-3:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return re.sub(r"e\+0*", "e", f"{value:.4g}")


def interval(values: Iterable[float]) -> str:
    """One number; or the first and the last, if there are several between which they lie; or the smallest and the largest."""
    values = [*values]
    ends = [values[0], values[-1]]
    if min(values) == max(values):
        return number(values[0])
    lowest_to_highest = sorted(ends) != [min(values), max(values)]
    return (
        " to ".join(map(number, (min(values), max(values)))) if lowest_to_highest else " ... ".join(map(number, ends))
    )


def layers_text(layers: Sequence[int]) -> str:
    """Layers, counted from 0, as a reader counts them.

    Example:
        >>> from addnorm.wirings.equation import layers_text
        >>> layers_text([0]), layers_text([0, 1, 2, 5])
        ('layer 1', 'layers 1 to 3, 6')
    """
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer:
            runs[-1][-1] += 1
        else:
            runs.append([layer, layer + 1])
    texts = [str(end) if end == begin + 1 else f"{begin + 1} to {end}" for begin, end in runs]
    if len(texts) > 4:
        texts = [*texts[:3], "...", texts[-1]]
    return f"layer{'s' * (len(layers) > 1)} {', '.join(texts)}"
