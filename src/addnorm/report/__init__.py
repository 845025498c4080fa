"""The report: one file of HTML that tells of a model, or of a comparison, what was found, measured and proved.

    page = report.of_model(found, recording, ablations)
    report.write(page, "model.html")

A `Page` is data, `Section`s of blocks; what knows a subject (`model.py`) makes one, and `write` knows no subject.
"""

from addnorm.report.blocks import Facts, Figure, Finding, Findings, Formula, Page, Section, Table
from addnorm.report.comparison import of_comparison
from addnorm.report.figure import drawn
from addnorm.report.model import of_model, versions
from addnorm.report.page import check, render, write

__all__ = [
    "Facts",
    "Figure",
    "Finding",
    "Findings",
    "Formula",
    "Page",
    "Section",
    "Table",
    "check",
    "drawn",
    "of_comparison",
    "of_model",
    "render",
    "versions",
    "write",
]
