"""A wiring in symbols, made from its rows.

    x' = N(α x + f(x)),   α = (2L)^(1/4)

N is a norm, f the sublayer, L the number of layers, l a layer's number from 1, S the number of sublayers. A factor of 1 is not
written. Rows that are the same in every layer are written once; where their form changes with depth, each form has its line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from addnorm.wirings.row import FACTORS, GAP, Learned, Row, RowText, join_terms, row_text

__all__ = ["LayerGroup", "WiringRows", "equation_lines", "format_equation", "group_layers", "wrap_equation"]

DEPTHS = (12, 24, 48, 96, 192)  # depths to try if no number of layers is passed


class WiringRows(Protocol):
    """The part of `addnorm.Wiring` that its texts and drawings are made from."""

    @property
    def flow(self) -> str: ...  # noqa: D102  # as in Wiring
    @property
    def embedding_norm(self) -> bool: ...  # noqa: D102
    @property
    def profile(self) -> Callable[..., None] | None: ...  # noqa: D102
    @property
    def symbols(self) -> Any: ...  # noqa: D102
    def rows(self, num_layers: int, sublayers_per_layer: int = 2) -> list[Row]: ...  # noqa: D102
    def ends_in_norm(self, num_layers: int) -> bool: ...  # noqa: D102


class LayerGroup(NamedTuple):
    """Layers whose rows have the same form."""

    label: str  # "layers 1 to 3"; empty for the whole stack
    rows: tuple[RowText, ...]  # one for each sublayer of a layer

    def by_sublayer(self, flow: str) -> list[tuple[str, tuple[RowText, ...]]]:
        """Return the rows that one equation or drawing shows: all of a layer if they are alike, else one for each sublayer."""
        alike = len({(_form(text.row), text.a, text.b, text.c) for text in self.rows}) == 1
        if flow != "rows" or alike:
            return [(self.label, self.rows)]
        return [(f"{self.label}, sublayer {k}".removeprefix(", "), (text,)) for k, text in enumerate(self.rows, 1)]


def format_equation(wiring: WiringRows, num_layers: int | None = None) -> str:
    """Return the equation of a wiring: one line, or one line for each form that its rows have."""
    lines = _lines(wiring, num_layers)
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label + ':':{width + 3}}{text}" if label else text for label, text in lines)


def equation_lines(wiring: WiringRows) -> list[str]:
    """Return the equations, each with its layers."""
    return [f"{label}: {text}" if label else text for label, text in _lines(wiring, None)]


def wrap_equation(wiring: WiringRows, width: int) -> list[str]:
    """Return the equations, broken after a comma where a line would be wider than `width` characters."""
    lines: list[str] = []
    for text in equation_lines(wiring):
        line = ""
        for piece in text.split(GAP):
            if line and len(f"{line}, {piece}") > width:
                lines.append(f"{line},")
                line = ""
            line += f", {piece}" if line else piece
        lines.append(line)
    return lines


def _lines(wiring: WiringRows, num_layers: int | None) -> list[tuple[str, str]]:
    lines: list[tuple[str, list[str]]] = []
    for group in group_layers(wiring, num_layers):
        for label, rows in group.by_sublayer(wiring.flow):
            definitions = dict.fromkeys(text for row in rows for text in row.definitions)
            lines.append((label, [*FORMS[wiring.flow](rows), *definitions]))
    start = ["x_0 = N(x)"] if wiring.embedding_norm else []
    has_final_norm = wiring.ends_in_norm(shown_depth(wiring, num_layers))
    end = [FINAL_NORM.get(wiring.flow, "y = N(x_L)")] if has_final_norm else []
    if len(lines) == 1:
        return [("", GAP.join(start + lines[0][1] + end))]
    before = [("at the start", start)] if start else []
    after = [("at the end", end)] if end else []
    return [(label, GAP.join(texts)) for label, texts in (*before, *lines, *after)]


def group_layers(wiring: WiringRows, num_layers: int | None = None) -> list[LayerGroup]:
    """Return the forms of a wiring's rows, in the order of their first layers.

    Args:
        wiring: the wiring.
        num_layers: the depth, for constants as numbers; without it, constants that depend on depth are symbols.
    """
    depth = shown_depth(wiring, num_layers)
    stack, deeper = _layers(wiring, depth), _layers(wiring, depth if num_layers else 2 * depth)
    groups: list[LayerGroup] = []
    symbols: Mapping[str, tuple[str, str]] = dict(wiring.symbols)
    forms = _forms(stack)
    for form, layers in forms.items():
        texts = []
        for k in range(len(form)):
            rows = [stack[layer][k] for layer in layers]
            deeper_rows = [layer[k] for layer in deeper if _form(layer[k]) == form[k]]
            is_exact, is_measured = num_layers is not None, wiring.profile is not None
            texts.append(row_text(rows, deeper_rows, symbols, exact=is_exact, measured=is_measured))
        total = "" if num_layers or groups else f" of {depth}"
        groups.append(LayerGroup(f"{format_layers(layers)}{total}" if len(forms) > 1 else "", tuple(texts)))
    return groups


def shown_depth(wiring: WiringRows, num_layers: int | None = None) -> int:
    """Return the number of layers to show: `num_layers`, or for None the smallest of `DEPTHS` that shows every form."""
    return num_layers or max(DEPTHS, key=lambda depth: len(_forms(_layers(wiring, depth))))


Layers = list[tuple[Row, ...]]


def _layers(wiring: WiringRows, depth: int) -> Layers:
    rows = wiring.rows(depth)
    return [*zip(rows[::2], rows[1::2], strict=True)]


def _forms(stack: Layers) -> dict[tuple[object, ...], list[int]]:
    """Return the layers of each form."""
    forms: dict[tuple[object, ...], list[int]] = {}
    for layer, rows in enumerate(stack):
        forms.setdefault(tuple(map(_form, rows)), []).append(layer)
    return forms


def _form(row: Row) -> tuple[object, ...]:
    """Return the parts of a row that are no numbers."""
    factors = [getattr(row, name) for name in FACTORS]
    kinds = [(factor.per_feature, factor.shared) if isinstance(factor, Learned) else None for factor in factors]
    return (row.norm_in, row.norm_branch, row.norm_out, row.a == 0.0, *kinds)


def _rows(rows: tuple[RowText, ...]) -> list[str]:
    return [rows[0].equation]


def _parallel(rows: tuple[RowText, ...]) -> list[str]:
    """Return the equation of a layer whose sublayers read their own norms, or the norm that the first one reads."""
    has_many_norms = sum(text.row.norm_in for text in rows) > 1
    names = [text.read("x", f"N_{k}" if has_many_norms else "N") for k, text in enumerate(rows, 1)]
    reads = [name if text.row.norm_in else names[0] for name, text in zip(names, rows, strict=True)]
    added = [text.branch(read, f"f_{k}") for k, (text, read) in enumerate(zip(rows, reads, strict=True), 1)]
    return [f"x' = {rows[0].out('x', *added)}"]


def _two_streams(rows: tuple[RowText, ...]) -> list[str]:
    text = rows[0]
    added = text.branch(text.read("u"))
    return [f"u' = {text.out('u', added)}", f"v' = {join_terms('v', added)}"]


def _bottom_to_top(rows: tuple[RowText, ...]) -> list[str]:
    first, last = rows[0], rows[-1]
    return [
        f"h = {first.out('x', first.branch(first.read('x'), 'f_1'))}",
        f"x' = {last.out('h', last.branch(last.read('h'), 'f_2'), 'x')}",
    ]


FORMS = {"rows": _rows, "parallel": _parallel, "two_streams": _two_streams, "bottom_to_top": _bottom_to_top}
FINAL_NORM = {"two_streams": "y = u + N(v)"}


def format_layers(layers: Sequence[int]) -> str:
    """Return layers, counted from 0, as text that counts from 1.

    Example:
        >>> from addnorm.wirings.equation import format_layers
        >>> format_layers([0]), format_layers([0, 1, 2, 5])
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
