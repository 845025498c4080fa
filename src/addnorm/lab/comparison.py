"""`Comparison`: the results with their verdict, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from addnorm._util.blocks import Block, Cell, Column, Finding, Paragraph, Table, TableRow
from addnorm._util.numbers import format_number
from addnorm._util.render import Rendered
from addnorm.lab.results import Group, Results
from addnorm.lab.streams import Numbers
from addnorm.lab.verdict import find_verdict
from addnorm.wirings.factors import format_factor

SCHEMA = "addnorm.comparison"
VERSION = 1
LONG = 48  # rows: longer tables are collapsed on a page
DETAIL = ("losses", "recorded", "map", "after", "sites")  # numbers by step and depth, only in results.jsonl


class Comparison(Results, Rendered):
    """Comparison of wirings, returned by `addnorm.lab.compare`. It prints its verdict and a table of the settings.

    Attributes:
        compared: names of the wirings.
        protocol: the `Protocol`.
        runs: the results of the runs, JSON types.
        stacks: the statistics of untrained stacks, JSON types.
        text: name and size of the text, and the losses of trivial models.

    Example:
        >>> from addnorm import lab
        >>> quick = lab.Protocol(num_layers=2, warm_ups=0, steps=4, d_model=16, nhead=2, tokens=8, batch=4)
        >>> comparison = lab.compare(["post_ln", "pre_ln"], quick, at_init=False, jobs=1)
        >>> comparison.compared, len(comparison.runs)
        (('post_ln', 'pre_ln'), 2)
    """

    @cached_property
    def verdict(self) -> list[Finding]:
        """Findings that follow from the numbers, each with its criterion."""
        return find_verdict(self)

    def to_dict(self) -> Numbers:
        """Return the comparison as JSON types, without the numbers by step and depth, which `results.jsonl` has."""
        return {
            "schema": SCHEMA, "schema_version": VERSION, "compared": [*self.compared], "protocol": self.protocol.settings(),
            "illustration": self.protocol.is_illustration, "text": self.text,
            "verdict": [
                {"about": one.topic, "sentence": one.claim, "criterion": one.criterion, "numbers": one.numbers}
                for one in self.verdict
            ],
            "checks": [check.to_dict() for check in self.checks],
            "runs": [{name: value for name, value in run.items() if name not in DETAIL} for run in self.runs],
        }  # fmt: skip

    def _blocks(self) -> Iterator[Block]:
        yield from self.verdict
        if self.groups:
            yield Paragraph("")
            yield self.tabulate_settings(self.groups)
        for check in self.checks:
            if check.holds is False:
                measured = ", ".join(f"{name} {value:.3g}" for name, value in check.measured.items())
                yield Paragraph(f"Does not hold: {check.name} ({check.criterion}): {measured}", style="bad")

    def tabulate_settings(self, groups: Sequence[Group]) -> Table:
        """Return a table of settings with their losses."""
        best = {id(arm.best) for arm in self.arms}
        rows = []
        for group in groups:
            seeds = ", ".join(format_number(loss, 4) for loss in group.losses())
            cells: list[Cell] = [
                group.wiring, group.num_layers, format_factor(group.lr), str(group.warm_up or "none"), group.loss("validation"),
                group.loss(), seeds, str(group.diverged or "none"), "yes" if id(group) in best else "",
            ]  # fmt: skip
            rows.append(TableRow(cells, "strong" if id(group) in best else ""))
        columns = [
            Column("wiring", fold=True), Column("layers", drop="last"), Column("rate"), Column("warm-up", drop="last"),
            Column("validation", drop="first"), Column("test"), Column("test by seed", fold=True),
            Column("diverged", drop="last"), Column("judged"),
        ]  # fmt: skip
        caption = "All settings, losses in nats a character. The best is chosen by the validation loss, judged by the test loss"
        return Table(columns, rows, caption, len(rows) > LONG)
