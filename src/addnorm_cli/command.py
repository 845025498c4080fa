"""Commands whose code is imported when they run."""

import importlib.util
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import click
from click import Option

from addnorm_cli.interrupts import exit_at_signals
from addnorm_cli.output_guard import keep_output
from addnorm_cli.parameters import COUNT, FILE, MODEL, TEXT, one_of, whole

PATIENCE = 2.0  # seconds after which an import is announced

MODEL_PARAMETERS: tuple[click.Parameter, ...] = (
    click.Argument(["name"], metavar="MODEL", type=MODEL),
    Option(["--text"], type=TEXT, help="Texts for a model with a tokenizer, one a line."),
    Option(["--input"], type=FILE, help="Inputs as named tensors: a .safetensors or .pt file."),
    Option(["--layers"], type=whole(1, 1000), help="Number of layers of a model type (default at most 3)."),
    Option(["--tokens"], type=COUNT, help="Length of random inputs; longer texts are cut off."),
    Option(["--batch"], type=COUNT, help="Number of random inputs, or of texts that are read at once."),
    Option(
        ["--dtype"], type=one_of("float32", "float64", "bfloat16", "float16", metavar="NAME"),
        help="float32, float64, bfloat16 or float16 (default: that of the weights).",
    ),
    Option(["--seed"], type=whole(0, 2**63 - 1), default="0", help="Seed of weights and inputs (default 0)."),
    Option(["--train"], is_flag=True, help="Use training mode, with dropout (default: evaluation mode)."),
    Option(["--json", "as_json"], is_flag=True, help="Print one JSON document."),
)  # fmt: skip
ABOUT_MODEL = (
    "MODEL is minilm, a model type of transformers such as gpt2, which is built small with random weights, a directory with a "
    "config.json, or module.path:factory, a function that returns (model, args) or (model, args, kwargs)."
)


class Command(click.Command):
    """Command whose code is the function `run` of addnorm/cli/NAME.py: it takes the values of the parameters.

    Args:
        keeps_output: the output is the result of work: if stdout cannot be written, it is saved in a file.
        needs_torch: False for a command that computes without torch. Importing torch would take longer than the command.
    """

    def __init__(
        self, name: str | None, help: str = "", keeps_output: bool = True, needs_torch: bool = True, **options: Any
    ) -> None:
        help = help.replace(r"\b", "\b")  # click's mark for lines that are not wrapped
        super().__init__(name, help=help, **options)
        self.keeps_output, self.needs_torch = keeps_output, needs_torch

    def invoke(self, ctx: click.Context) -> None:
        """Import the code and call it."""
        try:
            os.getcwd()  # noqa: PTH109  # where it was deleted, oneMKL ends the process while torch is imported
        except OSError as error:
            reason = f"the working directory cannot be used ({error.strerror})"
            raise click.ClickException(f"{reason}: cd to another.") from None
        if self.keeps_output:
            keep_output()
        with _warnings_in_a_line(), nullcontext() if self.needs_torch else _package_alone():
            _import_code(f"{self.name}").run(**ctx.params)


class ModelCommand(Command):
    """Command with the MODEL argument, its help, and the options that say how to build and call the model."""

    def __init__(self, name: str | None, params: list[click.Parameter], help: str = "", **options: Any) -> None:
        text, mark, examples = inspect.cleandoc(help).partition(r"\b")
        help = f"{text}{ABOUT_MODEL}\n\n{mark}{examples}"
        model, *others = MODEL_PARAMETERS  # arguments of the command itself come after MODEL
        super().__init__(name, params=[model, *params, *others], help=help, **options)


def _import_code(name: str) -> Any:
    """Import the module of a command. Say so on stderr if it takes long."""
    timer = threading.Timer(PATIENCE, click.echo, ("Importing torch ...",), {"err": True})
    timer.daemon = True
    timer.start()
    try:
        with exit_at_signals():
            return importlib.import_module(f"addnorm.cli.{name}")
    except ImportError as error:
        raise click.ClickException(f"addnorm cannot be imported ({error}): install it again with pip.") from error
    finally:
        timer.cancel()


@contextmanager
def _package_alone() -> Iterator[None]:
    """Import modules of `addnorm` in the block without its `__init__`, which imports torch.

    If the package is imported already, nothing changes.
    """
    spec = None if "addnorm" in sys.modules else importlib.util.find_spec("addnorm")
    if spec is None:
        yield
        return
    sys.modules["addnorm"] = importlib.util.module_from_spec(spec)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "addnorm"]:
            del sys.modules[name]


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Print warnings as a line without the place in the code."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"Warning: {message}\n"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Failed to initialize NumPy", UserWarning
            )  # torch, whose base install lacks it
            yield
    finally:
        warnings.formatwarning = before
