"""Parameters that several commands share, their types, and the values that the shell completes."""

from __future__ import annotations

import importlib.util
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

__all__ = [
    "COUNT", "FILE", "FOLDER", "PRESETS", "TEXT", "WIRINGS", "Numbers", "OneOf", "Real", "Whole", "complete_models",
    "complete_presets", "complete_wirings", "json_option", "model_parameters",
]  # fmt: skip

# Names to complete. They are those of addnorm, which a test compares: importing addnorm takes seconds.
WIRINGS = (
    "post_ln", "pre_ln", "sandwich", "peri_ln", "reordered", "deepnorm", "admin", "rezero", "skipinit", "layer_scale",
    "residual_multiplier", "depth_mup", "completep", "layernorm_scaling", "mix_ln", "no_norm", "no_residual", "parallel",
    "resi_dual", "b2t", "hyper_connections", "mhc", "independent_hc", "gated_residual", "depth_scaled", "gated_mix",
    "residual_scaling", "keel", "reversible", "ngpt", "siamese_norm", "attention_residuals", "denseformer", "muddformer",
    "x0_residual",
)  # fmt: skip
PRESETS = (
    "lesson-000", "lesson-001", "undo", "unbiased", "annotated-transformer", "rms-norm", "pre-ln", "constant",
)  # fmt: skip
DTYPES = ("float32", "float64", "bfloat16", "float16")
MODEL_TYPE = re.compile(r'^\s+\("([\w.-]+)", "\w+Config"\)', re.MULTILINE)  # an entry of transformers' table

LONGEST = 4095  # bytes of a path


class ParameterError(click.ClickException):
    """Wrong value of a parameter, reported in one sentence. Exit code 2."""

    exit_code = 2

    def __init__(self, param: click.Parameter | None, value: object, expected: str) -> None:
        name = "the value" if param is None else max([*param.opts, param.metavar or ""], key=len)
        text = repr(value)
        super().__init__(f"{name} is {text if len(text) <= 100 else f'{text[:99]}…'}, expected {expected}.")


class Whole(click.ParamType[Any]):
    """Whole number between two limits.

    Args:
        minimum: the smallest number.
        maximum: the largest number; None means no limit.
    """

    name = "whole number"

    def __init__(self, minimum: int, maximum: int | None = None) -> None:
        self.minimum, self.maximum = minimum, maximum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of a text."""
        number = value
        with suppress(ValueError):
            number = int(value)
            if number >= self.minimum and (self.maximum is None or number <= self.maximum):
                return number
        limit = "" if self.maximum is None else f" to {self.maximum}"
        raise ParameterError(param, number, f"a whole number from {self.minimum}{limit}")


class Real(click.ParamType[Any]):
    """Number, NaN and infinity included."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number of a text."""
        with suppress(ValueError):
            return float(value)
        raise ParameterError(param, value, "a number, as in 1e-5")


class Numbers(click.ParamType[Any]):
    """Numbers separated by commas.

    Args:
        kind: int or float.
    """

    name = "numbers"

    def __init__(self, kind: Callable[[str], Any]) -> None:
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the numbers of a text as a tuple."""
        kind, example = ("whole numbers", "6,12") if self.kind is int else ("numbers", "3e-4,1e-3")
        try:
            return tuple(map(self.kind, str(value).split(",")))
        except ValueError:
            raise ParameterError(param, value, f"{kind} separated by commas, as in {example}") from None


class OneOf(click.Choice[str]):
    """One of several words."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the word."""
        if value not in self.choices:
            raise ParameterError(param, value, f"one of {', '.join(self.choices)}")
        return str(value)


class PathName(click.ParamType[Any]):
    """Path of a file or folder, which need not exist. Devices are refused: they have no end.

    Args:
        completes: "file" or "dir", for the shell.
        pipes: accept named pipes. Reading one waits until another process writes.
    """

    name = "path"

    def __init__(self, completes: str = "file", *, pipes: bool = True) -> None:
        self.completes, self.pipes = completes, pipes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path of a text."""
        text, kind = str(value), "folder" if self.completes == "dir" else "file"
        if not text or "\0" in text or len(text.encode(errors="surrogateescape")) > LONGEST:
            raise ParameterError(param, text, f"the path of a {kind}")
        path = Path(text)
        with suppress(OSError):
            mode = path.stat().st_mode
            if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                raise ParameterError(param, text, f"a {kind}, not a device")
            if stat.S_ISFIFO(mode) and not self.pipes and not text.startswith("/dev/"):  # /dev/stdin has a writer
                raise ParameterError(param, text, f"a {kind}, not a named pipe")
        return path

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Let the shell complete paths."""
        return [CompletionItem(incomplete, type=self.completes)]


FILE, TEXT, FOLDER, COUNT = PathName(), PathName(pipes=False), PathName("dir"), Whole(1)


def complete_wirings(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of wirings that begin with a text."""
    return [name for name in WIRINGS if name.startswith(incomplete)]


def complete_presets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of worked examples that begin with a text."""
    return [name for name in PRESETS if name.startswith(incomplete)]


def complete_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the model types that begin with a text; the shell adds directories."""
    names = [name for name in ("minilm", *list_model_types()) if name.startswith(incomplete)]
    return [CompletionItem(incomplete, type="dir"), *map(CompletionItem, names)]


def list_model_types() -> list[str]:
    """Return the model types in transformers' own tables, which are read as text: the import takes seconds."""
    names: set[str] = set()
    with suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec("transformers")
        for folder in (spec.submodule_search_locations if spec else None) or ():
            for path in (Path(folder) / "models" / "auto").glob("*a*_*.py"):
                if path.name in ("auto_mappings.py", "configuration_auto.py"):
                    names.update(MODEL_TYPE.findall(path.read_text("utf-8")))
    return sorted(names)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")

MODEL_PARAMETERS = (
    click.argument("name", metavar="MODEL", shell_complete=complete_models),
    click.option("--text", type=TEXT, metavar="FILE", help="Texts for a model with a tokenizer, one a line."),
    click.option("--input", type=FILE, metavar="FILE", help="Inputs as named tensors: a .safetensors or .pt file."),
    click.option("--layers", type=Whole(1, 1000), metavar="N", help="Number of layers of a model type (default at most 3)."),
    click.option("--tokens", type=COUNT, metavar="N", help="Length of random inputs; longer texts are cut off."),
    click.option("--batch", type=COUNT, metavar="N", help="Number of random inputs, or of texts that are read at once."),
    click.option(
        "--dtype", type=OneOf(DTYPES), metavar="NAME",
        help="float32, float64, bfloat16 or float16 (default: that of the weights).",
    ),
    click.option("--seed", type=Whole(0, 2**63 - 1), default=0, metavar="N", help="Seed of weights and inputs (default 0)."),
    click.option("--train", is_flag=True, help="Use training mode, with dropout (default: evaluation mode)."),
    json_option,
)  # fmt: skip


MODEL = """
    MODEL is minilm, a model type of transformers such as gpt2, which is built small with random weights, a directory with a
    config.json, or module.path:factory, a function that returns (model, args, kwargs).
"""


def model_parameters(command: Callable[..., None]) -> Callable[..., None]:
    """Add the MODEL argument to a command, its help, and the options that say how to build and call the model."""
    text, mark, examples = (command.__doc__ or "").partition(r"    \b")
    command.__doc__ = f"{text.rstrip()}\n{MODEL}\n{mark}{examples}"
    for parameter in reversed(MODEL_PARAMETERS):
        command = parameter(command)
    return command
