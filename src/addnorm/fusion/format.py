"""What `fuse` did as a reader sees it: in a terminal, in a notebook, as plain text.

First the Add & Norms, those that are alike as one line; then the proof, by the tensors that use most of their limits; then
what it brings, and how much that could be at all.
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from addnorm.fusion.fusion import Fusion
from addnorm.fusion.measured import Measured
from addnorm.fusion.pattern import Boundary
from addnorm.fusion.proof import Difference, Proof, worst
from addnorm.stream.find.inspection import MAX_PATHS, NORM_NAMES, mask_numbers, merge_paths
from addnorm.wirings.equation import number

__all__ = ["as_html", "as_text", "on_console"]

WIDTH = 100  # of plain text
INDENT = "  "
MODEL = "the model"  # whose own forward it is, where there is no path
WRONG = "bold red"
NO_GRAPH = "the frontend of torch.compile captures nothing of it"


@dataclass(frozen=True)
class Rows:
    """A table; a line that is wrong is red."""

    columns: tuple[str, ...]
    lines: Sequence[Sequence[str]]
    right: tuple[str, ...] = ()
    folded: tuple[str, ...] = ()
    wrong: bool = False


Part = Text | Padding | Rows


def on_console(done: Fusion) -> Iterator[Any]:
    """For rich."""
    for part in _parts(done):
        yield _table(part) if isinstance(part, Rows) else part


def as_text(done: Fusion) -> str:
    """Without colours."""
    screen = Console(file=io.StringIO(), width=WIDTH, color_system=None, highlight=False, force_terminal=False)
    with screen.capture() as captured:
        screen.print(done)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def as_html(done: Fusion) -> str:
    """For a notebook."""
    return "".join(_html_table(part) if isinstance(part, Rows) else _html_text(part) for part in _parts(done))


def _note(text: str, style: str = "") -> Padding:
    """Below what it is said of, and set in."""
    return Padding(Text(text, style), (0, 0, 0, len(INDENT)), expand=False)


# The parts.


def _parts(done: Fusion) -> Iterator[Part]:
    yield _head(done)
    if done.fused:
        if not done.proof.holds:
            yield Text("\nTried:")
        yield from _fused(done.fused)
    if done.left:
        yield Text("\nLeft as they were:")
        yield _left(done.left)
    if done.fused or not done.proof.holds:
        yield from _proof(done.proof)
    if done.measured is not None:
        yield from _brings(done.measured, done.inductor)


def _head(done: Fusion) -> Text:
    """The model and how many, in a sentence."""
    fused, found = len(done.fused), len(done.boundaries)
    if not found:
        what = Text(f"{'no norm of a sum was found' if done.graphs else NO_GRAPH}; it is as it was")
    elif not done.proof.holds:
        what = Text("!! the proof failed, and it is as it was", WRONG)
    elif not fused:
        none = "its Add & Norm is not" if found == 1 else f"none of {found} Add & Norms is"
        what = Text(f"{none} fused; it is as it was")
    else:
        what = Text.assemble(
            (f"{fused} of {_many(found, 'Add & Norm')}", "bold cyan"), f" {'is' if fused == 1 else 'are'} fused"
        )
    more = f", in {done.graphs} graphs" * (done.graphs > 1) + ", compiled by Inductor" * done.inductor
    return Text.assemble((done.model, "bold"), f", {done.proof.mode}: ", what, more)


def _fused(boundaries: Sequence[Boundary]) -> Iterator[Part]:
    """What all have in common, and a line for those that are alike."""
    groups = _alike(boundaries)
    cells = [_cells(group) for group in groups]
    same = [name for name in ("norm is", "returns", "dtype") if len({line[name] for line in cells}) == 1]
    if same:
        words = {"norm is": "{}", "returns": "returns {}", "dtype": "in {}"}
        said = ", ".join(words[name].format(cells[0][name]) for name in same)
        yield _note(f"{'each ' if len(boundaries) > 1 else ''}{said}")
    names = tuple(name for name in cells[0] if name not in same)
    yield Rows(names, [[line[name] for name in names] for line in cells], right=("",), folded=("add in", "norm"))


def _left(boundaries: Sequence[Boundary]) -> Rows:
    lines = [[f"{len(group)} x", *_paths(group), str(group[0].reason)] for group in _alike(boundaries)]
    return Rows(("", "add in", "norm", "because"), lines, right=("",), folded=("add in", "norm", "because"))


def _alike(boundaries: Sequence[Boundary]) -> list[list[Boundary]]:
    """Those that are the same but for the number of their layer."""
    groups: dict[Any, list[Boundary]] = {}
    for one in boundaries:
        same = one.kind, one.eps, one.casting, one.stream, one.dtype, one.reason, mask_numbers(one.add), mask_numbers(one.norm)
        groups.setdefault(same, []).append(one)
    return [*groups.values()]


def _cells(group: Sequence[Boundary]) -> dict[str, str]:
    first = group[0]
    add, norm = _paths(group)
    casting = f", casting {first.casting}" if first.casting != "float32" else ""
    return {
        "": f"{len(group)} x", "add in": add, "norm": norm,
        "norm is": f"{NORM_NAMES[first.kind]} {'' if first.eps is None else number(first.eps)}".strip() + casting,
        "returns": "y and the sum" if first.stream else "y", "dtype": first.dtype,
    }  # fmt: skip


def _paths(group: Sequence[Boundary]) -> tuple[str, str]:
    """Of the module that adds and of the norm; that from the module on, if it is inside."""
    add, norm = merge_paths([one.add for one in group]), merge_paths([one.norm for one in group])
    inside = all(one.add and one.norm.startswith(f"{one.add}.") for one in group)
    return add or MODEL, norm.removeprefix(add) if inside and norm.startswith(add) else norm or MODEL


def _proof(proof: Proof) -> Iterator[Part]:
    """Which tensors were compared; of each kind the one that is closest to its limit, or those that are beyond."""
    kinds = {"output": proof.outputs, "gradient": proof.gradients}
    wrong = {
        kind: sorted((one for one in of if not one.holds), key=lambda one: -one.share) for kind, of in kinds.items()
    }
    if proof.holds:
        yield Text(f"\n{_holds(proof)}")
        closest = [(kind, worst(of)) for kind, of in kinds.items()]
        yield _differences([(kind, one) for kind, one in closest if one is not None], wrong=False)
    else:
        count = " and ".join(f"{len(of)} of {_many(len(kinds[kind]), kind)}" for kind, of in wrong.items() if of)
        yield Text(f"\n!! {count} are off by more than their limit:", WRONG)
        yield _differences([(kind, one) for kind, of in wrong.items() for one in of[:MAX_PATHS]], wrong=True)
        more = [f"{len(of) - MAX_PATHS} more {kind}s" for kind, of in wrong.items() if len(of) > MAX_PATHS]
        if more:
            yield _note(f"and {' and '.join(more)}", WRONG)
    yield _note(" ".join(_oracle(proof)), "dim")


def _holds(proof: Proof) -> str:
    """That it holds, and how many tensors are the same to the bit."""
    kinds = {"output": proof.outputs, "gradient": proof.gradients}
    said = []
    for kind, of in kinds.items():
        same = sum(one.off == 0 for one in of)
        bits = f" ({'all' if same == len(of) else same} to the bit)" if same else ""
        said.append(f"{_many(len(of), kind) if of else f'no {kind}s'}{bits}")
    but = " but for rounding" if any(one.off for of in kinds.values() for one in of) else ""
    why = "" if proof.without is None else f" (the model itself raises {proof.without})"
    return f"Proved to be as before{but}: {' and '.join(said)}{why}."


def _differences(found: Sequence[tuple[str, Difference]], *, wrong: bool) -> Rows:
    lines = [
        [kind, one.name, _size(one.off), _size(one.error), _size(one.limit), *["!!"] * wrong] for kind, one in found
    ]
    numbers = ("off", "eager", "limit")
    return Rows(("", "tensor", *numbers, *[" "] * wrong), lines, right=numbers, folded=("tensor",), wrong=wrong)


def _oracle(proof: Proof) -> Iterator[str]:
    """What the numbers are."""
    every = (*proof.outputs, *proof.gradients)
    if proof.holds:
        yield "Of each kind the tensor nearest its limit."
    if any(one.error is not None for one in every):
        yield f"off: from before; eager: its own error, from {proof.oracle}."
    else:
        yield f"off: from before. Eager's own error is not known ({proof.oracle})."
    if any(math.isinf(one.off) for one in every):
        yield "inf: another shape or dtype, NaN, or integers that differ."


def _brings(found: Measured, inductor: bool) -> Iterator[Part]:
    """The share first, since it bounds the rest."""
    share = f"{_percent(found.share)} of the forward pass"
    if inductor:
        yield Text(
            f"\nAdd & Norm was {share} without a compiler: no more comes from fusing it; the rest is Inductor's."
        )
    else:
        free = f"{1 / (1 - found.share):.2f} times as fast" if found.share < 1 else "done"
        yield Text(f"\nAdd & Norm was {share}: were it free, the pass would be {free}. No fusing can gain more.")
    lines = []
    for name, times in (("inference", found.inference), ("training step", found.training)):
        if times is not None:
            lines.append([name, _seconds(times.before), _seconds(times.after), f"{times.ratio:.2f} times as fast"])
    if found.saved is not None:
        before, after = found.saved
        lines.append(["kept for backward", _bytes(before), _bytes(after), _change(before, after)])
    yield Rows(("", "before", "after", " "), lines, right=("before", "after"))
    rounds = " and ".join(str(times.rounds) for times in (found.inference, found.training) if times is not None)
    yield _note(f"Medians of {rounds} runs, before and after in turn.", "dim")


# In words and numbers.


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _size(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.1 or not share else f"{100 * share:.2g}%"


def _seconds(value: float) -> str:
    scale, unit = next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms")) if value >= s), (1e-6, "µs"))
    return f"{_digits(value / scale)} {unit}"


def _bytes(value: int) -> str:
    scale, unit = next(((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if value >= s), (1.0, "B"))
    return f"{_digits(value / scale)} {unit}"


def _digits(value: float) -> str:
    """Three of them."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _change(before: int, after: int) -> str:
    if before == after or not before:
        return "the same" if before == after else "more"
    return f"{_percent(abs(after / before - 1))} {'less' if after < before else 'more'}"


# As rich and HTML have it.


def _table(rows: Rows) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)  # the indent
    for name in rows.columns:
        table.add_column(
            Text(name),
            justify="right" if name in rows.right else "left",
            overflow="fold",
            no_wrap=name not in rows.folded,
        )
    for line in rows.lines:
        table.add_row("", *map(Text, line), style=WRONG if rows.wrong else None)
    return table


def _html_table(rows: Rows) -> str:
    def cell(tag: str, name: str, text: str) -> str:
        style = f"text-align:{'right' if name in rows.right else 'left'}{';color:#b00' * rows.wrong}"
        return f"<{tag} style='{style}'>{html.escape(text)}</{tag}>"

    head = "".join(cell("th", name, name) for name in rows.columns)
    lines = ("".join(map(cell, ["td"] * len(line), rows.columns, line)) for line in rows.lines)
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{line}</tr>' for line in lines)}</tbody></table>"
    )


def _html_text(part: Text | Padding) -> str:
    text = part.renderable if isinstance(part, Padding) else part
    said = html.escape(str(text).strip())
    return f"<p>{f'<b>{said}</b>' if '!!' in said else said}</p>"
