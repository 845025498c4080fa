"""Reports: one self-contained HTML file about a model or a comparison.

    page = report.build_model_page(inspection, recording, ablations)
    report.write(page, "model.html")

`build_model_page` and `build_comparison_page` return a `Page`, which is data; `write` renders it.
"""

from addnorm._util.blocks import Finding, Table, TableRow
from addnorm.report.comparison import build_comparison_page
from addnorm.report.model import build_model_page, versions
from addnorm.report.page import (
    Facts,
    Figure,
    Findings,
    Formula,
    Page,
    Section,
    check_path,
    draw_figure,
    render,
    write,
)

__all__ = [
    "Facts",
    "Figure",
    "Finding",
    "Findings",
    "Formula",
    "Page",
    "Section",
    "Table",
    "TableRow",
    "build_comparison_page",
    "build_model_page",
    "check_path",
    "draw_figure",
    "render",
    "versions",
    "write",
]
