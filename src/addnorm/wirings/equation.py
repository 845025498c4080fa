"""A wiring in symbols, made from its stages.

    x' = N(α x + f(x)),   α = (2L)^(1/4)

N is a norm, f the sublayer, L the number of layers, l a layer's number from 1, S the number of sublayers. A factor of 1 is not
written. Rows that are the same in every layer are written once; where their form changes with depth, each form has its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

from addnorm.wirings.factors import Place, format_factor
from addnorm.wirings.stage_form import form, is_matrix, names_of
from addnorm.wirings.stage_text import GAP, ONE, StageText, format_entries, join_terms, make_text

DEPTHS = (12, 24, 48, 96, 192)  # depths to try if no number of layers is passed
SUBLAYERS = 2  # of a layer
WIDTH, NARROWEST = 100, 50  # of a line of equations, in characters
ELSEWHERE = "elsewhere"

# The meanings of symbols, by the regular expression that finds the symbol in an equation.
MEANINGS = {
    r"\bN\b|\bN_": "N is a norm",
    r"\bf\b|\bf_": "f the sublayer",
    r"(?<![A-Za-z])L(?![A-Za-z])": "L the number of layers",
    r"(?<![A-Za-z])l(?![A-Za-z])": "l a layer's number from 1",
    r"(?<![A-Za-z])S(?![A-Za-z])": "S the number of sublayers",
    r"(?<![_\w{])n\b(?![}+])": "n the number of streams",
    r"_n\b": "x_n the newest of the states x_0, x_1, ...",
    r"\bd\b": "d the width",
    r"\bX\b": "X all streams",
    r"\bvec\b": "vec X the streams of a token as one vector",
    r"\bR\(": "R(v) = v / rms(v)",
    r"σ": "σ the logistic function",
    r"\bSK\b": "SK(Z) is exp(Z), its columns and rows divided by their sums in turn",
    r"⊙": "⊙ a product feature by feature",
    r"ε": "ε a small constant",
}


class Part(NamedTuple):
    """Equation of a sublayer, or of several parallel sublayers, with the layers that share it."""

    label: str  # "layers 1 to 3 of 12, sublayer 2"; empty for the whole stack
    texts: tuple[StageText, ...]  # one, or one for each parallel sublayer

    @property
    def equations(self) -> list[str]:
        """The equations, without the definitions of their letters."""
        return self.texts[0].equations if len(self.texts) == 1 else [_parallel_equation(self.texts)]

    @property
    def definitions(self) -> list[str]:
        """The definitions of the letters."""
        return list(dict.fromkeys(definition for text in self.texts for definition in text.definitions))


class End(NamedTuple):
    """The output of a wiring."""

    equation: str  # "y = N(x_L)"; empty if the output is the stream itself
    head: StageText | None  # the read of several streams; None for one stream
    has_norm: bool
    last: Any  # the stage of the last sublayer


def format_equation(wiring: Any, num_layers: int | None = None, *, defines: bool = True) -> str:
    """Return the equation of a wiring: one line, or one for each form of its rows. Wide lines are broken after a comma.

    With `defines` the definitions of the letters follow.
    """
    lines = _lines(wiring, num_layers, defines=defines)
    indent = max(len(label) for label, _ in lines)
    indent += 3 * (indent > 0)
    texts = []
    for label, text in lines:
        broken = _wrap(text, max(WIDTH - indent, NARROWEST), GAP)
        texts += [f"{label + ':' if label else '':{indent}}{broken[0]}", *(" " * indent + line for line in broken[1:])]
    return "\n".join(texts)


def equation_lines(wiring: Any, num_layers: int | None = None, *, defines: bool = True) -> list[str]:
    """Return the equations, each with the layers that share it; with `defines` also the definitions of the letters."""
    return [f"{label}: {text}" if label else text for label, text in _lines(wiring, num_layers, defines=defines)]


def wrap_equation(wiring: Any, width: int, num_layers: int | None = None) -> list[str]:
    """Return the equations, broken after a comma where a line would be wider than `width` characters."""
    return [line for text in equation_lines(wiring, num_layers) for line in _wrap(text, width, ", ")]


def _wrap(text: str, width: int, gap: str) -> list[str]:
    """Return a text in lines of at most `width` characters. Lines are broken only between one equation and the next."""
    lines: list[str] = []
    for piece in text.split(GAP):
        if lines and len(f"{lines[-1]}{gap}{piece}") <= width:
            lines[-1] += f"{gap}{piece}"
        else:
            lines[-1:] = [f"{line}," for line in lines[-1:]]
            lines.append(piece)
    return lines


def explain(text: str) -> str:
    """Return what the symbols of an equation mean, in one sentence.

    Example:
        >>> from addnorm.wirings.equation import explain
        >>> explain("x' = x + f(N(x)),   y = N(x_L)")
        'N is a norm, f the sublayer, L the number of layers.'
        >>> explain("x' = x + f(x)")
        'f is the sublayer.'
    """
    found = [meaning for pattern, meaning in MEANINGS.items() if re.search(pattern, text.replace("_L", " L"))]
    sentence = re.sub(r"^(\S+) (the|an?) ", r"\1 is \2 ", ", ".join(found))  # without N the first one has no verb
    return f"{sentence}." if found else ""


def _lines(wiring: Any, num_layers: int | None, *, defines: bool = True) -> list[tuple[str, str]]:
    parts = find_parts(wiring, num_layers)
    end = find_end(wiring, num_layers)
    known: set[str] = set()
    lines = [(part.label, [*part.equations, *_drop_known(part.definitions, known) * defines]) for part in parts]
    start = ["x_0 = N(x)"] * wiring.embedding_norm
    begin = _format_start(wiring, parts[0])
    after = [] if end.head is None else _drop_known(end.head.definitions, known) * defines
    last = [end.equation, *after] if end.equation else []
    if len(lines) == 1:
        return [("", GAP.join(start + lines[0][1] + begin + last))]
    ends = [("at the start", start + begin), *lines, ("at the end", last)]
    return [(label, GAP.join(texts)) for label, texts in ends if texts]


def _drop_known(texts: Iterable[str], known: set[str]) -> list[str]:
    """Return the texts that are not in `known`, and add them to `known`."""
    found = [text for text in texts if text not in known]
    known.update(found)
    return found


def _format_start(wiring: Any, first: Part) -> list[str]:
    """Return the equations of the streams before the first sublayer; empty for one stream, the embedding."""
    numbers, text = wiring.embedding, first.texts[0]
    if numbers == (1.0,) and not text.is_matrix:
        return []
    if text.is_matrix:
        if {*numbers} == {1.0}:
            return [f"X_0 = {len(numbers)} copies of x_0"] if len(numbers) > 1 else ["X_0 = x_0"]
        return [f"X_0 = {format_entries(numbers)} x_0"]
    names: dict[float, list[str]] = {}
    for name, number in zip(names_of(text.stage), numbers, strict=True):
        if (name, number) not in (("x", 1.0), ("x_0", 1.0)):
            names.setdefault(number, []).append(f"{name} = " if "_" in name else f"{name}_0 = ")
    values = {0.0: "0", 1.0: "x_0"}
    texts = ["".join(some) + values.get(number, f"{format_factor(number)} x_0") for number, some in names.items()]
    return [f"{text} at the start" if "_" in text.partition(" =")[0].removesuffix("_0") else text for text in texts]


def find_end(wiring: Any, num_layers: int | None = None) -> End:
    """Return the output of a wiring: its equation, and the read of several streams."""
    depth = num_layers or wiring.shown_depth
    head, has_norm = wiring.last_read(_end_place(depth)), wiring.ends_in_norm(depth)
    last = wiring.stage(depth - 1, SUBLAYERS - 1, depth, SUBLAYERS)
    if head is None:
        return End("y = N(x_L)" if has_norm else "", None, has_norm, last)
    carried = None if last.coefficients is None else last.coefficients.notation
    deeper = head if num_layers else wiring.last_read(_end_place(2 * depth))
    text = make_text(
        [head], [deeper if deeper.n == head.n else head], dict(wiring.symbols), exact=num_layers is not None, carried=carried,
        as_matrix=is_matrix(last),
    )  # fmt: skip
    read = join_terms(text.read())
    if len(text.names) == 1 and not text.is_counted:
        read = re.sub(rf"\b{text.names[0]}\b", r"\g<0>_L", read)
    if not has_norm and read == "x_L":
        return End("", None, has_norm, last)
    return End(f"y = N({read})" if has_norm else f"y = {read}", text, has_norm, last)


def _end_place(depth: int) -> Place:
    """Return the place after the last sublayer."""
    return Place(depth, 0, depth, SUBLAYERS)


def _parallel_equation(texts: Sequence[StageText]) -> str:
    """Return the equation of sublayers that read norms of one state, or the input of the sublayer before."""
    has_many_norms = sum(text.stage.norm_in for text in texts) > 1
    terms, read = [*map(str, texts[0].streams[0].kept)], ""
    for k, text in enumerate(texts, 1):
        if text.stage.shares != "read":
            read = text.normed("x", f"N_{k}" if has_many_norms else "N")
        terms.append(text.factors.get("inject_0", ONE).times(text.write(read, f=f"f_{k}")))
    return f"x' = {join_terms(terms)}"


def find_parts(wiring: Any, num_layers: int | None = None) -> list[Part]:
    """Return the equations of a wiring, in the order of their first layers.

    Args:
        wiring: the wiring.
        num_layers: the depth, for constants as numbers; without it, constants that depend on depth are symbols.
    """
    depth, exact = num_layers or wiring.shown_depth, num_layers is not None
    forms = _find_forms(wiring, depth)
    deeper = forms if exact else _find_forms(wiring, 2 * depth)
    merged: dict[tuple[str, ...], tuple[Part, Places]] = {}
    for layer_form, layers in forms.items():
        others = deeper.get(layer_form, layers)
        texts = [
            make_text(own, other, dict(wiring.symbols), exact=exact, measured=wiring.profile is not None)
            for own, other in zip(zip(*layers.values(), strict=True), zip(*others.values(), strict=True), strict=True)
        ]
        starts = [k for k, text in enumerate(texts) if k == 0 or not text.stage.shares]
        for first, end in zip(starts, [*starts[1:], len(texts)], strict=True):
            part = Part("", tuple(texts[first:end]))
            key = (*part.equations, *part.definitions)
            merged.setdefault(key, (part, set()))[1].update(product(layers, range(first, end)))
    parts = sorted(merged.values(), key=lambda part: min(part[1]))
    labels = _labels([places for _, places in parts], depth, has_depth=not exact)
    return [part._replace(label=label) for (part, _), label in zip(parts, labels, strict=True)]


def shown_depth(wiring: Any) -> int:
    """Return the smallest number of layers of `DEPTHS` that shows every form of a wiring's stages."""
    first, second = (max(stage.n_out for stage in wiring.stages(depth)) for depth in DEPTHS[:2])
    if first != second:  # matrices that grow with depth are large in a deep stack, and so is a text whose forms grow
        return DEPTHS[0]
    return max(DEPTHS, key=lambda depth: len(_find_forms(wiring, depth)))


