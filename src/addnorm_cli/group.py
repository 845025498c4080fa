"""The group of all commands: it turns exceptions and signals into a sentence and an exit code."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from addnorm_cli.commands import COMMANDS
from addnorm_cli.interrupts import INTERRUPTED, TERMINATED, raise_at_signals
from addnorm_cli.output_guard import PIPE_CLOSED, OutputError, drop_output, finish_output

COMPLETE = "_ADDNORM_COMPLETE"  # variable in which the shell asks for completion


class _Group(click.Group):
    """Group whose errors are one sentence each."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **__: Any) -> NoReturn:
        """Run a command and exit with its code."""
        if COMPLETE in os.environ:
            super().main(args, prog_name)
        with raise_at_signals() as received:
            code = self._run([*(sys.argv[1:] if args is None else args)], prog_name or "addnorm", received)
        # CPython sets a flag when a KeyboardInterrupt leaves code that runs from a string, such as the making of a dataclass.
        # With the flag set it ends by SIGINT, whatever the exit code is. Running other code from a string clears the flag.
        exec("")
        sys.exit(TERMINATED if code == INTERRUPTED and signal.SIGTERM in received else code)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with the whole first sentence of their help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(200)) for name, command in self.commands.items()])

    def _run(self, args: list[str], name: str, received: Sequence[int]) -> int:
        """Run a command and return its exit code. `received` lists the signals that arrived."""
        try:
            code = self._invoke(args, name, received)
            finish_output()
            return code
        except KeyboardInterrupt as interrupt:
            click.echo(" ".join(["Interrupted.", *map(str, interrupt.args)]), err=True)
            return INTERRUPTED
        except BrokenPipeError:
            drop_output()
            return PIPE_CLOSED
        except OutputError as error:
            click.echo(f"Error: {error}", err=True)
            return 1

    def _invoke(self, args: list[str], name: str, received: Sequence[int]) -> int:
        """Run a command, print its error if it fails, and return its exit code.

        After a signal an error of the command is raised as KeyboardInterrupt: a library may have turned the interrupt into it.
        """
        try:
            with self.make_context(name, args) as ctx:
                try:
                    self.invoke(ctx)
                except (BrokenPipeError, click.exceptions.Exit):
                    raise
                except Exception:
                    if received:
                        raise KeyboardInterrupt from None
                    raise
            return 0
        except click.exceptions.Exit as error:
            return error.exit_code
        except click.ClickException as error:
            error.show()
            return error.exit_code
        except BrokenPipeError:
            raise
        except (OSError, MemoryError) as error:
            click.echo(f"Error: {_describe(error)}.", err=True)
            return 1


def _describe(error: OSError | MemoryError) -> str:
    """Return an error of the system in a sentence."""
    if isinstance(error, MemoryError):
        return "the command needs more memory than this machine has: use smaller sizes"
    if error.errno is None:  # not an error of the system: its message is a sentence
        return str(error).rstrip(".")
    path = f"{error.filename!r}" if error.filename is not None else "a file"
    return f"{path} cannot be used ({error.strerror})"


addnorm = _Group(
    "addnorm",
    commands=COMMANDS,
    help=(
        "The transformer's Add & Norm: fused, exact, explained.\n\n"
        "To begin: addnorm trace 1,2,3 0.5,-1,1.5, then addnorm demo, explore, or inspect gpt2. "
        "Each command has a --help of its own."
    ),
    epilog=(
        "\b\nExit codes: 0 done, 1 failed, 2 bad arguments, 3 proof failed,\n"
        "  130 interrupted, 141 output no longer read, 143 terminated\n"
        "\n\b\nCompletion in bash, a line for ~/.bashrc (zsh: zsh_source, fish: fish_source):\n"
        f'  eval "$({COMPLETE}=bash_source addnorm)"'
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)
click.version_option(package_name="addnorm")(addnorm)
