"""A stage of several streams as a drawing in text: two wires, or one thick wire with a box for each matrix.

X ══╦══╡ A ╞═════════════════════════════⊕══► X'
    ║  └───┘                             ║
    ║  ┌───┐  ┌───┐  ┌───┐  ┌───┐        ║
    ╚══╡ c ├──┤ N ├──┤ f ├──┤ b ╞════════╝
       └───┘  └───┘  └───┘  └───┘
"""

from __future__ import annotations

from collections.abc import Sequence

from addnorm.wirings.canvas import ADD, STEP, Canvas
from addnorm.wirings.equation import End
from addnorm.wirings.row import Factor, FactorText
from addnorm.wirings.stage_form import names_of
from addnorm.wirings.stage_text import StageText

__all__ = ["draw_head", "draw_stage"]

NEWEST = "newest"
HEIGHT = 3  # lines from a wire to the one below it, if there are boxes between them


def draw_stage(text: StageText) -> Canvas:
    """Return the drawing of a stage."""
    if _is_simple(text):
        return _two_wires(text)
    if _is_injection(text):
        return _injection(text)
    return _counted(text) if text.is_counted else _thick_wire(text)


def draw_head(end: End, last: Canvas) -> Canvas:
    """Return the drawing of the last read, beside that of the last stage."""
    assert end.head is not None
    head, canvas = end.head, Canvas()
    norm = ["N"] * end.equation.startswith("y = N(")
    reads = [int(place.rpartition("_")[2]) for place in head.factors] if _has_names(head) else []
    if len(last.streams) == 2 and len(reads) == head.stage.n == 2:
        return _end_of_two(head, norm, last.streams[1])
    if reads == [0] and head.read() == names_of(head.stage)[0]:
        name = names_of(head.stage)[0] + "_L" * (head.stage.n == 1)
        canvas.draw_arrow(canvas.draw_boxes(canvas.write(0, 0, f"{name} ") - 1, 0, norm), 0, "y")
        return canvas
    x = canvas.write(0, 0, f"{_bundle(head, '_L')} ") - 1
    labels = [*_read_labels(head), *norm]
    canvas.draw_arrow(canvas.draw_boxes(x, 0, labels, thick=True), 0, "y")
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
        after = text.names_after[0]
        return f"{text.base}_0..{after}"
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


def _thick_wire(text: StageText) -> Canvas:
    stage, notation = text.stage, text.notation
    canvas, is_thick = Canvas(), stage.n > 1
    x = canvas.write(0, 0, f"{_bundle(text)} ")
    fork = canvas.draw_wire(x, x + STEP, 0, thick=is_thick)
    mixes = ["A" if notation is None or stage.mix is not None else notation.mix] * _has_mix_box(text)
    low = HEIGHT if mixes else 2
    canvas.draw_vertical_wire(fork, 0, low, thick=is_thick)
    right = canvas.draw_boxes(fork, low, _branch(text), thick=is_thick)
    right = canvas.draw_boxes(right, low, [notation.inject if stage.inject is None else "b"])
    join = canvas.draw_wire(right, right + STEP + 1, low, thick=stage.n_out > 1)
    canvas.draw_vertical_wire(join, 0, low, thick=stage.n_out > 1)
    x = canvas.draw_boxes(fork, 0, mixes, thick=is_thick)
    canvas.draw_wire(x, join, 0, thick=stage.n_out > 1)
    canvas.write(join, 0, ADD)
    normed = [name.removesuffix("'") for name, flag in zip(text.labels_after, stage.norm_out, strict=False) if flag]
    label = "N" if all(stage.norm_out) else f"N of {', '.join(normed)}"
    right = canvas.draw_boxes(join, 0, [label] * any(stage.norm_out), thick=True)
    canvas.draw_arrow(right, 0, _bundle_after(text), thick=stage.n_out > 1)
    given = [] if stage.mix is None or not mixes else [f"A = {_matrix(text, 'mix', stage.mix)}"]
    given += [] if stage.inject is None else [f"b = {_vector(text, 'inject', stage.inject)}"]
    canvas.write(2, low + 3, ",   ".join(given))
    return canvas


def _branch(text: StageText) -> list[str]:
    """Return the boxes from the streams to the sublayer's output."""
    stage = text.stage
    return [*_read_labels(text), *["N"] * stage.norm_in, "f", *["N"] * stage.norm_branch]


def _matrix(text: StageText, place: str, rows: Sequence[Sequence[Factor]]) -> str:
    return f"({', '.join(_vector(text, f'{place}_{k}', row) for k, row in enumerate(rows))})"


def _vector(text: StageText, place: str, entries: Sequence[Factor]) -> str:
    """Return entries in parentheses."""
    found = [text.factors.get(f"{place}_{j}") for j in range(len(entries))]
    return f"({', '.join('0' if factor is None else factor.text or '1' for factor in found)})"


# States that are counted: a wire that joins the thick one is a new state.


