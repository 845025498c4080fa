"""`Comparison`: the results with their verdict, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from addnorm._util.blocks import Block, Column, Finding, Paragraph, Table, TableRow
from addnorm._util.render import Rendered
from addnorm.lab.measure import Numbers
from addnorm.lab.results import Results
from addnorm.lab.verdict import find_verdict, format_loss
from addnorm.wirings.factors import format_factor

SCHEMA = "addnorm.comparison"
VERSION = 1
WIDTH = 100  # columns of a sentence
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
        for finding in self.verdict:
            yield Paragraph(finding.claim, hang=2, width=WIDTH)
        if self.groups:
            yield Paragraph("")
            yield self._settings()
            yield Paragraph(
                "Losses in nats a character on the test part. A wiring is judged by the setting marked yes.",
                style="dim",
            )
        for check in self.checks:
            if check.holds is False:
                measured = ", ".join(f"{name} {value:.3g}" for name, value in check.measured.items())
                yield Paragraph(f"Does not hold: {check.name} ({check.criterion}): {measured}", style="bad")

    def _settings(self) -> Table:
        """Return a table of the settings, one per line, with their test losses."""
        best = {id(arm.best) for arm in self.arms}
        rows = []
        for group in self.groups:
            losses = " ".join(format_loss(loss, "-") for loss in group.losses()) if len(group.runs) > 1 else ""
            cells = [
                group.wiring, str(group.num_layers), format_factor(group.lr), str(group.warm_up or "none"),
                format_loss(group.loss(), "-"), losses, str(group.diverged or ""), "yes" if id(group) in best else "",
            ]  # fmt: skip
            rows.append(TableRow(cells, "strong" if id(group) in best else ""))
        columns = [
            Column("wiring", fold=True), Column("layers", "right", drop="last"), Column("rate", "right"),
            Column("warm-up", "right", drop="last"), Column("test loss", "right"), Column("by seed", fold=True),
            Column("diverged", "right", drop="last"), Column("judged"),
        ]  # fmt: skip
        shown = [
            k for k, column in enumerate(columns) if column.header == "judged" or any(row.cells[k] for row in rows)
        ]
        return Table([columns[k] for k in shown], [TableRow([row.cells[k] for k in shown], row.style) for row in rows])