Places = set[tuple[int, int]]  # layers and sublayers


def _find_forms(wiring: Any, depth: int) -> dict[tuple[object, ...], dict[int, Sequence[Any]]]:
    """Return {form of a layer: {layer number: its stages}} of the layers that are written alike.

    A form is all parts of the stages without their numbers.
    """
    stages = wiring.stages(depth)
    of_stage = {id(stage): form(stage) for stage in {id(stage): stage for stage in stages}.values()}
    forms: dict[tuple[object, ...], dict[int, Sequence[Any]]] = {}
    for layer in range(depth):
        own = stages[layer * SUBLAYERS :][:SUBLAYERS]
        forms.setdefault(tuple(of_stage[id(stage)] for stage in own), {})[layer] = own
    return forms


def _labels(places: Sequence[Places], depth: int, *, has_depth: bool) -> list[str]:
    """Return a label for each equation, with its layers and sublayers; the first one also has the number of layers."""
    labels, total = [], f" of {depth}" * has_depth
    texts = [_place_texts(some, depth) for some in places]
    several = sum(len(some) > 1 for some in texts)
    for some in texts:
        if len(some) > 1 and several == 1:
            labels.append(ELSEWHERE)
            continue
        pieces = []
        for layers, sublayers in some:
            pieces.append(", ".join(filter(None, (f"{layers}{total}" if layers else "", sublayers))))
            total = "" if layers else total
        labels.append("; ".join(pieces))
    return labels


def _place_texts(places: Places, depth: int) -> list[tuple[str, str]]:
    """Return layers and sublayers as texts, one pair for layers that have the same sublayers."""
    layers: dict[tuple[int, ...], list[int]] = {}
    for layer in sorted({layer for layer, _ in places}):
        some = tuple(k for k in range(SUBLAYERS) if (layer, k) in places)
        layers.setdefault(some, []).append(layer)
    return [
        (
            "" if len(which) == depth else format_layers(which),
            "" if len(some) == SUBLAYERS else f"sublayer {', '.join(str(k + 1) for k in some)}",
        )
        for some, which in layers.items()
    ]


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