def _counted(text: StageText) -> Canvas:
    stage, canvas = text.stage, Canvas()
    x = canvas.write(0, 0, f"{_bundle(text)} ")
    fork = canvas.draw_wire(x, x + STEP, 0, thick=True)
    appends, old = stage.n_out > stage.n, text.mixed(0)
    canvas.draw_vertical_wire(fork, 0, 2, thick=True)
    if appends and old and old == text.read() and stage.reads == 1 and not any(stage.norm_streams):
        start = canvas.draw_boxes(fork, 2, [_read_label(text)], thick=True)
        start = canvas.draw_wire(start, start + STEP + 1, 2)
        canvas.draw_vertical_wire(start, 2, 5)
        low = canvas.draw_boxes(start, 5, _branch(text)[1:])
        add = canvas.draw_wire(low, low + STEP + 1, 5)
        canvas.draw_vertical_wire(add, 2, 5)
        right = canvas.draw_wire(start, add, 2)
        canvas.write(add, 2, ADD)
    else:
        right = canvas.draw_boxes(fork, 2, [*_branch(text), *_scale(text.factors.get("inject"))], thick=True)
        if appends and old:
            canvas.draw_vertical_wire(fork, 2, 5, thick=True)
            letter = old.removeprefix("Σ_i ").partition("_")[0] if old.startswith("Σ_i ") else NEWEST
            low = canvas.draw_boxes(fork, 5, [letter], thick=True)
            add = max(right, low) + STEP + 1
            canvas.draw_wire(right, add, 2)
            canvas.draw_wire(low, add, 5)
            canvas.draw_vertical_wire(add, 2, 5)
            canvas.write(add, 2, ADD)
            right = add
    right = canvas.draw_boxes(right, 2, ["N"] * stage.norm_out[-1])
    join = canvas.draw_wire(right, right + STEP + 1, 2)
    canvas.draw_vertical_wire(join, 0, 2)
    canvas.draw_wire(fork, join, 0, thick=True)
    if not appends:
        canvas.write(join, 0, ADD)
    canvas.draw_arrow(join, 0, _bundle_after(text), thick=True)
    return canvas


def _has_mix_box(text: StageText) -> bool:
    """Return whether the matrix A is not the identity, so that it needs a box."""
    stage = text.stage
    if stage.mix is None:
        return stage.coefficients is not None and "mix" in stage.coefficients.computes
    return (
        any(text.mixed(k) != name.removesuffix("'") for k, name in enumerate(text.names_after))
        or stage.n_out != stage.n
    )


# Two wires.


def _has_names(text: StageText) -> bool:
    return not text.is_matrix and not text.is_counted and text.read_notation is None


def _is_simple(text: StageText) -> bool:
    """Return whether two wires show the stage: no stream is mixed into another one that goes on beside it."""
    stage = text.stage
    if text.is_matrix or text.is_counted or stage.coefficients is not None or max(stage.n, stage.n_out) != 2:
        return False
    names, after = names_of(stage), [name.removesuffix("'") for name in text.names_after]
    mixed = [text.mixed(k) for k in range(len(after))]
    reads = [text.factors.get(f"collapse_0_{j}") for j in range(stage.n)]
    if stage.reads > 1 or (None not in reads and stage.n == 2 and (reads[0] != FactorText() or stage.norm_streams[0])):
        return False  # of two streams that are read, the first has no room for boxes
    if stage.n == stage.n_out:
        return mixed == list(names) and list(names) == after
    if stage.n == 1:  # a copy of the stream goes on
        is_plain = "inject_1" not in text.factors and not stage.norm_out[1]
        return is_plain and mixed == [names[0]] * 2 and "collapse_0_0" in text.factors
    return mixed == [f"{names[0]} + {names[1]}"] and "collapse_0_1" not in text.factors


