"""The report of a comparison of wirings: the verdict, the curves, everything by depth, and the theory beside what was measured.

Every sentence and every number is computed from the results; what was not measured has no figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from addnorm._util.numbers import format_number
from addnorm.lab import plot
from addnorm.lab.comparison import Comparison
from addnorm.report import curves, initial
from addnorm.report.blocks import Block, Cell, Facts, Finding, Findings, Page, Section, Table
from addnorm.report.model import versions
from addnorm.wirings.row import format_factor as constant

__all__ = ["of_comparison"]

TOP = (
    "scope",
    "loss",
    "warm-up",
    "failures",
    "grid",
    "at init",
)  # what the verdict has; the rest stands beside its figures


NAMED = 5  # wirings in the title
TILES = 4  # losses that are shown large
ABREAST = 8  # wirings in one drawing: as many as colours and dashes tell apart
LONG = 48  # rows of a table that are seen at once


def of_comparison(found: Comparison, facts: Mapping[str, str] | None = None) -> Page:
    """The report of what `addnorm.lab.compare` found.

    Args:
        found: the comparison.
        facts: more for the settings, such as the command.

    Example:
        >>> from addnorm import lab, report
        >>> quick = lab.Protocol(num_layers=2, warm_ups=0, steps=4, d_model=16, nhead=2, tokens=8, batch=4)
        >>> page = report.of_comparison(lab.compare(["post_ln", "pre_ln"], quick, at_init=False, jobs=1))
        >>> [section.title for section in page.sections][:2]
        ['Learning', 'By depth: 2 layers']
    """
    sections = [Section("Learning", _LEARNING, _learning(found))] if found.runs else []
    for n, _ in found.by_depth():
        sections.append(Section(f"By depth: {n} layers", "", _trained(found, n)))
    sections += initial.sections(found)
    sections.append(Section("Settings", "", [Facts(_settings(found) | dict(facts or {}))]))
    return Page(
        _title(found), _subtitle(found), _said(found, *TOP), [one for one in sections if one.blocks], _tiles(found),
        _foot(found),
    )  # fmt: skip


_LEARNING = (
    "The same batches in the same order for every wiring, and the same weights wherever two wirings draw them alike. The loss is "
    "in nats a character."
)


def _title(found: Comparison) -> str:
    names = [*found.compared]
    if len(names) > NAMED:
        return f"{len(names)} residual wirings compared"
    return f"{_and(names)} {'compared' if len(names) > 1 else 'measured'}"


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _subtitle(found: Comparison) -> str:
    one = len(found.compared) == 1
    them, each, learn = ("A residual wiring", "it", "it learns") if one else ("Residual wirings", "each", "each learns")
    if not found.runs:
        return f"{them} before training: what {each} does to the stream and to its gradient, by depth."
    return (
        f"{them} of a character model, trained on {found.text['name']}: how well {learn}, and what it does to the stream and to "
        "its gradient."
    )


def _said(found: Comparison, *about: str) -> list[Finding]:
    """The findings about some matters, in the order of the matters."""
    return [
        Finding(
            one.sentence, "refuted" if one.about == "at init" and one.numbers["met"] < one.numbers["of"] else "noted"
        )
        for what in about
        for one in found.verdict
        if one.about == what
    ]


def _tiles(found: Comparison) -> dict[str, str]:
    """The loss of each wiring at its best, of the deepest models."""
    depths = [*found.by_depth()]
    if not depths:
        judged = [check for check in found.checks if check.holds is not None]
        return {"Figures met": f"{sum(bool(check.holds) for check in judged)} of {len(judged)}"}
    n, arms = depths[-1]
    lowest = sorted(arms, key=lambda arm: arm.best.loss())[:TILES]
    tiles = {f"{arm.wiring}, {n} layers": _loss(arm.best.loss()) for arm in arms if arm in lowest}
    return tiles | {"Frequencies alone": format_number(found.text["entropy"], 3)}


def _loss(loss: float) -> str:
    return format_number(loss, 3) if math.isfinite(loss) else "diverged"


class Part(NamedTuple):
    """Some of the wirings, in drawings of their own."""

    found: Comparison
    name: str  # what the names of its drawings end in
    of: str  # what their titles end in


def _parts(found: Comparison) -> Iterator[Part]:
    """All wirings, or where these are more than one can tell apart, some at a time."""
    there = [name for name in found.compared if any(run["settings"]["wiring"] == name for run in found.runs)]
    count = -(-len(there) // ABREAST)
    size = -(-len(there) // max(count, 1))
    for k in range(count):
        names = there[k * size : (k + 1) * size]
        runs = [run for run in found.runs if run["settings"]["wiring"] in names]
        own = (f"-{k + 1}", f": {_and(names)}") if count > 1 else ("", "")
        yield Part(replace(found, runs=runs), *own)


def _learning(found: Comparison) -> list[Block]:
    blocks: list[Block | None] = []
    for n, _ in found.by_depth():
        for part in _parts(found):
            if any(run["settings"]["num_layers"] == n for run in part.found.runs):
                of = (part.found, n, part.name, part.of)
                blocks += [curves.learning(*of), curves.training(*of)]
                if len(found.protocol.rates) > 1:
                    blocks.append(curves.rates(*of))
    return [*(block for block in blocks if block is not None), _settings_tried(found)]


def _settings_tried(found: Comparison) -> Table:
    """Every setting, and how it ended."""
    best = {id(arm.best) for arm in found.arms}
    rows: list[list[Cell]] = [
        [
            group.wiring, group.num_layers, constant(group.lr), str(group.warm_up or "none"),
            group.loss("validation"), group.loss(),
            curves.listed(group.losses()), str(group.diverged or "none"),
            "yes" if id(group) in best else "",
        ]
        for group in found.groups
    ]  # fmt: skip
    head = ["wiring", "layers", "rate", "warm-up", "validation", "test", "test by seed", "diverged", "judged by this"]
    caption = "Every setting: chosen by the loss on the validation part, judged by that on the test part"
    return Table(head, rows, caption, len(rows) > LONG)


def _trained(found: Comparison, n: int) -> list[Block]:
    """What trained models of a depth did to stream and gradient."""
    at = replace(found, runs=[run for run in found.runs if run["settings"]["num_layers"] == n], stacks=[])
    before: list[Block | None] = []
    maps: list[Block | None] = []
    without: list[Block] = []
    for part in _parts(at):
        best = plot.best_groups(part.found, n)
        first = [one._replace(group=arm.groups[0]) for one, arm in zip(best, part.found.arms, strict=True)]
        before += [
            curves.by_depth(f"before-{n}{part.name}", first, after=False, of=part.of),
            curves.by_depth(f"after-{n}{part.name}", plot.groups_by_warm_up(part.found, n), after=True, of=part.of),
        ]
        maps.append(curves.memory(f"map-{n}{part.name}", best, part.of))
        without += curves.ablation(f"ablation-{n}{part.name}", best, part.of)
    blocks: list[Block] = []
    for about, figures in (("gradient", before), ("memory", maps), ("ablation", without)):
        drawings: list[Block] = [one for one in figures if one is not None]
        if drawings:  # and else the numbers of which it tells are not there
            said = _said(at, about)
            blocks += [*([Findings(said)] if said else []), *drawings]
    return blocks


def _settings(found: Comparison) -> dict[str, str]:
    p, text = found.protocol, found.text
    told = {"wirings": ", ".join(found.compared)}
    if found.runs:
        told |= {
            "layers": _listed(p.num_layers), "learning rates": _listed(p.rates), "warm-up steps": _listed(p.warm_ups),
            "seeds": _listed(p.seeds), "steps": str(p.steps),
            "model": f"d_model = {p.d_model}, {p.nhead} heads, feed-forward {4 * p.d_model}, "
            f"{'LayerNorm' if p.norm == 'layer' else 'RMSNorm'}, {text['symbols']} symbols",
            "batch": f"{p.batch} sequences of {p.tokens} characters",
            "optimizer": "Adam, constant rate after a linear warm-up, no clipping, no weight decay",
            "weights": "by each wiring's own rule; where that is plain Xavier, queries, keys and values as one matrix",
            "text": f"{text['name']}, {text['characters']:,} characters, SHA-256 {text['digest']}; 80 % to train on, 10 % to "
            "choose by, 10 % to judge by",
            "loss of knowing nothing": f"{text['uniform']:.3f} nats; of knowing the frequencies alone: {text['entropy']:.3f}",
            "time": f"{sum(run['seconds'] for run in found.runs):,.0f} s of training in all, on one thread a run",
        }  # fmt: skip
    if found.at_init:
        seeds = sorted({seed for row in found.at_init for seed in row["seeds"]})
        told["stacks at init"] = (
            f"{_listed(sorted({row['num_layers'] for row in found.at_init}))} layers, {len(seeds)} seeds, width 64, one sequence "
            "of 32 tokens"
        )
    return told | {"this report": ", ".join(f"{name} {version}" for name, version in versions().items())}


def _listed(values: Sequence[float]) -> str:
    return ", ".join(constant(value) if isinstance(value, float) else str(value) for value in values)


def _foot(found: Comparison) -> list[str]:
    """With what the results were made, and when."""
    made = [run for run in (*found.runs, *found.stacks) if "addnorm" in run]
    versions = dict.fromkeys(f"addnorm {one['addnorm']}, torch {one['torch']}" for one in made)
    dates = sorted(one["date"] for one in made)
    lines = ["Made with " + "; ".join(versions) + "."] if versions else []
    ends = (
        [
            *dict.fromkeys(
                date[:16].replace("T", " ") + (" UTC" if "T" in date else "") for date in (dates[0], dates[-1])
            )
        ]
        if dates
        else []
    )
    return lines + ([f"Results of {' to '.join(ends)}."] if ends else [])
