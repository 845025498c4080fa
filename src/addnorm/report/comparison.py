"""The report of a comparison of wirings: the verdict, the curves, everything by depth, and the theory beside what was measured.

Every sentence and every number is computed from the results; what was not measured has no figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from addnorm.lab import plot
from addnorm.lab.comparison import Arm, Comparison
from addnorm.nn.equation import number as constant
from addnorm.report import curves, initial
from addnorm.report.blocks import Block, Cell, Facts, Finding, Findings, Page, Section, Table
from addnorm.report.numbers import number

__all__ = ["of_comparison"]

TOP = (
    "scope",
    "loss",
    "warm-up",
    "failures",
    "grid",
    "at init",
)  # what the verdict has; the rest stands beside its figures


def of_comparison(found: Comparison, facts: Mapping[str, str] | None = None) -> Page:
    """The report of what `addnorm.lab.compare` found.

    Args:
        found: the comparison.
        facts: more for the settings, such as the command.

    Example:
        >>> from addnorm import lab, report
        >>> quick = lab.Protocol(n_layers=2, warm_ups=0, steps=4, d=16, n_heads=2, tokens=8, batch=4)
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
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) + (" compared" if len(names) > 1 else "")


def _subtitle(found: Comparison) -> str:
    if not found.runs:
        return "Residual wirings before training: what each does to the stream and to its gradient, by depth."
    return (
        f"Residual wirings of a character model, trained on {found.text['name']}: how well each learns, and what it does to the "
        "stream and to its gradient."
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
    tiles = {f"{arm.wiring}, {n} layers": number(arm.best.loss(), 3) for arm in arms[:4]}
    return tiles | {"Frequencies alone": number(found.text["entropy"], 3)}


def _learning(found: Comparison) -> list[Block]:
    blocks: list[Block | None] = []
    for n, _ in found.by_depth():
        blocks += [curves.learning(found, n), curves.training(found, n)]
        if len(found.protocol.rates) > 1:
            blocks.append(curves.rates(found, n))
    return [*(block for block in blocks if block is not None), _settings_tried(found)]


def _settings_tried(found: Comparison) -> Table:
    """Every setting, and how it ended."""
    best = {id(arm.best) for arm in found.arms}
    rows: list[list[Cell]] = [
        [
            group.wiring, group.n_layers, constant(group.lr), str(group.warm_up or "none"),
            group.loss("validation"), group.loss(),
            ", ".join(number(loss, 4) for loss in group.losses()), str(group.diverged or "none"),
            "yes" if id(group) in best else "",
        ]
        for group in found.groups
    ]  # fmt: skip
    head = ["wiring", "layers", "rate", "warm-up", "validation", "test", "test by seed", "diverged", "judged by this"]
    return Table(
        head, rows, "Every setting: chosen by the loss on the validation part, judged by that on the test part"
    )


def _trained(found: Comparison, n: int) -> list[Block]:
    """What trained models of a depth did to stream and gradient."""
    shown = [one for one in plot.chosen(found, n) if any(run["sites"] for run in one.group.runs)]
    if not shown:
        return []
    at_best = plot.best(found, n)
    first = [one._replace(group=arm.groups[0]) for one, arm in zip(at_best, _arms(found, n), strict=True)]
    blocks: list[Block | None] = [
        Findings(_of_depth(found, n, "gradient")),
        curves.by_depth(f"before-{n}", first, after=False),
    ]
    if any("after" in run for one in shown for run in one.group.runs):
        blocks.append(curves.by_depth(f"after-{n}", shown, after=True))
    blocks += [Findings(_of_depth(found, n, "memory")), curves.memory(f"map-{n}", at_best)]
    if any(run.get("ablation") for one in at_best for run in one.group.runs):
        blocks += [Findings(_of_depth(found, n, "ablation")), curves.ablation(f"ablation-{n}", at_best)]
    return [block for block in blocks if block is not None and not (isinstance(block, Findings) and not block.items)]


def _arms(found: Comparison, n: int) -> list[Arm]:
    return [arm for arm in found.arms if arm.n_layers == n]


def _of_depth(found: Comparison, n: int, about: str) -> Sequence[Finding]:
    """What the verdict says of a matter at a depth."""
    at = [depth for depth, _ in found.by_depth()].index(n)
    said = _said(found, about)
    return said[at : at + 1]


def _settings(found: Comparison) -> dict[str, str]:
    p, text = found.protocol, found.text
    told = {"wirings": ", ".join(found.compared)}
    if found.runs:
        told |= {
            "layers": _listed(p.n_layers), "learning rates": _listed(p.rates), "warm-up steps": _listed(p.warm_ups),
            "seeds": _listed(p.seeds), "steps": str(p.steps),
            "model": f"d = {p.d}, {p.n_heads} heads, feed-forward {4 * p.d}, {'LayerNorm' if p.norm == 'layer' else 'RMSNorm'}, "
            f"{text['symbols']} symbols",
            "batch": f"{p.batch} sequences of {p.tokens} characters",
            "optimizer": "Adam, constant rate after a linear warm-up, no clipping, no weight decay",
            "weights": "by each wiring's own rule; where that is plain Xavier, queries, keys and values as one matrix",
            "text": f"{text['name']}, {text['characters']:,} characters, SHA-256 {text['digest']}; 80 % to train on, 10 % to "
            "choose by, 10 % to judge by",
            "knowing nothing": f"{text['uniform']:.3f} nats; the frequencies alone: {text['entropy']:.3f}",
            "one thread a run": f"{sum(run['seconds'] for run in found.runs):,.0f} s of training in all",
        }  # fmt: skip
    if found.at_init:
        seeds = sorted({seed for row in found.at_init for seed in row["seeds"]})
        told["stacks at init"] = (
            f"{_listed(sorted({row['n_layers'] for row in found.at_init}))} layers, {len(seeds)} seeds, width 64, one sequence "
            "of 32 tokens"
        )
    return told


def _listed(values: Sequence[float]) -> str:
    return ", ".join(constant(value) if isinstance(value, float) else str(value) for value in values)


def _foot(found: Comparison) -> list[str]:
    """With what the results were made, and when."""
    made = [run for run in (*found.runs, *found.stacks) if "addnorm" in run]
    versions = dict.fromkeys(f"addnorm {one['addnorm']}, torch {one['torch']}" for one in made)
    dates = sorted(one["date"] for one in made)
    lines = ["Made with " + "; ".join(versions) + "."] if versions else []
    return lines + ([f"Results of {dates[0]} to {dates[-1]}."] if dates else [])
