"""The command line: `addnorm COMMAND`. Results on stdout (`--json` for programs), progress on stderr.

Exit codes: 0 done; 2 the arguments were wrong; 3 a proof failed.
"""

from __future__ import annotations

import click

import addnorm


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(addnorm.__version__, package_name="addnorm")
def main() -> None:
    """The transformer's Add & Norm: fused, exact, explained."""
