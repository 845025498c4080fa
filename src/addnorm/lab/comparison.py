"""Comparison of wirings: its results, the verdict that follows from them, and how both are printed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

from addnorm._util.tables import Block, Column, Paragraph, Rendered, Row, Table
from addnorm.lab.measure import Numbers
from addnorm.lab.results import Results
from addnorm.lab.verdict import Finding, findings
from addnorm.wirings.row import format_factor as number

__all__ = ["SCHEMA", "Comparison"]

SCHEMA = "addnorm.comparison"
VERSION = 1
WIDTH = 100  # columns of a sentence
DETAIL = ("losses", "recorded", "map", "after", "sites")  # numbers by step and depth, which only results.jsonl has


class Comparison(Results, Rendered):
    """Comparison that `addnorm.lab.compare` returns. It prints its verdict and a table of the settings."""

    @cached_property
    def verdict(self) -> list[Finding]:
        """The sentences that follow from the numbers, each with its criterion."""
        return findings(self)

    def to_dict(self) -> Numbers:
        """Return the comparison for JSON, without the numbers by step and depth, which are in the directory's results.jsonl."""
        return {
            "schema": SCHEMA, "schema_version": VERSION, "compared": [*self.compared], "protocol": self.protocol.settings(),
            "illustration": self.protocol.illustrates, "text": self.text,
            "verdict": [finding.to_dict() for finding in self.verdict],
            "checks": [check.as_dict() for check in self.checks],
            "runs": [{name: value for name, value in run.items() if name not in DETAIL} for run in self.runs],
        }  # fmt: skip

    def _blocks(self) -> Iterator[Block]:
        for finding in self.verdict:
            yield Paragraph(finding.sentence, hang=2, width=WIDTH)
        if self.groups:
            yield Paragraph("")
            yield self._settings()
            yield Paragraph(
                "Nats a character on the test part; in bold the setting by which each wiring is judged.", style="dim"
            )
        for check in self.checks:
            if check.holds is False:
                measured = ", ".join(f"{name} {value:.3g}" for name, value in check.measured.items())
                yield Paragraph(f"Not met: {check.name} ({check.criterion}): {measured}", style="bad")

    def _settings(self) -> Table:
        """Return a table with a row for each setting."""
        best = {id(arm.best) for arm in self.arms}
        rows = []
        for group in self.groups:
            losses = " ".join(map(_loss, group.losses())) if len(group.runs) > 1 else ""
            cells = [group.wiring, str(group.num_layers), number(group.lr), str(group.warm_up), _loss(group.loss()), losses,
                     str(group.diverged or "")]  # fmt: skip
            rows.append(Row(cells, "strong" if id(group) in best else ""))
        left = ("wiring", "by seed")
        names = ("wiring", "layers", "rate", "warm-up", "test loss", "by seed", "diverged")
        return Table([Column(name, "left" if name in left else "right", fold=True) for name in names], rows)


def _loss(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "-"