def _two_wires(text: StageText) -> Canvas:
    """Draw the first stream above, the second below, and the branch between them."""
    stage, factors = text.stage, text.factors
    names, after = names_of(stage), text.labels_after
    first, second = "collapse_0_0" in factors, "collapse_0_1" in factors
    norms = dict(enumerate(stage.norm_streams))
    own = {
        j: ["N"] * norms[j] + _scale(factors[f"collapse_0_{j}"]) for j in range(stage.n) if f"collapse_0_{j}" in factors
    }
    canvas = Canvas()
    begins = [len(name) + 1 for name in names]
    canvas.write(0, 0, names[0])
    high = HEIGHT if own.get(0) and second else 2
    low = high + (HEIGHT if own.get(1) and not first else 2)
    x = max(begins) + STEP
    branch = ["N"] * stage.norm_in + ["f"] + ["N"] * stage.norm_branch
    if second:  # from below, and perhaps from above, where the two meet
        canvas.draw_vertical_wire(x, high, low)
        right = canvas.draw_boxes(x, high, own[1])
        if first:
            meet = right + STEP + 1
            canvas.draw_wire(right, meet, high)
            canvas.draw_vertical_wire(meet, 0, high)
            canvas.write(meet, high, ADD)
            right = meet
    else:
        canvas.draw_vertical_wire(x, 0, high)
        right = canvas.draw_boxes(x, high, own[0])
    right = canvas.draw_boxes(right, high, branch)
    scales = [_scale(factors[f"inject_{k}"]) if f"inject_{k}" in factors else None for k in range(stage.n_out)]
    if stage.n == 1:
        scales[1] = None
    up, down = scales[0], scales[1] if stage.n_out == 2 else None
    if up is not None and down is not None and up == down:
        right, up, down = canvas.draw_boxes(right, high, up), [], []
    if down is not None and (down or up):
        right = canvas.draw_boxes(right, high, down)
        join_down = canvas.draw_wire(right, right + STEP + 1, high)
    else:
        join_down = 0
    join = right + STEP + 1
    if down is not None and up is not None and up:
        right = canvas.draw_boxes(join_down, high, up)
        join = right + STEP + 1
    elif down is not None and not up:
        join_down = join
    canvas.draw_wire(right, join, high)
    if up is not None:
        canvas.draw_vertical_wire(join, 0, high)
        canvas.write(join, 0, ADD)
    if down is not None:
        canvas.draw_vertical_wire(join_down, high, low)
        canvas.write(join_down, low, ADD)
    last = join
    canvas.draw_wire(begins[0], join, 0)
    if stage.n == 1:  # the copy begins at the fork
        canvas.draw_vertical_wire(x, high, low)
        canvas.draw_wire(x, join, low)
    else:
        canvas.write(0, low, names[1])
        canvas.draw_wire(begins[1], join, low)
    if stage.n_out == 1:  # the second stream ends in the first
        last = canvas.draw_wire(join, join + STEP + 1, 0)
        canvas.draw_wire(join, last, low)
        canvas.draw_vertical_wire(last, 0, low)
        canvas.write(last, 0, ADD)
    ends = [canvas.draw_boxes(last, 0, ["N"] * stage.norm_out[0])]
    if stage.n_out == 2:
        ends.append(canvas.draw_boxes(last, low, ["N"] * stage.norm_out[1]))
    for y, end, name in zip((0, low), ends, after, strict=False):
        canvas.draw_wire(end, max(ends), y)
        canvas.draw_arrow(max(ends), y, name)
    canvas.streams = (0, low) if stage.n_out == 2 else (0,)
    return canvas


def _scale(factor: FactorText | None) -> list[str]:
    return [f"{'⊙' if factor.is_vector else '×'}{factor.text}"] if factor is not None and factor.text else []


def _is_injection(text: StageText) -> bool:
    """Return whether the second of two streams is mixed into the first, which is then read and written."""
    stage = text.stage
    if not _has_names(text) or stage.coefficients is not None or not stage.n == stage.n_out == 2 or stage.reads > 1:
        return False
    is_own = text.mixed(1) == names_of(stage)[1] and "inject_1" not in text.factors and not stage.norm_out[1]
    return is_own and text.mixed(0) == text.read() and "mix_0_1" in text.factors and "mix_0_0" in text.factors


def _injection(text: StageText) -> Canvas:
    """Draw the first stream above, with the second one added before the branch."""
    stage, canvas = text.stage, Canvas()
    names, labels = names_of(stage), text.labels_after
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
    canvas.draw_vertical_wire(start, 0, 2)
    branch = ["N"] * stage.norm_in + ["f"] + ["N"] * stage.norm_branch
    right = canvas.draw_boxes(start, 2, branch + _scale(text.factors.get("inject_0")))
    join = canvas.draw_wire(right, right + STEP + 1, 2)
    canvas.draw_vertical_wire(join, 0, 2)
    canvas.draw_wire(start, join, 0)
    canvas.write(join, 0, ADD)
    end = canvas.draw_boxes(join, 0, ["N"] * stage.norm_out[0])
    canvas.draw_arrow(end, 0, labels[0])
    canvas.draw_wire(begins[1], end, low)
    canvas.draw_arrow(end, low, labels[1])
    canvas.streams = (0, low)
    return canvas


def _end_of_two(head: StageText, norm: list[str], low: int) -> Canvas:
    """Draw the sum of two streams, each with its norm and factor, and the norm of the sum."""
    canvas = Canvas()
    canvas.streams = (0, low)
    names = names_of(head.stage)
    rights = []
    for j, y in enumerate((0, low)):
        labels = ["N"] * head.stage.norm_streams[j]
        is_read = f"collapse_0_{j}" in head.factors
        labels += _scale(head.factors[f"collapse_0_{j}"]) if is_read else []
        x = canvas.write(0, y, f"{names[j]} ") - 1
        rights.append(canvas.draw_boxes(x, y, labels) if is_read else -1)
    join = max(*rights, len(names[0]) + 1) + 1 + STEP
    for y, right in zip((0, low), rights, strict=True):
        if right >= 0:
            canvas.draw_wire(max(right, len(names[0]) + 1), join, y)
    canvas.draw_vertical_wire(join, 0, low)
    canvas.write(join, 0, ADD)
    canvas.draw_arrow(canvas.draw_boxes(join, 0, norm), 0, "y")
    return canvas
