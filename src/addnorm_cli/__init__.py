"""Grammar of the command line `addnorm COMMAND`: commands, options, help, completion, errors. No torch is imported here.

The package is beside `addnorm`, whose import takes seconds, so that help, version and completion answer at once. The code of
a command is in `addnorm/cli/COMMAND.py`, which is imported when the command runs.

- `group`: the group of all commands; exit codes
- `commands`: the commands with their parameters and help; `command`: how the code of one is imported and called
- `parameters`: types of parameters and completion
- `interrupts`: Ctrl-C and SIGTERM
- `output_guard`: stdout that is closed, full or no longer read

Exit codes: 0 done; 1 failed; 2 the arguments are wrong; 3 a proof failed; 130 interrupted; 141 the
reader of the output is gone; 143 ended by SIGTERM.
"""

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with its code."""
    from addnorm_cli.interrupts import end_at_signals, exit_at_signals

    with exit_at_signals():
        from addnorm_cli.output_guard import guard_streams

        guard_streams()
        from addnorm_cli.group import addnorm
    try:
        addnorm.main(arguments, "addnorm")
    except SystemExit as end:
        if arguments is None and isinstance(end.code, int):
            end_at_signals(end.code)
        raise
