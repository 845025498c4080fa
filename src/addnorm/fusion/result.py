"""Result of `fuse`: the Add & Norms that are one call now, the others with the reason, the proof, the share, the benchmark."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from addnorm._util.blocks import Block, Column, Paragraph, Table, TableRow
from addnorm._util.jsonio import Document
from addnorm._util.numbers import (
    format_bytes,
    format_count,
    format_number,
    format_percent,
    format_seconds,
    join_words,
)
from addnorm._util.render import Rendered
from addnorm._util.site_tables import mask_numbers, merge_paths
from addnorm.fusion.benchmark import Benchmark, Timing
from addnorm.fusion.match import Boundary
from addnorm.fusion.proof import Proof
from addnorm.fusion.tolerance import Difference, worst
from addnorm.stream.find.labels import NORM_NAMES

MODEL = "the model"  # in place of the model's own path, which is empty
MAX_SHOWN = 3  # outputs, and gradients, that a failed proof names
MAX_LOAD = 1.0  # before a measurement; a higher one is remarked on
NOUNS = {"call": "difference of a fused call", "output": "output", "gradient": "gradient"}
NO_GRADIENT = (
    "nothing is proven of training, since no output depends on a parameter or an input that requires a gradient"
)
MIN_GAIN = 1.02  # times as fast; a smaller bound is called no gain


@dataclass(frozen=True, repr=False)
class Fusion(Document, Rendered):
    """Result of `addnorm.fuse`. It prints as a report, in a notebook as HTML.

    Attributes:
        model: class name of the model.
        boundaries: its Add & Norms in the order in which they run; those that are not fused have a `reason`.
        num_graphs: number of graphs in one run; more than one if torch.compile's frontend breaks the graph.
        proof: differences of outputs and gradients from the original model, with their tolerances.
        inductor: whether the graphs are compiled by Inductor.
        share: of Add & Norm in the time of the eager forward pass, from 0 to 1; None if it is not known, as with activation
            checkpoints.
        benchmark: times and memory before and after; None if not requested, or if nothing can be fused.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
        >>> fusion = addnorm.fuse(model, torch.randn(2, 5, 16), benchmark=False)
        >>> len(fusion.boundaries), len(fusion.fused), fusion.num_graphs
        (2, 2, 1)
    """

    model: str
    boundaries: tuple[Boundary, ...]
    num_graphs: int
    proof: Proof
    inductor: bool = False
    share: float | None = None
    benchmark: Benchmark | None = None

    @property
    def fused(self) -> tuple[Boundary, ...]:
        """Add & Norms that are one call now."""
        return tuple(boundary for boundary in self.boundaries if boundary.is_fused)

    @property
    def unfused(self) -> tuple[Boundary, ...]:
        """Add & Norms that are unchanged, each with its reason."""
        return tuple(boundary for boundary in self.boundaries if not boundary.is_fused)

    @property
    def is_applied(self) -> bool:
        """Whether the model runs the fused calls now."""
        return bool(self.fused) and self.proof.holds and not (self.benchmark and self.benchmark.is_slower)

    @property
    def note(self) -> str:
        """Sentence about runs that are slower when fused, and whether the model is fused; empty if no run is slower."""
        changes = self.benchmark.changes if self.benchmark else {}
        if all(timing.ratio > 1 for timing in changes.values()):
            return ""
        runs = join_words([f"{name} {_ratio(timing)}" for name, timing in changes.items()])
        if self.is_applied:
            return f"Fused, one run is slower and the other faster: {runs}. `unfuse` restores the model."
        return f"Fused it is slower here: {runs}. benchmark=False (--no-benchmark) fuses it all the same."

    @property
    def max_gain(self) -> float | None:
        """Upper bound of the gain in time: how many times as fast the forward pass is if Add & Norm takes no time."""
        return None if self.share is None else 1 / (1 - self.share) if self.share < 1 else math.inf

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        counts = {"fused": len(self.fused), "changed": self.is_applied}
        return {"schema": "addnorm.fusion", "schema_version": 1, **super().to_dict(), "note": self.note, **counts}

    def __repr__(self) -> str:
        return f"<Fusion of {self.model}: {len(self.fused)} of {len(self.boundaries)} Add & Norms fused>"

    def _blocks(self) -> Iterator[Block]:
        yield _headline(self)
        if self.note:
            yield Paragraph(self.note)
        if self.fused:
            if not self.proof.holds:
                yield Paragraph("Attempted:", space=True)
            yield from _fused_table(self.fused)
            yield from _stream_sentences(self.fused)
        if self.unfused:
            yield Paragraph("Not fused:", space=True)
            yield _unfused_table(self.unfused)
        if self.fused or not self.proof.holds:
            yield from _proof_blocks(self.proof)
        if self.share is not None:
            yield Paragraph(_share_sentence(self), space=True)
        if self.benchmark is not None:
            yield from _benchmark_blocks(self, self.benchmark)


class VerificationError(RuntimeError):
    """Failed proof: the fused model differs from the original by more than the tolerance. The model is unchanged.

    Attributes:
        fusion: the result, whose proof names the tensors.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
        >>> try:
        ...     fusion = addnorm.fuse(model, torch.randn(2, 5, 16))
        ... except addnorm.VerificationError as error:
        ...     print(error.fusion.proof)
    """

    def __init__(self, fusion: Fusion) -> None:
        proof = fusion.proof
        most = worst([one for one in proof.calls if not one.holds] or proof.differences)
        basis = "twice the model's own error" if proof.oracle.startswith("float") else "a number of roundings"
        description = ""
        if most is not None:
            basis = "of its fused call by itself" if most in proof.calls else basis
            description = f"{most} ({basis})"
        super().__init__(f"{fusion.model} is not fused: {description}. The model is unchanged.")
        self.fusion = fusion


def _headline(fusion: Fusion) -> Paragraph:
    count, total = len(fusion.fused), len(fusion.boundaries)
    unchanged = "the model is unchanged"
    if not total:
        reason = "no norm of a sum was found" if fusion.num_graphs else "torch.compile captures no graph of it"
        spans: list[Any] = [f"{reason}; {unchanged}"]
    elif not fusion.proof.holds:
        spans = [(f"!! the proof failed; {unchanged}", "bad")]
    elif not count:
        spans = [f"{'its Add & Norm is not' if total == 1 else f'none of {total} Add & Norms is'} fused; {unchanged}"]
    else:
        verb = f"{'is' if count == 1 else 'are'} fused" if fusion.is_applied else f"can be fused; {unchanged}"
        spans = [(f"{count} of {format_count(total, 'Add & Norm')}", "accent"), f" {verb}"]
    details = f", in {fusion.num_graphs} graphs" * (fusion.num_graphs > 1) + ", compiled by Inductor" * fusion.inductor
    return Paragraph((fusion.model, "strong"), f", {fusion.proof.mode}: ", *spans, details)


def _fused_table(boundaries: Sequence[Boundary]) -> Iterator[Block]:
    """Yield what all Add & Norms have in common, and a table with a row for each group of equal ones."""
    rows = [_cells(group) for group in _group(boundaries)]
    common = [name for name in ("norm is", "returns", "dtype") if len({row[name] for row in rows}) == 1]
    if common:
        phrases = {"norm is": "{}", "returns": "returns {}", "dtype": "in {}"}
        text = ", ".join(phrases[name].format(rows[0][name]) for name in common)
        yield Paragraph(f"{'each ' if len(boundaries) > 1 else ''}{text}", indent=2)
    names = [name for name in rows[0] if name not in common]
    yield Table(map(_column, names), [[row[name] for name in names] for row in rows], indent=2)


def _stream_sentences(boundaries: Sequence[Boundary]) -> Iterator[Block]:
    """Yield how many writes of several streams are one call with the read that follows, and why the others are not."""
    writes = [boundary for boundary in boundaries if boundary.writes_streams]
    remarks = Counter(boundary.remark for boundary in writes)
    if writes:
        of = f"{format_count(len(writes), 'write')} of {writes[0].streams} streams"
        text = f"{remarks.pop('', 0)} of {of} in one call with the read that follows"
        text += "".join(f"; {count} in another call: {remark}" for remark, count in remarks.items())
        yield Paragraph(f"{text}.", indent=2)


def _unfused_table(boundaries: Sequence[Boundary]) -> Table:
    rows = [[f"{len(group)} x", *_paths(group), str(group[0].reason)] for group in _group(boundaries)]
    return Table(map(_column, ("", "add in", "norm", "reason")), rows, indent=2)


def _column(name: str) -> Column:
    return Column(name, "left" if name else "right", fold=name in ("add in", "norm", "reason"))


def _group(boundaries: Sequence[Boundary]) -> list[list[Boundary]]:
    """Return groups of Add & Norms that differ only in the number of their layer."""
    groups: dict[Any, list[Boundary]] = {}
    for boundary in boundaries:
        paths = mask_numbers(boundary.add), mask_numbers(boundary.norm)
        key = replace(boundary, add="", norm="", shape=(), weight=None), paths
        groups.setdefault(key, []).append(boundary)
    return [*groups.values()]


def _cells(group: Sequence[Boundary]) -> dict[str, str]:
    first = group[0]
    add, norm = _paths(group)
    total = f"{first.streams} streams" if first.streams else "the sum"
    casting = f", casting {first.casting}" if first.casting != "float32" else ""
    return {
        "": f"{len(group)} x", "add in": add, "norm": norm,
        "norm is": f"{NORM_NAMES.get(first.kind, 'none')} {format_number(first.eps, trim=True)}".strip() + casting,
        "returns": " and ".join(["y"] * (first.kind != "none") + [total] * first.returns_residual), "dtype": first.dtype,
    }  # fmt: skip


def _paths(group: Sequence[Boundary]) -> tuple[str, str]:
    """Return the paths of the modules that add and that normalize, the latter relative to the former if it is inside."""
    add, norm = merge_paths([boundary.add for boundary in group]), merge_paths([boundary.norm for boundary in group])
    is_inside = all(boundary.add and boundary.norm.startswith(f"{boundary.add}.") for boundary in group)
    return add or MODEL, norm.removeprefix(add) if is_inside and norm.startswith(add) else norm or MODEL


def _proof_blocks(proof: Proof) -> Iterator[Block]:
    """Yield the blocks of a proof: the verdict, and a table of the tensors closest to their tolerance or beyond it."""
    kinds = {"call": proof.calls, "output": proof.outputs, "gradient": proof.gradients}
    rows: list[tuple[str, Difference]] = []
    counts: list[str] = []
    remaining: list[str] = []
    for kind, differences in kinds.items():
        failed = sorted((one for one in differences if not one.holds), key=lambda one: -one.tolerance_share)
        closest = worst([one for one in differences if one.is_compared])
        shown = [closest] if proof.holds and closest is not None else failed[:MAX_SHOWN]
        rows += [(kind, difference) for difference in shown]
        if failed:
            counts.append(f"{len(failed)} of {format_count(len(differences), NOUNS[kind])}")
        if len(failed) > MAX_SHOWN:
            remaining.append(f"{len(failed) - MAX_SHOWN} more {NOUNS[kind]}s")
    if proof.holds:
        yield Paragraph(_verdict(proof), space=True)
    else:
        yield Paragraph(f"!! {' and '.join(counts)} exceed the tolerance:", style="bad", space=True)
    yield _difference_table(rows)
    if remaining:
        yield Paragraph(f"and {' and '.join(remaining)}", style="bad", indent=2)
    yield Paragraph(" ".join(_notes(proof)), style="dim", indent=2)


def _verdict(proof: Proof) -> str:
    parts = ["each fused call by itself"] if proof.calls else []
    for kind, differences in (("output", proof.outputs), ("gradient", proof.gradients)):
        compared = [difference for difference in differences if difference.is_compared]
        identical = sum(difference.max_abs == 0 for difference in compared)
        remarks = [f"{'all' if identical == len(compared) else identical} bit-identical"] * bool(identical)
        if len(compared) < len(differences):
            remarks.append(f"{len(differences) - len(compared)} more without a finite number are not compared")
        count = format_count(len(compared), kind) if compared else f"no {kind}s"
        parts.append(count + f" ({', '.join(remarks)})" * bool(remarks))
    is_rounded = any(difference.max_abs for difference in (*proof.outputs, *proof.gradients))
    text = f"Proven equal{' up to rounding' if is_rounded else ''}: {', '.join(parts[:-1])} and {parts[-1]}"
    if proof.gradient_error is not None:
        return f"{text} (the model itself raises {proof.gradient_error})."
    return f"{text}." if proof.gradients else f"{text}: {NO_GRADIENT}."


def _difference_table(differences: Sequence[tuple[str, Difference]]) -> Table:
    columns = [Column(""), Column("tensor", fold=True)]
    columns += [Column(name, "right") for name in ("difference", "eager error", "tolerance")]
    rows = []
    for kind, one in differences:
        numbers = (one.max_abs, one.eager_error, one.tolerance)
        cells = [kind, one.name, *(format_number(number, 2, trim=True) for number in numbers)]
        rows.append(TableRow(cells) if one.holds else TableRow([*cells, "!!"], "bad"))
    is_failed = any(not one.holds for _, one in differences)
    return Table([*columns, Column(" ")] if is_failed else columns, rows, indent=2)


def _notes(proof: Proof) -> Iterator[str]:
    differences = (*proof.outputs, *proof.gradients)
    if proof.holds:
        yield "The tensors closest to their tolerance. Calls are compared on random rows, of every size."
    if any(difference.eager_error is not None for difference in differences):
        yield f"Eager error: of the model before fusing, from {proof.oracle}."
    else:
        yield f"The error of the model before fusing is not known ({proof.oracle})."
    if any(math.isinf(difference.max_abs) for difference in differences):
        yield "inf: shape, dtype, NaN or integers differ."


def _share_sentence(fusion: Fusion) -> str:
    assert fusion.share is not None
    assert fusion.max_gain is not None
    start = f"Add & Norm is {format_percent(fusion.share, 2, trim=True)} of the forward pass: fusing"
    if fusion.max_gain < MIN_GAIN:
        sentence = f"{start} gains no noticeable time"
    else:
        sentence = f"{start} cannot make it more than {fusion.max_gain:.2f} times as fast"
    return f"{sentence}; a larger gain is Inductor's." if fusion.inductor else f"{sentence}."


def _benchmark_blocks(fusion: Fusion, benchmark: Benchmark) -> Iterator[Block]:
    timings = [*benchmark.runs.items()]
    rows = [[name, *_time_cells(timing)] for name, timing in timings]
    if benchmark.saved_bytes is not None:
        before, after = benchmark.saved_bytes
        rows.append(["saved for backward", format_bytes(before), format_bytes(after), _change(before, after)])
    yield Paragraph()
    yield Table(["", Column("before", "right"), Column("after", "right"), Column(" ", fold=True)], rows, indent=2)
    rounds = " and ".join(str(timing.rounds) for _, timing in timings)
    load = "" if benchmark.load is None else f", load {benchmark.load:.1f} before"
    threads = format_count(benchmark.threads, "thread")
    note = f"Medians of {rounds} rounds, ± half the interquartile range, 95% intervals; {threads}{load}."
    yield Paragraph(note, style="dim", indent=2)
    bound = math.inf if fusion.max_gain is None else fusion.max_gain
    beyond = [f"{name} {t.ratio:.3f}" for name, t in timings if t.interval[0] > bound]
    if beyond and not fusion.inductor:
        remark = (
            f"More than the {fusion.max_gain:.2f} times that fusing can gain in a forward pass: {', '.join(beyond)}. The rest is "
            "not fusing: Python code that torch.compile's frontend skips, or a disturbance of the machine."
        )
        yield Paragraph(remark, style="warning", indent=2)
    if benchmark.load is not None and benchmark.load > MAX_LOAD:
        yield Paragraph(
            f"The machine was busy (load {benchmark.load:.1f}): do not trust the times.", style="warning", indent=2
        )


def _time_cells(timing: Timing) -> list[str]:
    times = (timing.before, timing.before_quartiles), (timing.after, timing.after_quartiles)
    cells = [
        f"{format_seconds(median)} ±{format_percent((high - low) / (2 * median), 1)}" for median, (low, high) in times
    ]
    if math.isinf(timing.interval[1]):
        return [*cells, "too few rounds to compare"]
    return [*cells, _ratio(timing) if timing.is_significant else f"no significant difference ({_interval(timing)})"]


def _ratio(timing: Timing) -> str:
    """Return how many times as fast a run is after fusing, with the interval."""
    return f"{timing.ratio:.3f} times as fast ({_interval(timing)})"


def _interval(timing: Timing) -> str:
    low, high = timing.interval
    return f"{low:.3f} to {high:.3f}"


def _change(before: int, after: int) -> str:
    if before == after or not before:
        return "the same" if before == after else "more"
    return f"{format_percent(abs(after / before - 1), 2, trim=True)} {'less' if after < before else 'more'}"
