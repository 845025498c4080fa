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

from addnorm.wirings.canvas import ADD, STEP, Canvas
from addnorm.wirings.equation import End, Part, end_of, find_parts
from addnorm.wirings.factors import Factor
from addnorm.wirings.stage_form import names_of
from addnorm.wirings.stage_text import FactorText, StageText

__all__ = ["WIDTH", "draw"]

WIDTH = 78
AND_SO_ON = " ··· "
NEWEST = "newest"
HEIGHT = 3  # lines from a wire to the one below it, if there are boxes between them


def draw(wiring: Any) -> str:
    """Return a wiring as a drawing in text."""
    drawings = [(part.label, [_draw_part(part)]) for part in find_parts(wiring)]
    last = drawings[-1][1]
    last += _draw_end(end_of(wiring), last[0])
    if wiring.embedding_norm:
        drawings[0][1].insert(0, _draw_norm("x", ["N"], "x_0"))
    return "\n\n".join(f"{label}:\n\n{_beside(pieces)}" if label else _beside(pieces) for label, pieces in drawings)


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
        return [_draw_norm("x_L", norm, "y")]
    names = names_of(head.stage)
    reads = [j for j in range(head.stage.n) if f"collapse_0_{j}" in head.factors] if _has_names(head) else []
    if len(last.streams) == 2 and len(reads) == head.stage.n == 2:
        return [_draw_sum_of_two(head, norm, last.streams[1])]
    if reads == [0] and head.read() == names[0]:
        return [_draw_norm(names[0] + "_L" * (head.stage.n == 1), norm, "y")]
    return [_draw_norm(_bundle(head, "_L"), [*_read_labels(head), *norm], "y", thick=True)]


def _draw_norm(name: str, labels: list[str], result: str, *, thick: bool = False) -> Canvas:
    """Draw boxes between a name and what they return."""
    canvas = Canvas()
    canvas.draw_arrow(canvas.draw_boxes(canvas.write(0, 0, f"{name} ") - 1, 0, labels, thick=thick), 0, result)
    return canvas


def _scale(factor: FactorText | None) -> list[str]:
    """Return the boxes of a factor."""
    if factor is None or not (factor.boxes or factor.text):
        return []
    return [*factor.boxes] or [f"{'⊙' if factor.is_vector else '×'}{factor.text}"]


def _norms(text: StageText) -> list[str]:
    """Return the boxes of the sublayer with its norms."""
    return [*["N"] * text.stage.norm_in, *_scale(text.factor("c")), "f", *["N"] * text.stage.norm_branch]


# One stream.


