"""Parameters that several commands share, their types, and the values that the shell completes."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

__all__ = [
    "FILE", "PRESETS", "WIRINGS", "Numbers", "complete_dtypes", "complete_models", "complete_presets", "complete_wirings",
    "json_option", "model_parameters",
]  # fmt: skip

# Names to complete. They are those of addnorm, which a test compares: importing addnorm takes seconds.
WIRINGS = (
    "post_ln", "pre_ln", "sandwich", "peri_ln", "reordered", "deepnorm", "admin", "rezero", "skipinit", "layer_scale",
    "residual_multiplier", "depth_mup", "completep", "layernorm_scaling", "mix_ln", "no_norm", "no_residual", "parallel",
    "resi_dual", "b2t",
)  # fmt: skip
PRESETS = (
    "lesson-000", "lesson-001", "undo", "unbiased", "annotated-transformer", "rms-norm", "pre-ln", "constant",
)  # fmt: skip
DTYPES = ("float32", "float64", "bfloat16", "float16")
MODEL_TYPE = re.compile(r'^\s+\("([\w.-]+)", "\w+Config"\)', re.MULTILINE)  # an entry of transformers' table

FILE = click.Path(path_type=Path)


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
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self.kind(part) for part in str(value).split(","))
        except ValueError:
            example = "6,12" if self.kind is int else "3e-4,1e-3"
            self.fail(f"{value!r}, expected numbers separated by commas, as in {example}.", param, ctx)


def complete_wirings(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of wirings that begin with a text."""
    return [name for name in WIRINGS if name.startswith(incomplete)]


def complete_presets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of worked examples that begin with a text."""
    return [name for name in PRESETS if name.startswith(incomplete)]


def complete_dtypes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the dtypes that begin with a text."""
    return [name for name in DTYPES if name.startswith(incomplete)]


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
    click.option("--text", type=FILE, metavar="FILE", help="Texts for a model with a tokenizer, one a line."),
    click.option("--input", type=FILE, metavar="FILE", help="Inputs as named tensors: a .safetensors or .pt file."),
    click.option("--layers", type=int, metavar="N", help="Number of layers of a model type (default at most 3)."),
    click.option("--tokens", type=int, metavar="N", help="Length of random inputs; longer texts are cut off."),
    click.option("--batch", type=int, metavar="N", help="Number of random inputs, or of texts that are read at once."),
    click.option(
        "--dtype", metavar="NAME", shell_complete=complete_dtypes,
        help="float32, float64, bfloat16 or float16 (default: that of the weights).",
    ),
    click.option("--seed", type=int, default=0, metavar="N", help="Seed of random weights and inputs (default 0)."),
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
