"""Part of the demonstration that trains: post-LN against pre-LN, with a report. An interrupted run continues."""

from __future__ import annotations

from rich.console import Console

from addnorm import lab, report
from addnorm._util.optional import require
from addnorm._util.render import make_console
from addnorm.cli.demo._parts import FOLDER, part, print_written
from addnorm.lab.data import python_docs

WIRINGS = ("post_ln", "pre_ln")
PROTOCOL = lab.ILLUSTRATION
AT_INIT = True
JOBS: int | None = None


@part(
    "8. Post-LN against pre-LN, trained",
    f"{' and '.join(WIRINGS)}, each with warm-up and without: a character model of {PROTOCOL.num_layers[0]} layers learns "
    f"Python's documentation ({len(python_docs().text):,} characters), with the same batches and weights. "
    "Untrained stacks are compared with the figures of the papers.",
)
def compare_wirings(console: Console) -> bool:
    """Print the default comparison, write its report, and return whether the published figures at init are met."""
    path = FOLDER / "compare.html"
    report.check_path(path)
    require("joblib", "compare")
    comparison = lab.compare(
        WIRINGS, PROTOCOL, out=FOLDER, jobs=JOBS, at_init=AT_INIT, progress=make_console(stderr=True)
    )
    console.print()
    console.print(comparison)
    print_written(console, report.write(report.build_comparison_page(comparison, {"command": "addnorm demo"}), path))
    return all(check.holds is not False for check in comparison.checks)
