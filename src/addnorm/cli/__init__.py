"""The command line: `addnorm COMMAND`. Results on stdout (`--json` for programs), progress on stderr."""

from addnorm.cli.group import main

__all__ = ["main"]