def _draw_single(text: StageText) -> Canvas:
    canvas, norm_out = Canvas(), ["N"] * text.stage.norms_out[0]
    x = canvas.write(0, 0, "x ")
    branch = [*_norms(text), *_scale(text.factor("inject"))]
    if not text.has_stream:
        right = canvas.draw_boxes(x - 1, 0, [*branch, *norm_out])
    else:
        fork, scaled = canvas.draw_wire(x, x + STEP, 0), _scale(text.factor("mix"))
        width = sum(len(label) + 4 for label in scaled) + STEP * max(0, len(scaled) - 1)
        height = HEIGHT if scaled else 2
        join = canvas.draw_bypass(fork, 0, branch, height=height, least=fork + width + STEP)
        x = canvas.draw_boxes(fork + (join - fork - width) // 2 - STEP, 0, scaled) if scaled else fork
        canvas.draw_wire(fork, x - width + 1, 0)
        canvas.draw_wire(x, join, 0)
        canvas.write(join, 0, ADD)
        right = canvas.draw_boxes(join, 0, norm_out)
    canvas.draw_arrow(right, 0, "x'")
    return canvas


def _draw_parallel(texts: Sequence[StageText]) -> Canvas:
    several = sum(text.stage.norm_in for text in texts) > 1
    canvas = Canvas()
    x = canvas.write(0, 0, "x ")
    fork = canvas.draw_wire(x, x + STEP, 0)
    ends, shared = [], (fork, 0)  # the input of the sublayer before
    for k, text in enumerate(texts, 1):
        y = HEIGHT * k - 1
        is_shared = text.stage.shares == "read"
        start, height = shared if is_shared else (fork, 0)
        canvas.draw_vertical_wire(start, height, y)
        read = [f"N_{k}" if several else "N"] * text.stage.norm_in + _scale(text.factor("c"))
        start = canvas.draw_boxes(start, y, read)
        if k < len(texts) and texts[k].stage.shares == "read" and not is_shared:
            start = canvas.draw_wire(start, start + STEP, y) if start != fork else start
            shared = start, y
        rest = [f"f_{k}", *["N"] * text.stage.norm_branch, *_scale(text.factor("inject"))]
        ends.append((canvas.draw_boxes(start, y, rest), y))
    join = max(right for right, _ in ends) + STEP + 1
    for right, y in ends:
        canvas.draw_wire(right, join, y)
    canvas.draw_vertical_wire(join, 0, ends[-1][1])
    canvas.draw_wire(fork, join, 0)
    canvas.write(join, 0, ADD)
    canvas.draw_arrow(join, 0, "x'")
    return canvas


# One thick wire.


def _bundle(text: StageText, end: str = "") -> str:
    """Return the name of all streams together."""
    if text.is_matrix or _is_unnamed(text):
        return f"X{end}"
    if text.is_counted:
        return f"{text.base}_0..{text.base}_n"
    return f"({', '.join(names_of(text.stage))})"


def _is_unnamed(text: StageText) -> bool:
    """Return whether the streams are more than two and have no names of their own."""
    return text.stage.n > 2 and not text.stage.names


def _bundle_after(text: StageText) -> str:
    if text.is_counted:
        return f"{text.base}_0..{text.names_after[0]}"
    if text.is_matrix or _is_unnamed(text):
        return "X'"
    return f"({', '.join(text.labels_after)})" if len(text.labels_after) > 1 else text.labels_after[0]


def _read_labels(text: StageText) -> list[str]:
    """Return the boxes from all streams to the sum that is read."""
    label = _read_label(text)
    has_norms = any(text.stage.norm_streams) and (text.read_notation is not None or text.is_counted)
    scale = _scale(text.factors.get("collapse_0")) if label == NEWEST else []
    return [*["N"] * has_norms, label, *scale]


def _read_label(text: StageText) -> str:
    """Return the label of the box that makes one state of several streams."""
    notation = text.read_notation
    if notation is not None:
        return f"{notation.collapse}{'⁻' * text.stage.delayed}"
    read = text.read()
    if text.is_counted and read.startswith("Σ"):
        return str(text.factors["collapse_0"].text)
    if text.is_matrix:
        return {"Σ_i X_i": "Σ", "Σ_i X_i / n": "mean"}.get(read, read)
    return NEWEST if text.is_counted else read


def _draw_thick_wire(text: StageText) -> Canvas:
    stage, notation = text.stage, text.notation
    canvas, is_thick, stays_thick = Canvas(), stage.n > 1, stage.n_out > 1
    x = canvas.write(0, 0, f"{_bundle(text)} ")
    fork = canvas.draw_wire(x, x + STEP, 0, thick=is_thick)
    mixes = ["A" if notation is None or stage.mix is not None else notation.mix] * _has_mix_box(text)
    labels = [*_read_labels(text), *_norms(text), notation.inject if stage.inject is None else "b"]
    height = HEIGHT if mixes else 2
    join = canvas.draw_bypass(fork, 0, labels, height=height, thick=is_thick, thick_end=stays_thick)
    canvas.draw_wire(canvas.draw_boxes(fork, 0, mixes, thick=is_thick), join, 0, thick=stays_thick)
    canvas.write(join, 0, ADD)
    normed = [name.removesuffix("'") for name, flag in zip(text.labels_after, stage.norms_out, strict=False) if flag]
    label = "N" if all(stage.norms_out) else f"N of {', '.join(normed)}"
    right = canvas.draw_boxes(join, 0, [label] * any(stage.norms_out), thick=True)
    canvas.draw_arrow(right, 0, _bundle_after(text), thick=stays_thick)
    given = [] if stage.mix is None or not mixes else [f"A = {_format_matrix(text, stage.mix)}"]
    given += [] if stage.inject is None else [f"b = {_format_vector(text, 'inject', stage.inject)}"]
    canvas.write(2, height + 3, ",   ".join(given))
    return canvas


def _format_matrix(text: StageText, rows: Sequence[Sequence[Factor]]) -> str:
    return f"({', '.join(_format_vector(text, f'mix_{k}', row) for k, row in enumerate(rows))})"


def _format_vector(text: StageText, place: str, entries: Sequence[Factor]) -> str:
    """Return entries in parentheses."""
    found = [text.factors.get(f"{place}_{j}") for j in range(len(entries))]
    return f"({', '.join('0' if factor is None else factor.text or '1' for factor in found)})"


def _has_mix_box(text: StageText) -> bool:
    """Return whether the matrix A is not the identity, so that it needs a box."""
    stage = text.stage
    if stage.mix is None:
        return "mix" in stage.computes
    changes = any(text.mixed(k) != name for k, name in enumerate(text.plain_names_after))
    return changes or bool(stage.n_out != stage.n)


# States that are counted: a wire that joins the thick one is a new state.


def _draw_counted(text: StageText) -> Canvas:
    stage, canvas = text.stage, Canvas()
    x = canvas.write(0, 0, f"{_bundle(text)} ")
    fork = canvas.draw_wire(x, x + STEP, 0, thick=True)
    appends, old = stage.n_out > stage.n, text.mixed(0)
    canvas.draw_vertical_wire(fork, 0, 2, thick=True)
    if appends and old and old == text.read() and stage.reads == 1 and not any(stage.norm_streams):
        start = canvas.draw_boxes(fork, 2, [_read_label(text)], thick=True)
        start = canvas.draw_wire(start, start + STEP + 1, 2)
        labels = [*_read_labels(text)[1:], *_norms(text)]
        right = canvas.draw_wire(start, canvas.draw_bypass(start, 2, labels, height=HEIGHT), 2)
        canvas.write(right, 2, ADD)
    else:
        labels = [*_read_labels(text), *_norms(text), *_scale(text.factors.get("inject"))]
        right = canvas.draw_boxes(fork, 2, labels, thick=True)
        if appends and old:
            letter = old.removeprefix("Σ_i ").partition("_")[0] if old.startswith("Σ_i ") else NEWEST
            add = canvas.draw_bypass(fork, 2, [letter], height=HEIGHT, least=right, thick=True)
            right = canvas.draw_wire(right, add, 2)
            canvas.write(add, 2, ADD)
    right = canvas.draw_boxes(right, 2, ["N"] * stage.norms_out[-1])
    join = canvas.draw_wire(right, right + STEP + 1, 2)
    canvas.draw_vertical_wire(join, 0, 2)
    canvas.draw_wire(fork, join, 0, thick=True)
    if not appends:
        canvas.write(join, 0, ADD)
    canvas.draw_arrow(join, 0, _bundle_after(text), thick=True)
    return canvas


# Two wires.


def _has_names(text: StageText) -> bool:
    return not text.is_matrix and not text.is_counted and text.read_notation is None


def _is_simple(text: StageText) -> bool:
    """Return whether two wires show the stage: no stream is mixed into another one that goes on beside it."""
    stage = text.stage
    if text.is_matrix or text.is_counted or stage.coefficients is not None or max(stage.n, stage.n_out) != 2:
        return False
    names, after = names_of(stage), text.plain_names_after
    mixed = [text.mixed(k) for k in range(len(after))]
    reads = [text.factors.get(f"collapse_0_{j}") for j in range(stage.n)]
    if stage.reads > 1 or (None not in reads and stage.n == 2 and (reads[0] != FactorText() or stage.norm_streams[0])):
        return False  # of two streams that are read, the first has no room for boxes
    if stage.n == stage.n_out:
        return mixed == [*names] == after
    if stage.n == 1:  # a copy of the stream goes on
        is_plain = "inject_1" not in text.factors and not stage.norms_out[1]
        return is_plain and mixed == [names[0]] * 2 and "collapse_0_0" in text.factors
    return mixed == [f"{names[0]} + {names[1]}"] and "collapse_0_1" not in text.factors


def _draw_two_wires(text: StageText) -> Canvas:
    """Draw the first stream above, the second below, and the branch between them."""
    stage, factors, canvas = text.stage, text.factors, Canvas()
    names, n_out = names_of(stage), stage.n_out
    reads = [factors.get(f"collapse_0_{j}") for j in range(stage.n)]
    own = [
        ["N"] * norm + _scale(read) if read is not None else []
        for norm, read in zip(stage.norm_streams, reads, strict=True)
    ]
    first, second = (len(reads) > j and reads[j] is not None for j in (0, 1))
    begins = [len(name) + 1 for name in names]
    canvas.write(0, 0, names[0])
    high = HEIGHT if own[0] and second else 2
    low = high + (HEIGHT if second and own[1] and not first else 2)
    x = max(begins) + STEP
    if second:  # from below, and perhaps from above, where the two meet
        canvas.draw_vertical_wire(x, high, low)
        right = canvas.draw_boxes(x, high, own[1])
        if first:
            right = canvas.draw_wire(right, right + STEP + 1, high)
            canvas.draw_vertical_wire(right, 0, high)
            canvas.write(right, high, ADD)
    else:
        canvas.draw_vertical_wire(x, 0, high)
        right = canvas.draw_boxes(x, high, own[0])
    right = canvas.draw_boxes(right, high, _norms(text))
    join, join_down = _draw_writes(canvas, text, right, high)
    if "inject_1" in factors and stage.n == n_out == 2:
        canvas.draw_vertical_wire(join_down, high, low)
        canvas.write(join_down, low, ADD)
    if "inject_0" in factors:
        canvas.draw_vertical_wire(join, 0, high)
        canvas.write(join, 0, ADD)
    canvas.draw_wire(begins[0], join, 0)
    if stage.n == 1:  # the copy begins at the fork
        canvas.draw_vertical_wire(x, high, low)
        canvas.draw_wire(x, join, low)
    else:
        canvas.write(0, low, names[1])
        canvas.draw_wire(begins[1], join, low)
    last = join
    if n_out == 1:  # the second stream ends in the first
        last = canvas.draw_wire(join, join + STEP + 1, 0)
        canvas.draw_wire(join, last, low)
        canvas.draw_vertical_wire(last, 0, low)
        canvas.write(last, 0, ADD)
    canvas.streams = (0, low)[:n_out]
    ends = [canvas.draw_boxes(last, y, ["N"] * norm) for y, norm in zip(canvas.streams, stage.norms_out, strict=True)]
    for y, end, name in zip(canvas.streams, ends, text.labels_after, strict=True):
        canvas.draw_arrow(canvas.draw_wire(end, max(ends), y), y, name)
    return canvas


def _draw_writes(canvas: Canvas, text: StageText, right: int, y: int) -> tuple[int, int]:
    """Draw the factors of the write, those of the lower stream first; return where it joins the upper and the lower stream."""
    up, down = (_scale(text.factors[place]) if place in text.factors else None for place in ("inject_0", "inject_1"))
    if text.stage.n == 1 or text.stage.n_out == 1:
        down = None
    if up is not None and up == down:
        right, up, down = canvas.draw_boxes(right, y, up), [], []
    join_down = 0
    if down is not None and (down or up):
        right = canvas.draw_boxes(right, y, down)
        join_down = canvas.draw_wire(right, right + STEP + 1, y)
    if up and down is not None:
        right = canvas.draw_boxes(join_down, y, up)
    join = canvas.draw_wire(right, right + STEP + 1, y)
    return join, join_down if up and down is not None else join


def _is_injection(text: StageText) -> bool:
    """Return whether the second of two streams is mixed into the first, which is then read and written."""
    stage = text.stage
    if not _has_names(text) or stage.coefficients is not None or not stage.n == stage.n_out == 2 or stage.reads > 1:
        return False
    is_own = text.mixed(1) == names_of(stage)[1] and "inject_1" not in text.factors and not stage.norms_out[1]
    return is_own and text.mixed(0) == text.read() and "mix_0_1" in text.factors and "mix_0_0" in text.factors


def _draw_injection(text: StageText) -> Canvas:
    """Draw the first stream above, with the second one added before the branch."""
    canvas, labels = Canvas(), text.labels_after
    names = names_of(text.stage)
    begins, low = [len(name) + 1 for name in names], 7
    canvas.write(0, 0, names[0])
    canvas.write(0, low, names[1])
    fork = max(begins) + STEP
    canvas.draw_wire(begins[0], fork, 0)
    upper = canvas.draw_boxes(fork - 1, 0, _scale(text.factors["mix_0_0"]))
    lower = canvas.draw_boxes(fork, 4, _scale(text.factors["mix_0_1"]))
    canvas.draw_vertical_wire(fork, 4, low)
    add = max(upper, lower) + STEP + 1
    canvas.draw_wire(upper, add, 0)
    canvas.draw_wire(lower, add, 4)
    canvas.draw_vertical_wire(add, 0, 4)
    canvas.write(add, 0, ADD)
    start = canvas.draw_wire(add, add + STEP + 1, 0)
    join = canvas.draw_bypass(start, 0, _norms(text) + _scale(text.factors.get("inject_0")))
    canvas.draw_wire(start, join, 0)
    canvas.write(join, 0, ADD)
    end = canvas.draw_boxes(join, 0, ["N"] * text.stage.norms_out[0])
    canvas.draw_arrow(end, 0, labels[0])
    canvas.draw_wire(begins[1], end, low)
    canvas.draw_arrow(end, low, labels[1])
    canvas.streams = (0, low)
    return canvas


def _draw_sum_of_two(head: StageText, norm: list[str], low: int) -> Canvas:
    """Draw the sum of two streams, each with its norm and factor, and the norm of the sum."""
    canvas = Canvas()
    canvas.streams = (0, low)
    rights = []
    for j, (y, name) in enumerate(zip(canvas.streams, names_of(head.stage), strict=True)):
        labels = ["N"] * head.stage.norm_streams[j] + _scale(head.factors[f"collapse_0_{j}"])
        begin = canvas.write(0, y, f"{name} ")
        rights.append(max(canvas.draw_boxes(begin - 1, y, labels), begin))
    join = max(rights) + 1 + STEP
    for y, right in zip(canvas.streams, rights, strict=True):
        canvas.draw_wire(right, join, y)
    canvas.draw_vertical_wire(join, 0, low)
    canvas.write(join, 0, ADD)
    canvas.draw_arrow(canvas.draw_boxes(join, 0, norm), 0, "y")
    return canvas
