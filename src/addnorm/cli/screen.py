"""Where results are printed: the terminal, or a pipe."""

from __future__ import annotations

import io
import os
import sys

from rich.console import Console

__all__ = ["screen", "wide"]


def screen() -> Console:
    """stdout; a terminal without Greek letters gets ?, not a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False)


def wide() -> Console:
    """The same for wide tables: 100 columns where nobody says how many there are."""
    there = screen()
    known = there.is_terminal or "COLUMNS" in os.environ
    return there if known else Console(highlight=False, width=100)
